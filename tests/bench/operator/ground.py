"""What the operator is measured on: a real API server, scheduler and garbage collector, and nodes that do not exist.

Nor are there coordinators: whoever calls one is connected, and hears nothing. It is the worst that can happen to an
operator, and what it has to be as quick in as otherwise.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.operator.client import Api
from tests.bench.processes import BenchmarkFailed
from tests.cluster.apiserver import server
from tests.cluster.kube.binaries import FAKE_NODES, PROGRAMS, Program, build_missing, missing_programs
from tests.cluster.kube.shell import ClusterError

from fthsdp_operator.manifests.render import COORDINATOR_PORT

__all__ = ["GPUS", "Ground", "bring_programs", "ground"]

GPUS = 8
"""Of each training pod; a node has twice as many."""
STAGES = Path(__file__).with_name("stages.yaml")
POD_NETWORK = "127.64.0.0/10"
"""Addresses of pods: of this machine itself, so that who calls one finds what listens here on all of them."""
CALLS_PER_SECOND = 1000
"""Of the scheduler and the controllers: with the 20 to 50 that they have otherwise, only that would be measured."""
OPTIONS = ("--disable-admission-plugins=TaintNodesByCondition", "--delete-collection-workers=16")
"""Of the API server. Nodes are born ready here, and no controller takes a taint away again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A running cluster without a kubelet."""

    kubeconfig: Path
    api: Api
    folder: Path
    """For logs."""

    def add_nodes(self, count: int) -> None:
        """Add nodes, ready ones, with room for two training pods each: full ones cost a scheduler a long search."""
        self.api.create_all("api/v1/nodes", (_node(index) for index in range(count)))


def _needed() -> tuple[Program, ...]:
    names = (*server.PROGRAMS, "kube-scheduler")
    return (*(program for program in PROGRAMS if program.name in names), FAKE_NODES)


def bring_programs() -> None:
    """Make sure that the programs are there; build them where that can be. Raises BenchmarkFailed with one sentence."""
    missing = missing_programs(server.programs(), _needed())
    if not missing:
        return
    names = ", ".join(program.name for program in missing)
    lacking = f"no {names} in {server.programs()}"
    if os.environ.get("FTHSDP_KUBE_BIN"):
        raise BenchmarkFailed(f"{lacking}, which FTHSDP_KUBE_BIN names: put them there, or unset it to have them built")
    if shutil.which("go") is None:
        raise BenchmarkFailed(f"{lacking}, and no Go to build them: install Go, or name a folder with FTHSDP_KUBE_BIN")
    try:
        build_missing(_needed())
    except ClusterError as error:
        raise BenchmarkFailed(f"{lacking}, and they cannot be built: {error}") from error


@contextmanager
def ground(
    folder: Path, *, controllers: Sequence[str] = server.CONTROLLERS, silent_coordinators: bool = True
) -> Iterator[Ground]:
    """Start it, with its files in ``folder``; gone when this returns."""
    folder.mkdir()
    with ExitStack() as stack:
        if silent_coordinators:
            stack.enter_context(_silent_coordinators())
        try:
            running = server.running(folder, *OPTIONS, controllers=controllers, calls_per_second=CALLS_PER_SECOND)
            kubeconfig = stack.enter_context(running).kubeconfig
        except ClusterError as error:
            raise BenchmarkFailed(str(error)) from error
        stack.enter_context(server.daemon(folder, _scheduler(kubeconfig)))
        stack.enter_context(server.daemon(folder, _kubelets(kubeconfig)))
        yield Ground(kubeconfig=kubeconfig, api=Api.of(kubeconfig), folder=folder)


@contextmanager
def _silent_coordinators() -> Iterator[None]:
    """Let every connection to a coordinator succeed and nobody ever answer on it, as when its node froze."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", COORDINATOR_PORT))
        except OSError as error:
            raise BenchmarkFailed(f"port {COORDINATOR_PORT}, on which coordinators listen: {error.strerror}") from error
        listener.listen(4096)
        yield


def _scheduler(kubeconfig: Path) -> list[str]:
    return [
        *("kube-scheduler", f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0"),
        *(f"--kube-api-qps={CALLS_PER_SECOND}", f"--kube-api-burst={CALLS_PER_SECOND}"),
    ]


def _kubelets(kubeconfig: Path) -> list[str]:
    return [
        *("kwok", f"--kubeconfig={kubeconfig}", f"--config={STAGES}", "--manage-all-nodes", f"--cidr={POD_NETWORK}"),
        *("--v=WARN", "--node-lease-duration-seconds=0"),  # nobody here looks for a kubelet that went silent
    ]


def _node(index: int) -> dict[str, object]:
    room = {"cpu": "128", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": str(2 * GPUS)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"node-{index}"},
        "status": {
            "allocatable": room,
            "capacity": room,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }
