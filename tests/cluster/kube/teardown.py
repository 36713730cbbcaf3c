"""Removing all that a cluster of this machine consists of, however far its start came and whoever left it behind.

Nothing here relies on what a start wrote down: processes are found by their command line and their cgroup, mounts by
their place, the rest by its name. So it works after a start that failed half-way and after a run that was killed.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.cluster.kube.layout import BRIDGE, PREFIX, Layout
from tests.cluster.kube.shell import ClusterError, reap_daemons, run, until

__all__ = ["leftovers", "processes_of", "tear_down"]

_CGROUPS = Path("/sys/fs/cgroup")
_DAEMONS = frozenset(
    {
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "coredns",
        "containerd",
        "containerd-shim-runc-v2",
        "runc",
        "kubelet",
        "kube-proxy",
    }
)
"""Programs that a cluster consists of; only these are ended because their command line names its folder."""
_SHIM_SOCKETS = Path("/run/containerd/s")
_CONTAINER_LOGS = Path("/var/log/containers")
_CNI_RESULTS = Path("/var/lib/cni/results")


def tear_down(layout: Layout) -> None:
    """Remove the cluster; does nothing when there is none. Raises ClusterError when something cannot be removed."""
    until(lambda: not _end_processes(layout), "the cluster's processes have ended", timeout=30)
    reap_daemons()
    _unlink_outside(layout)
    for mount in _mounts(layout):
        run("umount", "--lazy", mount)
    for name in _links():
        run("ip", "link", "delete", name)
    for path in _namespaces():
        run("ip", "netns", "delete", path.name)
    until(lambda: not _remove_cgroups(), "the cluster's cgroups are empty", timeout=30)
    if layout.folder.exists():
        shutil.rmtree(layout.folder)
    left = leftovers(layout)
    if left:
        raise ClusterError(f"the cluster is not gone: {', '.join(left)}")


def leftovers(layout: Layout) -> list[str]:
    """Return what exists of a cluster, one thing per entry; empty when there is none."""
    return [
        *(f"process {pid}" for pid in _processes(layout)),
        *(f"mount {mount}" for mount in _mounts(layout)),
        *(f"link {name}" for name in _links()),
        *(f"network namespace {path.name}" for path in _namespaces()),
        *(f"cgroup {path}" for path in _cgroups()),
        *(f"file {path}" for path in (layout.folder, *_files_outside(layout)) if path.exists() or path.is_symlink()),
    ]


def _end_processes(layout: Layout) -> bool:
    found = False
    for pid in _processes(layout):
        found = True
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _processes(layout: Layout) -> set[int]:
    return _in_cgroups() | set(_daemons(layout))


def processes_of(node: str, pod: str) -> set[int]:
    """Return the processes of a pod, given by its uid."""
    return _in_cgroups(f"/{node}/", f"/pod{pod}")


def _in_cgroups(*parts: str) -> set[int]:
    """Processes of pods, of those whose cgroups have all of this in their names."""
    found: set[int] = set()
    for cgroup in _cgroups():
        if all(part in f"{cgroup}/" for part in parts):
            with suppress(OSError):
                found.update(map(int, (cgroup / "cgroup.procs").read_text().split()))
    return found


def _daemons(layout: Layout) -> Iterator[int]:
    """Processes of the control plane and of the nodes, and the shims between containerd and the pods."""
    folder = str(layout.folder) + "/"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(command[0]).name in _DAEMONS and any(folder in word for word in command):
                yield int(entry.name)


def _mounts(layout: Layout) -> list[str]:
    """Mount points under the cluster's folder, the innermost first."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = [line.split()[1].encode().decode("unicode_escape") for line in lines]
    return [point for point in reversed(points) if point.startswith(f"{layout.folder}/")]


def _links() -> list[str]:
    names = [path.name for path in Path("/sys/class/net").iterdir()]
    return [name for name in names if name == BRIDGE or name.startswith(PREFIX)]


def _namespaces() -> list[Path]:
    return list(Path("/run/netns").glob(f"{PREFIX}*"))


def _cgroups() -> list[Path]:
    """The nodes' cgroups in each hierarchy (there is one with cgroup v2), the innermost first."""
    tops = [top for pattern in (f"{PREFIX}*", f"*/{PREFIX}*") for top in _CGROUPS.glob(pattern) if _real(top)]
    return [Path(folder) for top in tops for folder, _, _ in os.walk(top, topdown=False)]


def _real(cgroup: Path) -> bool:
    """Some systems have the same hierarchy under two names, one a link."""
    return not cgroup.parent.is_symlink() and cgroup.is_dir()


def _remove_cgroups() -> bool:
    for cgroup in _cgroups():
        with suppress(OSError):
            cgroup.rmdir()
    return bool(_cgroups())


def _files_outside(layout: Layout) -> list[Path]:
    """What the daemons write to fixed places, whatever folder they are given."""
    logs = [link for link in _entries(_CONTAINER_LOGS) if link.is_symlink() and _within(link.readlink(), layout.folder)]
    results = [path for path in _entries(_CNI_RESULTS) if path.name.startswith(PREFIX)]
    addresses = layout.folder.glob("nodes/*/run/containerd/io.containerd.runtime.v2.task/*/*/address")
    sockets = [Path(path.read_text().strip().removeprefix("unix://")) for path in addresses]
    return [*logs, *results, *(path for path in sockets if path.parent == _SHIM_SOCKETS)]


def _unlink_outside(layout: Layout) -> None:
    for path in _files_outside(layout):
        path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _within(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder)
