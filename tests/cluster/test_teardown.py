"""A cluster of this machine leaves nothing behind, whatever happens to the run that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.cluster.kube.choose import given_cluster
from tests.cluster.kube.images import PROJECT
from tests.cluster.kube.kind import why_not_kind
from tests.cluster.kube.layout import NODES, Layout
from tests.cluster.kube.machine import machine_cluster, why_not_here
from tests.cluster.kube.shell import ClusterError, until
from tests.cluster.kube.teardown import leftovers

pytestmark = pytest.mark.cluster

RUN = """
import time
from tests.cluster.kube.machine import machine_cluster
with machine_cluster():
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def layout() -> Layout:
    layout = Layout.of_this_machine()
    if why_not_here():
        pytest.skip(f"no cluster of this machine: {why_not_here()}")
    if given_cluster(os.environ) or not why_not_kind():
        pytest.skip("the tests run on another cluster than one of this machine")
    if layout.kept.exists():
        pytest.skip("a cluster is kept up on this machine: python -m tests.cluster.kube down")
    return layout


@contextmanager
def another_run() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RUN]
    with subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert "up\n" in process.stdout


def test_a_terminated_run_takes_its_cluster_down(layout: Layout) -> None:
    with another_run() as process:
        wait_until_up(process)
        assert leftovers(layout)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    assert leftovers(layout) == []


def test_what_a_killed_run_left_is_gone_once_the_next_one_ends(layout: Layout) -> None:
    with another_run() as process:
        until((layout.logs / "kube-apiserver.log").exists, "its start is half done", timeout=60)
        process.kill()
        process.wait(timeout=60)
    assert leftovers(layout)
    with machine_cluster() as cluster:
        assert len(cluster.kubectl.items("nodes")) == NODES
    assert leftovers(layout) == []


def test_a_second_run_does_not_touch_the_cluster_of_the_first() -> None:
    with another_run() as process:
        wait_until_up(process)
        with pytest.raises(ClusterError, match="another test run uses the cluster"), machine_cluster():
            pass
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def test_a_failed_start_leaves_nothing(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cluster.kube.node.BRIDGE", "no-such-bridge")
    with pytest.raises(ClusterError, match="no-such-bridge"), machine_cluster():
        pass
    assert leftovers(layout) == []
