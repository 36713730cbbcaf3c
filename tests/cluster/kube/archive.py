"""Packing a root file system as an image: what a container runtime loads and an image build starts from."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["pack_image"]

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def pack_image(name: str, layer: Path, command: Sequence[str], archive: Path) -> None:
    """Write an image of one layer (a tar of the root file system) as an archive of Docker's format.

    The archive appears complete or not at all.
    """
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Cmd": list(command), "Env": [_PATH]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created_by": "fthsdp tests"}],
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    unfinished = archive.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w") as tar:
        _add(tar, config_name, config)
        tar.add(layer, arcname=f"{digest}/layer.tar")
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    unfinished.rename(archive)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
