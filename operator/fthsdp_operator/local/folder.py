"""The folder of a run: what is in it, and when it may be replaced.

::

    DIR/report.json  DIR/run.png                      what happened
    DIR/{steps,joins,events}.jsonl                    the record that the report is made from
    DIR/logs/POD.log                                  what each pod printed
    DIR/epoch.json                                    the coordinator's epoch store
    DIR/private/                                      key and volumes of the pods; gone when the run has ended
    DIR/.fthsdp-run                                   says that the folder is ours, and is locked while a run uses it

Nothing is deleted that a run has not put there: a folder with other content and without our mark is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import IO

from fthsdp.errors import ConfigError

__all__ = ["RunFolder"]

_MARK = ".fthsdp-run"
_LOCK_SECONDS = 2.0
"""How long a folder may stay locked before its run counts as going on.

A child between fork and exec holds its parent's open files: of a run that was killed in that instant, the lock outlives
the process until the child executes its program, which takes longer on a busy machine.
"""


class RunFolder:
    """An exclusively held run folder; close it when the run has ended."""

    def __init__(self, path: Path, lock: IO[str], *, made: list[Path]) -> None:
        self.path = path
        self._lock = lock
        self._made = made
        """Folders above it that were made for it, the nearest first."""

    @classmethod
    def claim(cls, path: Path) -> RunFolder:
        """Create the folder, or empty it when it is an earlier run's; raises ConfigError."""
        try:
            path = path.resolve()
            _refuse_foreign(path)
            made = [parent for parent in path.parents if not parent.exists()]
            path.mkdir(parents=True, exist_ok=True)
            lock = _locked(path / _MARK)
            _clear(path)
            folder = cls(path, lock, made=made)
            folder.logs.mkdir()
            folder.private.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"--out {path}: {error.strerror or error}") from error
        return folder

    @property
    def logs(self) -> Path:
        """Where the output of the pods goes."""
        return self.path / "logs"

    @property
    def private(self) -> Path:
        """Readable by this user only."""
        return self.path / "private"

    @property
    def epochs(self) -> Path:
        """The coordinator's epoch store."""
        return self.path / "epoch.json"

    def volume(self, pod: str) -> Path:
        """Where the volumes of a pod are."""
        return self.private / pod

    def fill_volume(self, pod: str, files: dict[str, bytes]) -> None:
        """Write the files of a pod's volumes, each readable by this user only."""
        for name, content in files.items():
            target = self.volume(pod) / name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if name.endswith("/"):
                target.mkdir(mode=0o700, exist_ok=True)
                continue
            # Under another name first: what a pod reads there is whole, also where it is replaced.
            fresh = target.with_name(f".{target.name}")
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
            fresh.replace(target)

    def drop_volume(self, pod: str) -> None:
        """Remove the volumes of a pod that is gone."""
        shutil.rmtree(self.volume(pod), ignore_errors=True)

    def remove(self) -> None:
        """Remove the whole folder, and those above it that were made for it, if nothing else is in them by now."""
        shutil.rmtree(self.path)
        with contextlib.suppress(OSError):
            for parent in self._made:
                parent.rmdir()

    def close(self) -> None:
        """Remove what was private and let go of the folder."""
        shutil.rmtree(self.private, ignore_errors=True)
        self._lock.close()


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {path} is a file: name a folder")
    if path.exists() and any(path.iterdir()) and not (path / _MARK).is_file():
        raise ConfigError(f"--out {path} holds files that no run of fthsdp made: name a new or an empty folder")


def _locked(mark: Path) -> IO[str]:
    lock = mark.open("a")
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                raise ConfigError(f"--out {mark.parent} is in use by another 'fthsdp run'") from None
        time.sleep(0.02)


def _clear(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name == _MARK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
