"""The programs of a Kubernetes, built from Go modules once and kept in the user's cache folder.

Where neither a cluster nor Docker is at hand, Go modules still are: all of Kubernetes, etcd, CoreDNS and Helm build
from them, without cgo, in about ten minutes on two cores. Each program is put in place by a rename when its build has
succeeded, so that an interrupted build never leaves half a program, and the next one goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kube.shell import run

__all__ = [
    "FAKE_NODES",
    "KUBERNETES",
    "PROGRAMS",
    "Program",
    "build_missing",
    "cache_folder",
    "find_helm",
    "kubernetes_go_mod",
    "missing_programs",
    "program_folder",
]

KUBERNETES = "1.37.2"
_BUILD_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program and the package it is built from."""

    name: str
    package: str
    module: str = ""
    """module@version; empty for the programs of Kubernetes itself, and for those of this folder."""


_PAUSE = Program(name="pause", package=str(Path(__file__).with_name("pause.go")))
PROGRAMS = (
    *(
        Program(name=name, package=f"k8s.io/kubernetes/cmd/{name}")
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
    ),
    Program(name="etcd", package="go.etcd.io/etcd/server/v3", module="go.etcd.io/etcd/server/v3@v3.7.3"),
    Program(name="helm", package="helm.sh/helm/v4/cmd/helm", module="helm.sh/helm/v4@v4.3.1"),
    Program(name="coredns", package="github.com/coredns/coredns", module="github.com/coredns/coredns@v1.15.0"),
    _PAUSE,
)
FAKE_NODES = Program(name="kwok", package="sigs.k8s.io/kwok/cmd/kwok", module="sigs.k8s.io/kwok@v0.8.0")
"""Plays the kubelets of nodes that do not exist, for benchmarks of the operator. No cluster needs it."""


def cache_folder() -> Path:
    """Return the folder for what is dear to make and the same in every clone."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fthsdp"


def program_folder() -> Path:
    """Return the folder that holds the programs of this version."""
    return cache_folder() / f"kubernetes-{KUBERNETES}" / "bin"


def missing_programs(folder: Path, wanted: Sequence[Program] = PROGRAMS) -> tuple[Program, ...]:
    """Return those that have to be built before a cluster, or what else wants them, can start."""
    return tuple(program for program in wanted if not os.access(folder / program.name, os.X_OK))


def find_helm() -> Path | None:
    """Return a Helm 4 or 3: the one that was built, else the user's own, else None."""
    built = program_folder() / "helm"
    found = str(built) if built.exists() else shutil.which("helm")
    return Path(found) if found else None


def build_missing(wanted: Sequence[Program] = PROGRAMS) -> Path:
    """Build what is missing and return the folder; about ten minutes when all of it is. Raises ClusterError."""
    folder = program_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"), tempfile.TemporaryDirectory(prefix="fthsdp-build-") as work:
        missing = missing_programs(folder, wanted)
        if any(not program.module and program is not _PAUSE for program in missing):
            _write_kubernetes_module(Path(work) / "kubernetes")
        for program in missing:
            print(f"building {program.name} into {folder}", flush=True)
            _build(program, folder, Path(work))
    return folder


def _build(program: Program, folder: Path, work: Path) -> None:
    unfinished = folder / f".{program.name}.unfinished"
    run(
        *("nice", "go", "build", "-o", unfinished, "-ldflags", _linker_flags(program), program.package),
        cwd=_module_folder(program, work),
        env=_environment(),
        timeout=_BUILD_TIMEOUT,
    )
    unfinished.rename(folder / program.name)


def _module_folder(program: Program, work: Path) -> Path:
    if program is _PAUSE:
        return work
    if not program.module:
        return work / "kubernetes"
    folder = work / program.name
    folder.mkdir()
    run("go", "mod", "init", f"build/{program.name}", cwd=folder, env=_environment())
    run("go", "get", program.module, cwd=folder, env=_environment(), timeout=_BUILD_TIMEOUT)
    return folder


def _linker_flags(program: Program) -> str:
    """Strip; and tell Kubernetes its version, which kubectl otherwise cannot make sense of."""
    major, minor, _ = KUBERNETES.split(".")
    version = "k8s.io/component-base/version"
    told = f" -X {version}.gitVersion=v{KUBERNETES} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
    return "-s -w" + ("" if program.module or program is _PAUSE else told)


def _environment() -> dict[str, str]:
    return {"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod"}


def _write_kubernetes_module(folder: Path) -> None:
    """Write a go.mod that takes Kubernetes and its staging modules from the module proxy.

    In the published module they have the version v0.0.0 and a replacement by a relative path; each is published as
    well, with the same minor and patch. ``go mod tidy`` would ask for modules that only tests need and nobody serves.
    """
    folder.mkdir()
    run("go", "mod", "download", f"k8s.io/kubernetes@v{KUBERNETES}", cwd=folder, timeout=_BUILD_TIMEOUT)
    sources = Path(run("go", "env", "GOMODCACHE").strip()) / f"k8s.io/kubernetes@v{KUBERNETES}"
    (folder / "go.mod").write_text(kubernetes_go_mod((sources / "go.mod").read_text()))


def kubernetes_go_mod(published: str) -> str:
    """Return the go.mod of a module that builds Kubernetes' commands, made from the one that it publishes."""
    settings = re.findall(r"^(?:go|godebug) .+$", published, re.M)
    staging = sorted(set(re.findall(r"^\s*(k8s\.io/\S+) v0\.0\.0$", published, re.M)))
    version = "v0." + KUBERNETES.split(".", 1)[1]
    replaced = (f"\t{name} => {name} {version}" for name in staging)
    required = f"require k8s.io/kubernetes v{KUBERNETES}"
    return "\n".join(["module build/kubernetes", *settings, required, "replace (", *replaced, ")", ""])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time build; the kernel drops the lock with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
