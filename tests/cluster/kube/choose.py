"""Which cluster the tests get: a given one, else kind where Docker runs, else one of this machine, else none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kube.binaries import program_folder
from tests.cluster.kube.cluster import Cluster
from tests.cluster.kube.images import PROJECT
from tests.cluster.kube.kind import kind_cluster, why_not_kind
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.machine import machine_cluster, why_not_here
from tests.cluster.kube.shell import ClusterError
from tests.cluster.kube.training import Training

__all__ = ["GivenCluster", "NoClusterError", "builds_its_own", "choose_cluster", "given_cluster"]

_KUBECONFIGS = ("FTHSDP_TEST_KUBECONFIG", "KUBECONFIG")
_IMAGES = {"operator": "FTHSDP_TEST_OPERATOR_IMAGE", "trainer": "FTHSDP_TEST_TRAINER_IMAGE"}


class NoClusterError(ClusterError):
    """There is no way to a cluster; the message says what would open one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCluster:
    """A cluster that exists already. Its nodes pull the images from a registry, so those are given as well."""

    kubeconfig: Path
    kubectl: Kubectl
    images: Mapping[str, str]
    hardware: None = None

    def operator_image(self, source: Path = PROJECT) -> str:
        """Return the image that was given, whatever the source."""
        return self.images["operator"]

    def training(self, source: Path = PROJECT) -> Training:
        """Run scripts with the given image's own Python, whatever the source; it has to contain torch."""
        return Training(image=self.images["trainer"], python="python3")


def choose_cluster(env: Mapping[str, str] = os.environ) -> AbstractContextManager[Cluster]:
    """Return the cluster to test on; it is brought up on entry and removed on exit, except a given one.

    Raises NoClusterError when there is none to be had.
    """
    given = given_cluster(env)
    if given:
        return _as_it_is(given)
    no_docker = why_not_kind()
    if not no_docker:
        return kind_cluster()
    not_here = why_not_here()
    if not not_here:
        return machine_cluster()
    raise NoClusterError(
        f"no cluster: {' and '.join(_KUBECONFIGS)} are not set, kind cannot run here ({no_docker}),"
        f" and neither can Kubernetes itself ({not_here})"
    )


def builds_its_own(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the cluster to test on is one that this machine builds and runs itself."""
    return not any(env.get(name) for name in _KUBECONFIGS) and bool(why_not_kind()) and not why_not_here()


def given_cluster(env: Mapping[str, str]) -> GivenCluster | None:
    """Return the cluster that the environment names, or None; raises NoClusterError when it is incomplete."""
    name = next((name for name in _KUBECONFIGS if env.get(name)), None)
    if name is None:
        return None
    kubeconfig = Path(env[name])
    if not kubeconfig.is_file():
        raise NoClusterError(f"{name}={kubeconfig} is not a file")
    missing = [variable for variable in _IMAGES.values() if not env.get(variable)]
    if missing:
        raise NoClusterError(f"{name} is set, but its nodes need images to pull: set {' and '.join(missing)}")
    images = {target: env[variable] for target, variable in _IMAGES.items()}
    return GivenCluster(
        kubeconfig=kubeconfig, kubectl=Kubectl(program=_kubectl(), kubeconfig=kubeconfig), images=images
    )


def _kubectl() -> Path:
    built = program_folder() / "kubectl"
    found = str(built) if built.exists() else shutil.which("kubectl")
    if not found:
        raise NoClusterError("kubectl is not installed")
    return Path(found)


@contextmanager
def _as_it_is(cluster: GivenCluster) -> Iterator[Cluster]:
    yield cluster
