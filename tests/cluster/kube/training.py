"""How the tests' training pods get torch.

torch is gigabytes: rather than building it into an image, the pods mount the environment that runs these tests,
read-only, and take only the training library from the image under test.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["HOST_FOLDERS", "Training", "make_shared", "mounted_training"]

HOST_FOLDERS = (Path(sys.base_prefix), Path(sysconfig.get_path("purelib")))
"""Of this machine: the Python that runs the tests, and the packages of its environment."""
_PYTHON, _PACKAGES = "/opt/host/python", "/opt/host/packages"
_LIBRARY = ("/usr/local/lib/python3.11/dist-packages", "/usr/local/lib/python3.11/site-packages")
"""Where the base image's own Python keeps what pip installs: Debian's, and that of Docker's image of Python.

The training library under test is there. An environment that has the project installed in editable mode, as `make
setup` does, does not hide it: the link to the sources works only in the environment's own folder.
"""
_NAMES = ("python", "packages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a job's manifest needs so that its container can run a training script."""

    image: str
    python: str
    volumes: list[dict[str, Any]] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    env: list[dict[str, str]] = field(default_factory=list)
    shared: Path | None = None
    """Folder in which all pods see the same files, and which every user may write; None where there is none."""


def mounted_training(image: str, *, shared: Path) -> Training:
    """Return the way to run ``image``'s training library with this machine's Python and torch.

    ``shared``: a folder that all nodes have under this name; pods find it at the same place.
    """
    targets = (_PYTHON, _PACKAGES)
    volumes: list[dict[str, Any]] = [
        {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}
        for name, folder in zip(_NAMES, HOST_FOLDERS, strict=True)
    ]
    mounts: list[dict[str, Any]] = [
        {"name": name, "mountPath": target, "readOnly": True} for name, target in zip(_NAMES, targets, strict=True)
    ]
    volumes.append({"name": "shared", "hostPath": {"path": str(shared), "type": "Directory"}})
    mounts.append({"name": "shared", "mountPath": str(shared)})
    env = {
        "PYTHONPATH": ":".join((_PACKAGES, *_LIBRARY)),
        "LD_LIBRARY_PATH": f"{_PYTHON}/lib",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return Training(
        image=image,
        python=f"{_PYTHON}/bin/python3",
        volumes=volumes,
        mounts=mounts,
        shared=shared,
        env=[{"name": name, "value": value} for name, value in env.items()],
    )


def make_shared(folder: Path) -> None:
    """Make a folder in which pods may write, whatever user their image runs as."""
    folder.mkdir()
    folder.chmod(0o777)
