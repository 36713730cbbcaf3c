"""A keyed work queue: what has to be looked at, when, and never by two workers at once.

Its three promises are those of Kubernetes controllers everywhere: a key added many times is handed out once; a key
added while it is being worked on is handed out again afterwards, never at the same time; a key that keeps failing
comes back ever more slowly, without holding up the others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["WorkQueue"]

EARLY = 1e-6
"""Seconds. An event loop wakes up as much too early as its clock is coarse; what is due by then is due."""

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """Hands out keys in the order in which they are due."""

    def __init__(
        self,
        *,
        first_retry: float = 0.1,
        longest_retry: float = 15.0,
        twice_in: float = 0.0,
        clock: Callable[[], float] | None = None,
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """``first_retry`` and ``longest_retry``: seconds; ``clock``: the event loop's where unset.

        ``twice_in``: seconds within which a key is handed out twice at most: one that comes again and again waits.
        ``waited`` is told for how many seconds each key waited for a worker after it was due.
        """
        self._first_retry = first_retry
        self._longest_retry = longest_retry
        self._twice_in = twice_in
        self._handed: deque[tuple[float, K]] = deque()
        """What was handed out within that time, and when."""
        self._clock = clock
        self._waited = waited
        self._due: dict[K, float] = {}
        """When each waiting key is due; what else the heap holds is outdated."""
        self._heap: list[tuple[float, int, K]] = []
        self._count = itertools.count()
        self._working: dict[K, float] = {}
        """Keys that are worked on, and when each was due."""
        self._released = float("-inf")
        """When a worker was done with a key last, whatever came of it."""
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: K, *, delay: float = 0.0) -> None:
        """Have a key handed out after ``delay`` seconds, or earlier if it waits already and is due before."""
        due = self._now() + delay
        if self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, next(self._count), key))
        self._changed.set()

    async def get(self) -> K:
        """Wait for a key that is due and that nobody works on; call ``done`` or ``failed`` when finished with it."""
        while True:
            self._changed.clear()
            key, wait = self._next()
            if key is not None:
                self._working[key] = due = self._due.pop(key)
                self._handed.append((now := self._now(), key))
                self._waited(now - due)
                return key
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                continue

    def done(self, key: K) -> None:
        """The work on a key succeeded: its next failure is its first."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: K, *, at_least: float = 0.0) -> float:
        """The work on a key failed: it comes back after a wait that doubles each time; returns the wait in seconds.

        ``at_least``: seconds, for a failure that says how long it lasts.
        """
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        self._release(key)
        wait: float = max(at_least, min(self._longest_retry, self._first_retry * 2 ** min(count, 30)))
        self.add(key, delay=wait)
        return wait

    @property
    def depth(self) -> int:
        """Keys that are due and wait for a worker."""
        now = self._now()
        return sum(due <= now for due in self._due.values())

    def stuck(self) -> float:
        """Return for how many seconds nothing was finished although there was something to do."""
        now = self._now()
        begun = [*self._working.values(), *(due for due in self._due.values() if due <= now)]
        return now - max(min(begun), self._released) if begun else 0.0

    def _release(self, key: K) -> None:
        self._working.pop(key, None)
        self._released = self._now()
        self._changed.set()

    def _now(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    def _next(self) -> tuple[K | None, float | None]:
        """Return a key to work on, or the seconds until there may be one (None: until something changes)."""
        held: list[tuple[float, int, K]] = []
        try:
            while self._heap:
                due, _, key = self._heap[0]
                if self._due.get(key) != due:
                    heapq.heappop(self._heap)
                    continue
                if due > self._now() + EARLY:
                    return None, due - self._now()
                entry = heapq.heappop(self._heap)
                if key in self._working:
                    held.append(entry)
                elif (free := self._free_at(key)) > self._now() + EARLY:
                    self._due[key] = free
                    heapq.heappush(self._heap, (free, next(self._count), key))
                else:
                    return key, None
            return None, None
        finally:
            for entry in held:
                heapq.heappush(self._heap, entry)

    def _free_at(self, key: K) -> float:
        """Return when a key may be handed out again."""
        while self._handed and self._handed[0][0] <= self._now() - self._twice_in:
            self._handed.popleft()
        times = [time for time, other in self._handed if other == key]
        return times[-2] + self._twice_in if len(times) > 1 else -math.inf
