"""The project as it was before its chart was changed last: what somebody has installed who upgrades often."""

from __future__ import annotations

import tarfile
from pathlib import Path

from tests.cluster.kube.images import BUILD_INPUTS, PROJECT
from tests.cluster.kube.shell import ClusterError, run

__all__ = ["NoHistoryError", "check_out_before"]

_CHARTS = "charts"


class NoHistoryError(ClusterError):
    """Nobody knows what was before; the message says why not."""


def check_out_before(folder: Path, *, project: Path = PROJECT) -> str:
    """Write into a folder what the images and the chart were made of then, and return the commit.

    That is the newest commit whose chart is another one than that of the working tree. Raises NoHistoryError where git
    is not installed, the project is no checkout, or the history does not reach so far back.
    """
    try:
        commit = _before(project)
        archive = folder / "before.tar"
        _git(project, "archive", f"--output={archive}", commit, _CHARTS, "examples", *BUILD_INPUTS)
    except ClusterError as error:
        raise NoHistoryError(f"what was before the chart was changed last is not to be had: {error}") from error
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return commit


def _before(project: Path) -> str:
    """Walk back over merges as git does: a side branch that left the chart alone is not looked at."""
    if _git(project, "status", "--porcelain", "--", _CHARTS):
        return _git(project, "rev-parse", "HEAD")
    changed = _git(project, "log", "-1", "--format=%H", "--", _CHARTS)
    return _git(project, "rev-parse", "--verify", "--quiet", f"{changed}^")


def _git(project: Path, *arguments: str) -> str:
    return run("git", "-C", project, *arguments).strip()
