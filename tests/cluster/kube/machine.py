"""A cluster on this machine, without Docker: control plane as processes, nodes as network namespaces."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from tests.cluster.kube.binaries import build_missing, missing_programs, program_folder
from tests.cluster.kube.control_plane import start_control_plane
from tests.cluster.kube.hardware import MachineHardware
from tests.cluster.kube.images import PROJECT, build_image, pause_archive
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.layout import NODES, Layout, NodeLayout
from tests.cluster.kube.node import CNI_FOLDERS, CNI_PLUGINS, import_image, start_node
from tests.cluster.kube.shell import ClusterError, until
from tests.cluster.kube.teardown import leftovers, tear_down
from tests.cluster.kube.training import Training, make_shared, mounted_training

__all__ = ["MachineCluster", "bring_down", "bring_up", "machine_cluster", "why_not_here"]

_PACKAGE_OF = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "sysctl": "procps",
    "openssl": "openssl",
}
"""What has to be installed, by the command that shows that it is; the pods' network plugins are no commands."""
_CNI_PACKAGE = "containernetworking-plugins"
_LOCK_SECONDS = 5.0
"""How long the cluster may stay locked before a run that uses it counts as alive.

A child between fork and exec holds its parent's open files: of a run that was killed in that instant, the lock outlives
the process until the child executes its program, which takes longer on a busy machine.
"""


def why_not_here() -> str:
    """Return what this machine lacks, in words; empty when it can carry a cluster."""
    if os.geteuid() != 0:
        return "not root"
    if missing_programs(program_folder()) and not shutil.which("go"):
        return "no Go to build Kubernetes with"
    missing = {package for command, package in _PACKAGE_OF.items() if not shutil.which(command)}
    if not any(all((folder / plugin).exists() for plugin in CNI_PLUGINS) for folder in CNI_FOLDERS):
        missing.add(_CNI_PACKAGE)
    return f"missing packages: apt-get install {' '.join(sorted(missing))}" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCluster:
    """A running cluster of this machine."""

    layout: Layout

    @property
    def kubeconfig(self) -> Path:
        """Credentials of an administrator."""
        return self.layout.kubeconfig

    @property
    def kubectl(self) -> Kubectl:
        """The command for this cluster."""
        return Kubectl(program=program_folder() / "kubectl", kubeconfig=self.kubeconfig)

    def operator_image(self, source: Path = PROJECT) -> str:
        """Build the operator's image and give it to the nodes."""
        return self._provide("operator", source)

    def training(self, source: Path = PROJECT) -> Training:
        """Build the trainer's image and give it to the nodes."""
        return mounted_training(self._provide("trainer", source), shared=self.layout.shared)

    @property
    def hardware(self) -> MachineHardware:
        """Its cables and processes."""
        return MachineHardware(layout=self.layout, programs=program_folder())

    def _provide(self, target: str, source: Path) -> str:
        image = build_image(target, source)
        with ThreadPoolExecutor() as side_by_side:
            list(side_by_side.map(partial(_import_once, image.archive), self.layout.nodes))
        return image.name


def _import_once(archive: Path, node: NodeLayout) -> None:
    imported = node.folder / archive.name
    if not imported.exists():
        import_image(node, archive)
        imported.touch()


@contextmanager
def machine_cluster() -> Iterator[MachineCluster]:
    """Bring a cluster up and take it down at the end; one that a person keeps up is used and left as it is."""
    layout = Layout.of_this_machine()
    with _locked(layout), _terminated_as_interrupted():
        if layout.kept.exists():
            yield MachineCluster(layout=layout)
            return
        try:
            yield _start(layout)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a run that is ended as it ends would leave the half of it
            tear_down(layout)


def bring_up() -> MachineCluster:
    """Bring a cluster up that stays until ``bring_down``; raises ClusterError, and then nothing is left."""
    layout = Layout.of_this_machine()
    with _locked(layout), _terminated_as_interrupted():
        if layout.kept.exists():
            return MachineCluster(layout=layout)
        try:
            cluster = _start(layout)
        except BaseException:
            tear_down(layout)
            raise
        layout.kept.touch()
        return cluster


def bring_down() -> None:
    """Remove the cluster of this machine, whoever left it; raises ClusterError while a test run uses it."""
    layout = Layout.of_this_machine()
    with _locked(layout):
        tear_down(layout)


def _start(layout: Layout) -> MachineCluster:
    """Start on clean ground: an earlier run may have been killed."""
    reason = why_not_here()
    if reason:
        raise ClusterError(f"this machine cannot carry a cluster: {reason}")
    programs = build_missing()
    if leftovers(layout):
        tear_down(layout)
    layout.folder.mkdir(mode=0o755)
    make_shared(layout.shared)
    start_control_plane(layout, programs)
    for node in layout.nodes:
        start_node(layout, node, programs)
        import_image(node, pause_archive(programs))
    cluster = MachineCluster(layout=layout)
    until(lambda: _ready_nodes(cluster) == NODES, f"{NODES} nodes are ready", timeout=60)
    return cluster


def _ready_nodes(cluster: MachineCluster) -> int:
    conditions = [
        (condition["type"], condition["status"])
        for node in cluster.kubectl.items("nodes")
        for condition in node["status"].get("conditions", ())
    ]
    return conditions.count(("Ready", "True"))


@contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    """Hold the machine's cluster; raises ClusterError when another process does. The kernel frees it at our death."""
    with layout.lock.open("w") as file:
        until(
            lambda: _lock(file),
            f"another test run uses the cluster of this machine ({layout.lock} is locked): waited for its end",
            timeout=_LOCK_SECONDS,
        )
        yield


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end a test run as Ctrl-C does, by way of all that has to be cleaned up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
