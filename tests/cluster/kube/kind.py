"""A cluster of containers, where a Docker engine runs: what most people have."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kube.images import PROJECT, build_inputs, inputs_hash
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.shell import ClusterError, run
from tests.cluster.kube.training import HOST_FOLDERS, Training, make_shared, mounted_training

__all__ = ["KindCluster", "kind_cluster", "why_not_kind"]

_NAME = "fthsdp-test"
_PROGRAMS = ("docker", "kind", "kubectl")
_BASE_IMAGE = "docker.io/library/python:3.11-slim"
"""Of both images; the trainer's torch is mounted from this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCluster:
    """A running kind cluster."""

    kubeconfig: Path
    shared: Path
    hardware: None = None

    @property
    def kubectl(self) -> Kubectl:
        """The command for this cluster."""
        return Kubectl(program=Path(shutil.which("kubectl") or "kubectl"), kubeconfig=self.kubeconfig)

    def operator_image(self, source: Path = PROJECT) -> str:
        """Build the operator's image and load it into the nodes."""
        return self._provide("operator", source)

    def training(self, source: Path = PROJECT) -> Training:
        """Build the trainer's image and load it into the nodes."""
        return mounted_training(self._provide("trainer", source), shared=self.shared)

    def _provide(self, target: str, source: Path) -> str:
        bases = [f"--build-arg={argument}={_BASE_IMAGE}" for argument in ("PYTHON_IMAGE", "TORCH_IMAGE")]
        with build_inputs(source) as context:
            name = f"fthsdp-{target}:{inputs_hash(context)}"
            run("docker", "build", f"--target={target}", f"--tag={name}", *bases, context, timeout=900)
        run("kind", "load", "docker-image", name, "--name", _NAME, timeout=600)
        return name


def why_not_kind() -> str:
    """Return why kind cannot run here, in words; empty when it can."""
    missing = [program for program in _PROGRAMS if not shutil.which(program)]
    if missing:
        return f"{' and '.join(missing)} not installed"
    try:
        run("docker", "version", timeout=20)
    except ClusterError:
        return "no Docker engine answers"
    return ""


@contextmanager
def kind_cluster() -> Iterator[KindCluster]:
    """Create a cluster, and delete it at the end; also one that an earlier run left behind."""
    with tempfile.TemporaryDirectory(prefix="fthsdp-kind-") as folder:
        kubeconfig, shared = Path(folder) / "kubeconfig", Path(folder) / "shared"
        make_shared(shared)
        _delete()
        try:
            run(
                *("kind", "create", "cluster", "--name", _NAME, "--kubeconfig", kubeconfig, "--config", "-"),
                stdin=json.dumps(_configuration(shared)),
                timeout=900,
            )
            yield KindCluster(kubeconfig=kubeconfig, shared=shared)
        finally:
            _delete()


def _delete() -> None:
    run("kind", "delete", "cluster", "--name", _NAME)


def _configuration(shared: Path) -> dict[str, object]:
    """Two workers that see this machine's Python, its packages and the shared folder at the same paths."""
    mounts = [{"hostPath": str(folder), "containerPath": str(folder), "readOnly": True} for folder in HOST_FOLDERS]
    mounts.append({"hostPath": str(shared), "containerPath": str(shared), "readOnly": False})
    worker = {"role": "worker", "extraMounts": mounts}
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": "control-plane"}, worker, worker],
    }
