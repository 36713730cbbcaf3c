"""Breaking a cluster of this machine as hardware breaks: a cable is pulled, a kubelet or the API server is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.cluster.kube.control_plane import wait_for_api_server
from tests.cluster.kube.layout import Layout, NodeLayout
from tests.cluster.kube.node import start_in_node
from tests.cluster.kube.shell import ClusterError, run, start_daemon, stop_process
from tests.cluster.kube.teardown import processes_of

__all__ = ["Hardware", "MachineHardware"]


class Hardware(Protocol):
    """The parts of a cluster that a test may break. Nodes are named as Kubernetes names them."""

    def unplugged(self, node: str) -> AbstractContextManager[None]:
        """Pull a node's cable for as long as the block: it and its pods hear nobody, and nobody hears them."""

    def without_kubelet(self, node: str) -> AbstractContextManager[None]:
        """Kill a node's kubelet for as long as the block; its pods run on."""

    def without_api_server(self) -> AbstractContextManager[None]:
        """Kill the API server for as long as the block; it is ready when that has ended."""

    def crash(self, node: str, pod: str) -> None:
        """Kill all that runs in the containers of a pod, given by its uid, without asking anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineHardware:
    """The hardware of a cluster of this machine: links and processes, found by their names and command lines."""

    layout: Layout
    programs: Path

    @contextmanager
    def unplugged(self, node: str) -> Iterator[None]:
        """See Hardware; the cable is the link between the node's namespace and the bridge."""
        run("ip", "link", "set", node, "down")
        try:
            yield
        finally:
            run("ip", "link", "set", node, "up")

    @contextmanager
    def without_kubelet(self, node: str) -> Iterator[None]:
        """See Hardware; killed, not stopped, so that it says nothing on its way out."""
        pid, command = _process("kubelet", f"--hostname-override={node}")
        stop_process(pid)
        try:
            yield
        finally:
            start_in_node(self._node(node), command)

    @contextmanager
    def without_api_server(self) -> Iterator[None]:
        """See Hardware; what it knows is in etcd, which stays."""
        pid, command = _process("kube-apiserver", f"{self.layout.keys}/ca.crt")
        stop_process(pid)
        try:
            yield
        finally:
            start_daemon(command, self.layout.logs / "kube-apiserver.log")
            wait_for_api_server(self.layout, self.programs)

    def crash(self, node: str, pod: str) -> None:
        """See Hardware; the process that holds the pod's namespaces open stays, as when its containers crash."""
        for pid in processes_of(node, pod):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() != "pause":
                    os.kill(pid, signal.SIGKILL)

    def _node(self, name: str) -> NodeLayout:
        return next(node for node in self.layout.nodes if node.name == name)


def _process(program: str, word: str) -> tuple[int, list[str]]:
    """Return the one process of a program whose command line has the word, and that command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
                if Path(command[0]).name == program and any(word in argument for argument in command[1:]):
                    return int(entry.name), command
    raise ClusterError(f"no process of {program} with {word} in its command line")
