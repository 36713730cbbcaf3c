"""Dials for epochs that we have not heard of: kept until we have, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fthsdp.ftar.connection import Connection

__all__ = ["EarlyDials"]

MOST_EARLY = 64
"""Dials (times streams). A handful of replicas and epochs at most are under way at a time."""


class EarlyDials:
    """Proven connections by epoch, replica and stream, the oldest first."""

    def __init__(self, streams: int) -> None:
        self._most = MOST_EARLY * streams
        self._kept: dict[tuple[int, int, int], Connection] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._kept.values()))

    def add(self, stream: int, connection: Connection) -> list[Connection]:
        """Keep one; return those that are given up for it: an older dial of the same, or the oldest of all."""
        key = (connection.epoch, connection.peer[0], stream)
        given_up = [self._kept.pop(key)] if key in self._kept else []
        if len(self._kept) >= self._most:
            given_up.append(self._kept.pop(next(iter(self._kept))))
        self._kept[key] = connection
        return given_up

    def take(self, epoch: int) -> list[tuple[int, Connection]]:
        """Give away those of ``epoch``, with their streams."""
        keys = [key for key in self._kept if key[0] == epoch]
        return [(key[2], self._kept.pop(key)) for key in keys]

    def forget(self, gone: Callable[[int], bool]) -> list[Connection]:
        """Give away those of all epochs that are ``gone``."""
        keys = [key for key in self._kept if gone(key[0])]
        return [self._kept.pop(key) for key in keys]

    def remove(self, connection: Connection) -> None:
        """Give one away that has failed."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept is not connection}
