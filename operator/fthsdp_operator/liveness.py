"""Whether the operator still hears and still works: what the liveness probe asks, and what is done without a clock.

A watch that went dead says nothing, and neither does one on which nothing happens. They are told apart by bookmarks,
which an API server sends on every watch once in 60 to 75 s: every byte of a stream is a sign of life. kopf itself
replaces a stream that was silent for longer than that. Only when that did not help either is the process to be started
anew, and only if the API server answers other questions: while it is away, a new process would be as deaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Limits", "Watches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the probe fails."""

    watch: float = 300.0
    """Seconds without a sign of life after which a watch is dead: kopf's own remedy, a new stream, was tried twice."""
    work: float = 900.0
    """Seconds in which no reconcile ended although there was something to do. The longest one creates 12,500 pods."""


class Watches:
    """When each watch gave its last sign of life."""

    def __init__(self, expected: Iterable[str], *, clock: Callable[[], float]) -> None:
        """``expected``: paths of the collections that are to be watched from now on; ``clock``: in seconds."""
        self._clock = clock
        self._heard = dict.fromkeys(expected, clock())
        self._streams: dict[str, tuple[Callable[[], int], int]] = {}
        """Of each open stream: what reads the number of bytes that came so far, and what it read last."""

    def listed(self, path: str) -> None:
        """A collection was listed, which comes before watching it."""
        self._note(path)

    def opened(self, path: str, received: Callable[[], int]) -> None:
        """A stream was opened, in the place of the one before; that alone is no sign of life.

        ``received`` reads the number of bytes that came on it.
        """
        if path in self._heard:
            self._listen()
            self._streams[path] = (received, 0)

    def age(self) -> float:
        """Return for how many seconds the watch that is silent longest has been so."""
        self._listen()
        now = self._clock()
        return max((now - heard for heard in self._heard.values()), default=0.0)

    def _listen(self) -> None:
        for path, (received, before) in self._streams.items():
            count = received()
            if count != before:
                self._streams[path] = (received, count)
                self._note(path)

    def _note(self, path: str) -> None:
        if path in self._heard:
            self._heard[path] = self._clock()
