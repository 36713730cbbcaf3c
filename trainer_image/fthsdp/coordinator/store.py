"""Where the epochs survive the coordinator. Every write compares before it swaps.

So two coordinators of one job can never both succeed: the second one finds a number that it does not expect, and ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from fthsdp.coordinator.ledger import Ledger
from fthsdp.errors import ConfigError, FthsdpError

__all__ = ["EpochStore", "FileStore", "StoreConflict", "StoreUnavailable"]


class StoreConflict(FthsdpError):
    """Somebody else wrote an epoch: another coordinator runs for this job."""

    def __init__(self, origin: str, *, found: int, expected: int) -> None:
        super().__init__(
            f"{origin} holds epoch {found}, not {expected}: another coordinator of this job is running; this one ends"
        )


class StoreUnavailable(FthsdpError):
    """The store did not answer; the same call may succeed later."""


class EpochStore(Protocol):
    """Keeps the newest ledger of one job."""

    async def load(self) -> Ledger | None:
        """Return what was saved last; None when nothing was. Raises ConfigError, StoreUnavailable."""

    async def save(self, ledger: Ledger, *, expected: int) -> None:
        """Replace the ledger if the stored number is ``expected`` (0: nothing stored).

        Saving what is already there succeeds: the answer to an earlier call may have been lost. Raises StoreConflict,
        StoreUnavailable.
        """

    async def publish(self, report: str) -> None:
        """Put the run's report (JSON) where the store's users can read it; raises StoreUnavailable."""

    async def close(self) -> None:
        """Let go of connections."""


class FileStore:
    """A file, replaced atomically under a lock in a file beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.parent.is_dir():
            raise ConfigError(f"store file:{path}: the folder {path.parent} does not exist")

    async def load(self) -> Ledger | None:
        """See EpochStore."""
        return await asyncio.to_thread(self._read)

    async def save(self, ledger: Ledger, *, expected: int) -> None:
        """See EpochStore."""
        await asyncio.to_thread(self._swap, ledger, expected)

    async def publish(self, report: str) -> None:
        """Nothing to do: who can read this file can read the report in the record's folder."""

    async def close(self) -> None:
        """Nothing is kept open."""

    def _read(self) -> Ledger | None:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"{self._path}: {error.strerror}") from error
        return Ledger.decode(text, origin=str(self._path))

    def _swap(self, ledger: Ledger, expected: int) -> None:
        try:
            with self._locked():
                stored = self._read()
                if stored == ledger:
                    return
                found = stored.number if stored else 0
                if found != expected:
                    raise StoreConflict(str(self._path), found=found, expected=expected)
                self._replace(ledger.encode())
        except OSError as error:
            raise StoreUnavailable(f"{self._path}: {error.strerror}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self._path.with_name(self._path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _replace(self, text: str) -> None:
        fresh = self._path.with_name(self._path.name + ".new")
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
