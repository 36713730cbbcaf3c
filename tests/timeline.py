"""Simulated time for coroutines: an event loop that moves its clock on instead of waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

__all__ = ["Timeline", "run"]

T = TypeVar("T")


class Timeline(asyncio.SelectorEventLoop):
    """Time begins at 0 and passes only while there is nothing to do. What happens in it depends on nothing outside."""

    def __init__(self) -> None:
        self.seconds = 0.0
        super().__init__(_Patience(self))

    def time(self) -> float:
        """Return the simulated time in seconds."""
        return self.seconds


class _Patience(selectors.BaseSelector):
    """Where an event loop would wait for a socket, the time passes that it would have waited."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen any more")
        self._timeline.seconds += max(0.0, timeout)
        return []


def run(story: Coroutine[Any, Any, T]) -> T:
    """Run a story to its end; ``asyncio.get_running_loop().time()`` is its time in seconds."""
    with asyncio.Runner(loop_factory=Timeline) as runner:
        return runner.run(story)
