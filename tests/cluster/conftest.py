"""The cluster that all tests of this folder share: started for the first one that asks, gone when the last is done."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.cluster.kube.binaries import build_missing, find_helm
from tests.cluster.kube.choose import NoClusterError, builds_its_own, choose_cluster
from tests.cluster.kube.cluster import Cluster
from tests.cluster.kube.shell import ClusterError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that need no cluster, or start one of their own, before the shared one exists."""
    items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build Kubernetes' programs where these tests need them: without any cache that takes longer than a test may."""
    if session.items and not session.config.option.collectonly and builds_its_own():
        try:
            build_missing()
        except ClusterError as error:
            pytest.exit(f"Kubernetes' programs cannot be built: {error}", returncode=1)


@pytest.fixture(scope="session")
def helm() -> Path:
    """Give the program; skip where there is none."""
    found = find_helm()
    if found is None:
        pytest.skip("no helm: neither installed nor built with the cluster's programs")
    return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Give a cluster; skip with the reason where there is none."""
    try:
        chosen = choose_cluster()
    except NoClusterError as reason:
        pytest.skip(str(reason))
    with chosen as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what somebody wants to see of a cluster, beside a test of its stage that failed."""
    report = yield
    stage = getattr(item, "funcargs", {}).get("stage")
    if report.failed and stage is not None:
        report.sections.append(("the cluster", stage.diagnosis()))
    return report
