"""One API server for all tests of this folder, and a namespace for each."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from tests.cluster.apiserver.server import CONTROLLERS, ApiServer, running, why_not_here


@pytest.fixture(scope="package")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Give an API server; skip with the reason where its programs are missing."""
    if reason := why_not_here():
        pytest.skip(reason)
    controllers = (*CONTROLLERS, "disruption-controller")
    with running(tmp_path_factory.mktemp("apiserver"), controllers=controllers) as server:
        yield server


@pytest.fixture
def namespace(apiserver: ApiServer, request: pytest.FixtureRequest) -> str:
    """Return a namespace of this test's own."""
    words = request.node.name.split("[")[0].replace("_", "-")[:50].rstrip("-")
    name = f"{words}-{zlib.crc32(request.node.name.encode()):08x}"
    apiserver.kubectl("create", "namespace", name)
    return name
