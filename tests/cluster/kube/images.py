"""The images that the tests run, built from the real Dockerfile without Docker and without a registry.

A base image is made of a small Debian; buildah then builds each target of the Dockerfile on it. What was built is kept
as an archive under a name that holds a hash of all that went in, so that a second run builds nothing.
"""

from __future__ import annotations

import configparser
import fcntl
import hashlib
import importlib.util
import os
import shutil
import ssl
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kube.archive import pack_image
from tests.cluster.kube.binaries import cache_folder
from tests.cluster.kube.shell import run

__all__ = [
    "BUILD_INPUTS",
    "PAUSE_IMAGE",
    "PROJECT",
    "Image",
    "base_archive",
    "build_image",
    "build_inputs",
    "inputs_hash",
    "pause_archive",
    "pip_settings",
    "remove_older",
]

PROJECT = Path(__file__).resolve().parents[3]
BUILD_INPUTS = ("Dockerfile", "pyproject.toml", "README.md", "LICENSE", "operator", "trainer_image")
"""All that the Dockerfile reads; a change anywhere in it makes another image."""
PAUSE_IMAGE = "localhost/fthsdp-pause:1"
_SUITE = "bookworm"
_PACKAGES = ("python3", "python3-venv", "python3-pip")
_BASE_IMAGE = f"localhost/fthsdp-base:{_SUITE}-1"
"""The number grows when what is packed changes."""
_LEFT_OUT = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "dev")
_MOST_STORAGE = 8 << 30
"""Bytes of layers from earlier builds above which all of them are thrown away: each change of the code leaves some."""
_KEPT = 2
"""Archives of a target that stay: of the code as it is, and as it was before the chart was changed last."""
_PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout")
_CERTIFICATES_IN_BUILD = "/run/secrets/certificates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image in an archive, as ``ctr images import`` takes it."""

    name: str
    archive: Path


def inputs_hash(project: Path) -> str:
    """Return a short hash of all that goes into the images, the base image's name included."""
    total = hashlib.sha256(_BASE_IMAGE.encode())
    for path in sorted(path for path in project.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(project)} {content}\n".encode())
    return total.hexdigest()[:16]


@contextmanager
def build_inputs(project: Path) -> Iterator[Path]:
    """Yield a copy of all that the Dockerfile reads: what is hashed is what is built, even while somebody edits."""
    with tempfile.TemporaryDirectory(prefix="fthsdp-context-") as copy:
        for name in BUILD_INPUTS:
            if (project / name).is_dir():
                shutil.copytree(project / name, Path(copy) / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(project / name, Path(copy) / name)
        yield Path(copy)


def pause_archive(programs: Path) -> Path:
    """Return the image of the process that holds a pod's namespaces open."""
    archive = _folder() / "pause.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory() as work:
            layer = Path(work) / "layer.tar"
            with tarfile.open(layer, "w") as tar:
                tar.add(programs / "pause", arcname="pause")
            pack_image(PAUSE_IMAGE, layer, ["/pause"], archive)
    return archive


def base_archive() -> Path:
    """Return the base image, a Debian with Python and pip; making it takes a minute, once. Raises ClusterError."""
    archive = _folder() / f"base-{_SUITE}-1.tar"
    with _locked():
        if not archive.exists():
            print(f"making the base image {archive}", flush=True)
            _make_base(archive)
    return archive


def _make_base(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fthsdp-base-") as work:
        root, layer = Path(work) / "root", Path(work) / "layer.tar"
        mirror = os.environ.get("FTHSDP_TEST_DEBIAN_MIRROR")
        options = ("--variant=minbase", f"--include={','.join(_PACKAGES)}")
        run("nice", "debootstrap", *options, _SUITE, root, *([mirror] if mirror else []), timeout=900)
        left_out = [f"--exclude=./{folder}/*" for folder in _LEFT_OUT]
        run("tar", "--directory", root, *left_out, "--create", "--file", layer, ".")
        pack_image(_BASE_IMAGE, layer, ["/bin/sh"], archive)


def build_image(target: str, source: Path = PROJECT) -> Image:
    """Return the image of one target of a folder's Dockerfile, built unless this content was built before."""
    base = base_archive()
    with build_inputs(source) as context, _locked():
        digest = inputs_hash(context)
        image = Image(name=f"localhost/fthsdp-{target}:{digest}", archive=_folder() / f"{target}-{digest}.tar")
        if not image.archive.exists():
            print(f"building the image {image.name}", flush=True)
            with _buildah() as buildah:
                run(*buildah, "pull", "--quiet", f"docker-archive:{base}")
                _build(buildah, context, target, image)
        image.archive.touch()
        remove_older(_folder(), target)
        return image


def _build(buildah: Sequence[str], context: Path, target: str, image: Image) -> None:
    with tempfile.TemporaryDirectory(prefix="fthsdp-secrets-") as secrets:
        bases = [f"--build-arg={argument}={_BASE_IMAGE}" for argument in ("PYTHON_IMAGE", "TORCH_IMAGE")]
        run(
            *(*buildah, "bud", "--isolation=chroot", "--network=host", "--layers", "--pull-never", *bases),
            *(f"--target={target}", f"--tag={image.name}", *_secrets(Path(secrets)), str(context)),
            timeout=900,
        )
    unfinished = image.archive.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    run(*buildah, "push", image.name, f"docker-archive:{unfinished}:{image.name}")
    unfinished.rename(image.archive)


def remove_older(folder: Path, target: str) -> None:
    """Keep the archives of a target that were made, or asked for, last."""
    archives = sorted(folder.glob(f"{target}-*.tar"), key=lambda archive: archive.stat().st_mtime)
    for archive in archives[:-_KEPT]:
        archive.unlink()


@contextmanager
def _buildah() -> Iterator[tuple[str, ...]]:
    """Yield the command with a storage of our own: layers are kept in the cache, the user's images are not touched."""
    storage = cache_folder() / "buildah"
    if storage.exists() and int(run("du", "--summarize", "--bytes", storage).split()[0]) > _MOST_STORAGE:
        shutil.rmtree(storage)
    with tempfile.TemporaryDirectory(prefix="fthsdp-buildah-") as run_root:
        yield ("nice", "buildah", "--root", str(storage), "--runroot", run_root)


def _secrets(folder: Path) -> list[str]:
    """Write how this machine reaches its package index, for the build only."""
    certificates = folder / "certificates"
    shutil.copyfile(_certificate_bundle(), certificates)
    settings = folder / "pip.conf"
    with settings.open("w") as file:
        pip_settings(_listed_settings()).write(file)
    return [f"--secret=id=pip.conf,src={settings}", f"--secret=id=certificates,src={certificates}"]


def _certificate_bundle() -> Path:
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
    default = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    return Path(next((os.environ[name] for name in names if os.environ.get(name)), default))


def _listed_settings() -> str:
    """Ask pip, where this Python has it."""
    return run(sys.executable, "-m", "pip", "config", "list") if importlib.util.find_spec("pip") else ""


def pip_settings(listing: str) -> configparser.ConfigParser:
    """Return what of ``pip config list`` says how to reach the package index, for use inside the build.

    Paths of this machine are left out: its certificates come as a secret of their own.
    """
    settings = configparser.ConfigParser(interpolation=None)
    settings["global"] = {"cert": _CERTIFICATES_IN_BUILD}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in _PIP_KEYS:
            settings["global"][key.removeprefix("default-")] = value.strip("'").replace("\\n", "\n")
    return settings


def _folder() -> Path:
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked() -> Iterator[None]:
    """Let one process at a time make images."""
    with (_folder() / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
