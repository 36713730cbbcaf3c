"""What a test may ask of a cluster, whichever one it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tests.cluster.kube.hardware import Hardware
from tests.cluster.kube.images import PROJECT
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.training import Training

__all__ = ["Cluster"]


class Cluster(Protocol):
    """A Kubernetes with at least two nodes that run pods."""

    @property
    def kubeconfig(self) -> Path:
        """Credentials of an administrator."""

    @property
    def kubectl(self) -> Kubectl:
        """The command for this cluster."""

    @property
    def hardware(self) -> Hardware | None:
        """What of it a test may break; None where that is not ours."""

    def operator_image(self, source: Path = PROJECT) -> str:
        """Make the operator's image, of this folder's code, known to the nodes and return its name."""

    def training(self, source: Path = PROJECT) -> Training:
        """Make the trainer's image, of this folder's code, known to the nodes and return how to run a script in it."""
