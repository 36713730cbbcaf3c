"""Names and addresses of the cluster that this machine carries, and where its files lie.

They are fixed, so that whatever an earlier run left behind (it may have been killed) can be found and removed by name.
So there is at most one such cluster on a machine, and a lock says whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "BRIDGE",
    "HOST_ADDRESS",
    "NODES",
    "POD_NETWORK",
    "PREFIX",
    "SERVICE_NETWORK",
    "Layout",
    "NodeLayout",
]

PREFIX = "fthsdp-n"
"""Every network namespace, link and cgroup of a node begins with this."""
BRIDGE = "fthsdp-br0"
"""The switch between this machine and the nodes."""
HOST_ADDRESS = "10.189.0.1"
"""This machine as the nodes and pods see it: API server and DNS."""
POD_NETWORK = "10.190.0.0/16"
SERVICE_NETWORK = "10.191.0.0/16"
NODES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """One node: a network namespace with a containerd, a kubelet and a kube-proxy of its own."""

    index: int
    """1 …"""
    folder: Path

    @property
    def name(self) -> str:
        """Name of the node, of its network namespace, of its link and of its cgroups."""
        return f"{PREFIX}{self.index}"

    @property
    def address(self) -> str:
        """Address of the node."""
        return f"10.189.0.{10 + self.index}"

    @property
    def pod_network(self) -> str:
        """Addresses of its pods."""
        return f"10.190.{self.index}.0/24"

    @property
    def namespace(self) -> Path:
        """File that holds the network namespace."""
        return Path("/run/netns") / self.name

    @property
    def socket(self) -> Path:
        """Socket of its containerd."""
        return self.folder / "run" / "containerd.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The cluster's folder and what lies where in it."""

    folder: Path

    @classmethod
    def of_this_machine(cls) -> Layout:
        """Return the one place where a cluster of this machine lives: temporary, but on a disk, not in memory."""
        return cls(folder=Path("/var/tmp/fthsdp-kube"))

    @property
    def lock(self) -> Path:
        """Held by the process that uses the cluster; where only root can put a file."""
        return Path("/run") / f"{self.folder.name}.lock"

    @property
    def kept(self) -> Path:
        """Exists once the cluster was brought up to stay, for a person."""
        return self.folder / "kept"

    @property
    def keys(self) -> Path:
        """Certificates and private keys."""
        return self.folder / "keys"

    @property
    def logs(self) -> Path:
        """One log per daemon."""
        return self.folder / "logs"

    @property
    def shared(self) -> Path:
        """Folder that pods on all nodes may share."""
        return self.folder / "shared"

    @property
    def kubeconfig(self) -> Path:
        """Credentials of the cluster's administrator."""
        return self.folder / "kubeconfig"

    @property
    def nodes(self) -> tuple[NodeLayout, ...]:
        """The nodes, first one first."""
        return tuple(
            NodeLayout(index=index, folder=self.folder / "nodes" / f"{PREFIX}{index}") for index in range(1, NODES + 1)
        )
