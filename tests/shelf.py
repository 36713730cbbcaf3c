"""A collection of an API server in memory: what there is, a log of all changes, and watches that can go wrong."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fthsdp_operator.cluster import Busy, Forbidden, Unanswered
from fthsdp_operator.informers.informer import Gap

__all__ = ["Shelf"]

Object = dict[str, Any]


class Shelf:
    """Implements ``fthsdp_operator.informers.informer.Source``. Time is that of the event loop."""

    def __init__(self, *, page: int = 500, lag: Callable[[], float] = lambda: 0.0) -> None:
        """``lag``: seconds by which watches are late at this moment."""
        self.there: dict[str, Object] = {}
        """By name."""
        self.version = 0
        self.down = False
        """Nobody answers."""
        self.busy = False
        """Somebody answers that it cannot be done now."""
        self.forbidden = False
        self.frozen = False
        """Connections stay open, and nothing comes on them."""
        self.between: Callable[[], None] | None = None
        """Called once, after the first page of the next list."""
        self.asked: list[str] = []
        """``list``, and ``watch`` with the version, in order."""
        self._page = page
        self._lag = lag
        self._log: list[tuple[int, float, str, Object]] = []
        """Version, time, kind and object."""
        self._oldest = 0
        self._cuts = 0
        self._changed = asyncio.Event()

    # --- what happens on it ---

    def write(self, kind: str, it: Object) -> None:
        """Note a change, at the version that the object has."""
        self.version = int(it["metadata"]["resourceVersion"])
        self._log.append((self.version, asyncio.get_running_loop().time(), kind, it))
        if kind == "DELETED":
            self.there.pop(it["metadata"]["name"], None)
        else:
            self.there[it["metadata"]["name"]] = it
        self._wake()

    def bookmark(self) -> None:
        """Tell the watches of the newest version."""
        it = {"metadata": {"resourceVersion": str(self.version)}}
        self._log.append((self.version, asyncio.get_running_loop().time(), "BOOKMARK", it))
        self._wake()

    def compact(self) -> None:
        """Forget all that has happened: who watches from before has a gap."""
        self._oldest = self.version
        self.cut()

    def restore(self, *there: Object, version: int, cut: bool = True) -> None:
        """Go back to an earlier version, at which there was this; ``cut``: all connections break."""
        self.there, self.version = {it["metadata"]["name"]: it for it in there}, version
        self._log = [entry for entry in self._log if entry[0] <= version]
        if cut:
            self.cut()

    def cut(self) -> None:
        """Break all connections."""
        self._cuts += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- the source ---

    async def list(self) -> AsyncGenerator[tuple[list[Object], str]]:
        self.asked.append("list")
        await self._answer()
        version, there = self.version, list(self.there.values())
        for first in range(0, max(len(there), 1), self._page):
            yield there[first : first + self._page], str(version)
            between, self.between = self.between, None
            if between is not None:
                between()
            if version < self._oldest:
                raise Gap("410 Expired: the continue token is too old")

    async def newest(self) -> str:
        await self._answer()
        return str(self.version)

    async def watch(
        self, version: str, *, seconds: int, silence: float, opened: Callable[[], None]
    ) -> AsyncGenerator[tuple[str, Object]]:
        self.asked.append(f"watch {version}")
        await self._answer()
        if int(version) < self._oldest:
            raise Gap("410 Gone: too old resource version")
        opened()
        loop, cuts = asyncio.get_running_loop(), self._cuts
        end, at = loop.time() + seconds, bisect_right(self._log, int(version), key=lambda entry: entry[0])
        heard = loop.time()
        while True:
            changed, now = self._changed, loop.time()
            if cuts != self._cuts or self.down:
                raise Unanswered("the connection was cut")
            if self.frozen and now - heard >= silence:
                raise Unanswered("nothing comes any more")
            if self.frozen:
                await _either(changed, heard + silence - now)
                continue
            if at < len(self._log) and self._log[at][1] + self._lag() <= now:
                heard = now
                yield self._log[at][2:]
                at += 1
                continue
            due = self._log[at][1] + self._lag() if at < len(self._log) else end
            if now >= end:
                return
            await _either(changed, min(due, end) - now)

    async def _answer(self) -> None:
        await asyncio.sleep(0.001)
        if self.busy:
            raise Busy("429 Too Many Requests: said the server")
        if self.forbidden:
            raise Forbidden("403 Forbidden: said the server")
        if self.down:
            raise Unanswered("nobody answers")


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, or so long."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
    except TimeoutError:
        return
