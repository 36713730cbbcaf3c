"""Whether the operator still hears and still works: what the liveness probe asks, and what is done without a clock.

A watch that went dead says nothing, and neither does one on which nothing happens. They are told apart by their end:
each watch asks the server to end it after a minute, and the server's end of a stream is a sign of life as every byte
on it is. (Bookmarks are none to rely on: of a kind of which nothing has changed since an API server started, it sends
none.) kopf, which watches jobs, replaces a stream that was silent for longer, and so does ``informer``, which follows
pods and nodes and says itself when it heard something last. Only when that did not help either is the process to be
started anew, and only if the API server answers other questions: while it is away, a new process would be as deaf. So
would one be of a server that refuses to show something, or is too busy to: its answer is a sign of life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Limits", "Watches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the probe fails."""

    watch: float = 300.0
    """Seconds without a sign of life after which a watch is dead: the remedy, a new stream, was tried twice."""
    work: float = 900.0
    """Seconds in which no reconcile ended although there was something to do. The longest one creates 12,500 pods."""


class Watches:
    """When each watch of kopf gave its last sign of life."""

    def __init__(self, expected: Iterable[str], *, clock: Callable[[], float]) -> None:
        """``expected``: paths of the collections that are to be watched from now on; ``clock``: in seconds."""
        self._clock = clock
        self._heard = dict.fromkeys(expected, clock())
        self._streams: dict[str, tuple[Callable[[], int], int]] = {}
        """Of each open stream: what reads how many signs of life it gave so far, and what it read last."""
        self._forbidden: set[str] = set()

    def listed(self, path: str) -> None:
        """A collection was listed, which comes before watching it."""
        self._forbidden.discard(path)
        self._note(path)

    def refused(self, path: str, *, forbidden: bool) -> None:
        """A collection was not listed or watched since we may not, or since the server cannot do it now."""
        if forbidden:
            self._forbidden.add(path)
        self._note(path)

    def opened(self, path: str, signs: Callable[[], int]) -> None:
        """A stream was opened, in the place of the one before; that alone is no sign of life.

        ``signs`` reads a number that grows with each byte that comes on it, and when the server ends it.
        """
        if path in self._heard:
            self._forbidden.discard(path)
            self._listen()
            self._streams[path] = (signs, 0)

    def age(self) -> float:
        """Return for how many seconds the watch that is silent longest has been so."""
        self._listen()
        now = self._clock()
        return max((now - heard for heard in self._heard.values()), default=0.0)

    def forbids(self, path: str) -> bool:
        """Whether the server refused to show a collection when it was asked for it last."""
        return path in self._forbidden

    def _listen(self) -> None:
        for path, (signs, before) in self._streams.items():
            count = signs()
            if count != before:
                self._streams[path] = (signs, count)
                self._note(path)

    def _note(self, path: str) -> None:
        if path in self._heard:
            self._heard[path] = self._clock()
