"""The folder of checkpoints: which are whole, how one is committed, which are deleted. Files only, no torch.

::

    step-00000120/                        committed: its marker lists its files
        fthsdp.json                       the marker
        …                                 the files
    step-00000140-r2-a1-9f3c01d2.part/    being written by replica 2, attempt 1; nobody reads it
    step-00000100-5be07a11.old/           being deleted

A checkpoint is written under a name that no other writer has, and becomes visible by one rename after its files and its
marker are on the disk. So a crash leaves it whole, or under a name that is ignored until a later checkpoint clears it
away. The marker carries the size and the CRC-32 of every file, and its own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fthsdp.errors import ConfigError

__all__ = [
    "MARKER",
    "Broken",
    "Stored",
    "Survey",
    "commit",
    "crc32",
    "discard",
    "final_name",
    "newest",
    "part_name",
    "prune",
    "survey",
    "sync",
    "verify",
    "warn",
]

log = logging.getLogger(__name__)

MARKER = "fthsdp.json"
"""Name of the marker inside a checkpoint."""
FORMAT = 1
"""Of the marker and of what it lists; another number is another version's."""
_FINAL = re.compile(r"step-(\d{8,18})")
_PART = re.compile(r"step-(\d{8,18})-r\d+-a\d+-[0-9a-f]+\.part")
_OLD = re.compile(r"step-\d{8,18}-.*\.old")
_BLOCK = 1 << 20
_Json = dict[str, Any]


class Broken(Exception):
    """A folder is not a whole checkpoint; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A whole checkpoint."""

    step: int
    path: Path
    meta: _Json
    """What the marker says: ``step``, ``digest``, ``sampler``, ``files`` (name to [bytes, CRC-32]), who wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What lies in a folder."""

    whole: tuple[Stored, ...]
    """Newest first."""
    broken: dict[str, str]
    """Committed once, and not whole any more: name to reason."""
    foreign: tuple[str, ...]
    """Named like a checkpoint, without a marker."""
    unfinished: tuple[str, ...]
    """Being written, or left behind by a crash."""
    dying: tuple[str, ...]
    """Being deleted."""


def newest(root: Path) -> Stored | None:
    """Return the newest whole checkpoint, and warn of each that is not whole; raises ConfigError for such a folder."""
    found = survey(root)
    warn(root, found)
    return found.whole[0] if found.whole else None


def warn(root: Path, found: Survey) -> None:
    """Log what in ``root`` is no whole checkpoint."""
    for name, reason in found.broken.items():
        log.warning("checkpoint %s is not whole and is left out: %s", root / name, reason)
    for name in found.foreign:
        log.warning("%s has no %s, so it is no checkpoint of fthsdp: left out", root / name, MARKER)
    for name in found.unfinished:
        log.warning("checkpoint %s was never finished: left out", root / name)


def survey(root: Path) -> Survey:
    """Look at everything in ``root``, which need not exist; raises ConfigError when it cannot be read."""
    whole: list[Stored] = []
    broken: dict[str, str] = {}
    names = _names(root)
    for name in names:
        if not _FINAL.fullmatch(name):
            continue
        try:
            whole.append(_read(root / name))
        except Broken as reason:
            broken[name] = str(reason)
    # Somebody may be deleting while we look.
    broken = {name: reason for name, reason in broken.items() if (root / name).exists()}
    foreign = [name for name in broken if not (root / name / MARKER).exists()]
    return Survey(
        whole=tuple(sorted(whole, key=lambda stored: -stored.step)),
        broken={name: reason for name, reason in broken.items() if name not in foreign},
        foreign=tuple(foreign),
        unfinished=tuple(name for name in names if _PART.fullmatch(name)),
        dying=tuple(name for name in names if _OLD.fullmatch(name)),
    )


def _names(root: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(root))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"the checkpoint folder {root} cannot be read: {error.strerror}: name a folder that every rank can read"
        ) from error


# --- one checkpoint ---------------------------------------------------------------------------------------------------


def _read(path: Path) -> Stored:
    """Read a committed checkpoint's marker and look at its files; raises Broken."""
    try:
        marker = json.loads((path / MARKER).read_bytes())
        meta, checksum = marker["meta"], marker["crc32"]
        files = {str(name): (int(size), int(check)) for name, (size, check) in meta["files"].items()}
        step, number = int(meta["step"]), meta["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Broken(f"its {MARKER} cannot be read: {error}") from error
    if checksum != zlib.crc32(_canonical(meta)):
        raise Broken(f"its {MARKER} was changed or damaged")
    if number != FORMAT:
        raise Broken(f"it has format {number}, this version reads {FORMAT}")
    if path.name != final_name(step):
        raise Broken(f"its {MARKER} is of step {step}")
    for name, (size, _) in files.items():
        _check_size(path / name, size, plain=Path(name).name == name)
    return Stored(step=step, path=path, meta=meta)


def _check_size(path: Path, size: int, *, plain: bool) -> None:
    try:
        found = path.stat().st_size if plain else -1
    except OSError as error:
        raise Broken(f"{path.name}: {error.strerror}") from error
    if found != size:
        raise Broken(f"{path.name} has {found} bytes instead of {size}")


def verify(stored: Stored, names: Iterable[str]) -> None:
    """Read these files of a checkpoint and compare them with the marker; raises Broken."""
    for name in names:
        try:
            found = crc32(stored.path / name)
        except OSError as error:
            raise Broken(f"{name}: {error.strerror}") from error
        if found != stored.meta["files"][name][1]:
            raise Broken(f"{name} was changed or damaged")


def crc32(path: Path) -> int:
    """Return the CRC-32 of a file; raises OSError."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _canonical(meta: _Json) -> bytes:
    return json.dumps(meta, sort_keys=True).encode()


# --- names and commit -------------------------------------------------------------------------------------------------


def final_name(step: int) -> str:
    """Return the name under which the checkpoint of ``step`` is committed."""
    return f"step-{step:08d}"


def part_name(step: int, *, replica: int, attempt: int, nonce: str) -> str:
    """Return the name under which it is written; ``nonce``, in hex, makes it unique."""
    return f"{final_name(step)}-r{replica}-a{attempt}-{nonce}.part"


def commit(part: Path, meta: _Json) -> Path:
    """Make the files in ``part`` the checkpoint of ``meta["step"]`` and return where it is; raises OSError, Broken.

    The files themselves are on the disk already. When that step is there already, undamaged and with the same digest,
    that one stays; anything else of that step is replaced.
    """
    meta = {**meta, "format": FORMAT}
    final = part.with_name(final_name(meta["step"]))
    _write_marker(part, meta)
    replaced = None
    if final.exists():
        if _same(final, meta):
            discard(part)
            return final
        replaced = _set_aside(final)
    part.rename(final)
    sync(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)
    return final


def _write_marker(part: Path, meta: _Json) -> None:
    temporary = part / f"{MARKER}.tmp"
    with temporary.open("w") as file:
        json.dump({"meta": meta, "crc32": zlib.crc32(_canonical(meta))}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(part / MARKER)
    sync(part)


def _same(final: Path, meta: _Json) -> bool:
    """Return whether ``final`` is undamaged and holds the same state; raises Broken when it is no checkpoint at all."""
    if not (final / MARKER).exists():
        raise Broken(f"{final} is there already and is no checkpoint of fthsdp: move it away")
    try:
        stored = _read(final)
        verify(stored, stored.meta["files"])
        return bool(stored.meta["digest"] == meta["digest"])
    except (Broken, KeyError):
        return False


def sync(path: Path) -> None:
    """Bring a folder's list of names to the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- cleaning ---------------------------------------------------------------------------------------------------------


def prune(root: Path, step: int, *, keep: int) -> None:
    """After the checkpoint of ``step``: delete what it makes useless. Raises OSError.

    It and the ``keep - 1`` whole ones before it stay; later ones are not touched. What was left unfinished up to this
    step goes, too: when its writer still works on it, its commit fails, and that is logged there.
    """
    for name in _useless(survey(root), step, keep):
        discard(root / name)


def _useless(found: Survey, step: int, keep: int) -> Iterator[str]:
    earlier = [stored for stored in found.whole if stored.step < step]
    yield from (stored.path.name for stored in earlier[keep - 1 :])
    yield from (name for name in found.broken if _step_of(name) < step)
    yield from (name for name in found.unfinished if _step_of(name) <= step)
    yield from found.dying


def _step_of(name: str) -> int:
    return int(name.split("-")[1])


def discard(path: Path) -> None:
    """Delete a checkpoint or what was to become one; nobody ever sees half of it. Raises OSError."""
    shutil.rmtree(path if _OLD.fullmatch(path.name) else _set_aside(path))


def _set_aside(path: Path) -> Path:
    return path.rename(path.with_name(f"{path.name}-{secrets.token_hex(4)}.old"))
