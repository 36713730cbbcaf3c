"""Keeps a mirror like the API server: a LIST, a watch from there on, and a LIST again when the watch has a gap.

A LIST says what there is at one moment, a version; a watch tells of every change since, in order. So nothing is missed
as long as the watch goes on from the version that was heard last, however often its connection breaks. When the server
does not know any more what happened since (410 Gone), or says something that cannot be understood, a LIST closes the
gap, and what is not in it is gone. Should all of that fail, a LIST comes every ``RELIST`` seconds in any case.

A server whose data was restored from a copy would say nothing more for long: all that happens is older than what was
heard. So it is asked for its version before a watch goes on that broke. When that has gone back, ``Restored`` ends it,
and the process with it: a new one begins from what there is.

A server that refuses is asked again as soon as one that fails: an authorizer that is late, or a role that is replaced,
refuses for a moment. What was known counts for ``FORBIDDEN_GRACE`` seconds, and the watch goes on where it was. After
that nothing is known until a LIST is allowed, and it is asked ever less often: somebody may have taken the right away.

A watch that says nothing looks like one that is dead. It asks the server to end it after ``WATCH_TIME``, and a stream
that is silent for longer than ``SILENCE`` is given up and taken up again where it stopped. Bookmarks are no sign of
life to rely on: of a kind in which nothing has changed since the server started, it sends none.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from fthsdp_operator.cluster import Busy, ClusterError, Forbidden
from fthsdp_operator.informers.cache import Mirror, Restored, Seen

__all__ = ["RELIST", "SILENCE", "WATCH_TIME", "Gap", "Informer", "Source"]

log = logging.getLogger(__name__)

WATCH_TIME = 60
"""Seconds after which the server ends a watch, by our request. Whole ones: it refuses others."""
SILENCE = 90.0
"""Seconds without a word after which a watch is given up: the server should have ended it."""
RELIST = 1800.0
"""Seconds after which everything is listed anew whatever was heard."""
SHORTEST = 1.0
"""Seconds: a watch that ends before, and says nothing, is none, and is not tried again at once."""
FIRST_RETRY = 0.2
LONGEST_RETRY = 15.0
"""Seconds until it is tried again; doubled each time, with up to as much again at random."""
FORBIDDEN_RETRY = 60.0
"""The longest of these waits in seconds where we have no right to it: somebody may grant it."""
FORBIDDEN_GRACE = 15.0
"""Seconds for which what is known counts while the server refuses to show it."""

Manifest = Mapping[str, Any]
V = TypeVar("V")


class Gap(ClusterError):
    """The server no longer knows what has happened since: a LIST has to tell."""


class Source(Protocol):
    """A collection of an API server."""

    def list(self) -> AsyncGenerator[tuple[list[Manifest], str]]:
        """Yield all objects as they are at one moment, in pages, each with the version that stands for that moment."""
        ...

    async def newest(self) -> str:
        """Return the version at which the server is now."""
        ...

    def watch(
        self, version: str, *, seconds: int, silence: float, opened: Callable[[], None]
    ) -> AsyncGenerator[tuple[str, Manifest]]:
        """Yield kind and object of each event since, bookmarks included; ends after ``seconds``.

        ``opened`` is called once the server has agreed to it, which may be long before the first event.
        Raises Gap, and ClusterError when the connection breaks or says nothing for ``silence`` seconds.
        """
        ...


class Informer(Generic[V]):
    """Follows one collection."""

    def __init__(
        self,
        source: Source,
        mirror: Mirror[V],
        *,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """``what``: the collection, for people; ``chance`` returns numbers from 0 to 1."""
        self.mirror = mirror
        self.known = False
        """The mirror is like the server, as far as that was heard. Before, what is not in it may exist."""
        self.settled = asyncio.Event()
        """Set once it is known, or cannot be since we have no right to it."""
        self._source = source
        self._what = what
        self._clock = clock
        self._chance = chance
        self._heard = clock()
        self._version = ""
        """The moment up to which everything is known; empty: a LIST is needed."""
        self._listed = 0.0
        self._failures = 0
        self._broke = False
        """Nobody has answered since it was asked for its version last."""
        self._refused_since = 0.0
        """When it was first refused of late."""
        self.refused = ""
        """What the server said when it refused to show the collection; empty while it does not."""

    def age(self) -> float:
        """Return for how many seconds the server has said nothing."""
        return self._clock() - self._heard

    async def follow(self) -> NoReturn:
        """Follow until cancelled; raises Restored."""
        self._hear()  # silence counts from here on: an operator may have stood by for days
        while True:
            wait = await self._turn()
            if wait > 0:
                await asyncio.sleep(wait)

    async def _turn(self) -> float:
        """List or watch once; return the seconds to wait after it."""
        try:
            if not self._version or self._clock() - self._listed >= RELIST:
                self._listed = self._clock()  # where a list fails that need not be, the watch goes on
                await self._list()
            elif self._broke:
                await self._make_sure()
            return await self._watch()
        except Gap as error:
            self._version = ""
            wait = self._wait() if self._failures else 0.0
            self._failures += 1
            log.info("the watch of %s has a gap, which a LIST closes in %.1f s: %s", self._what, wait, error)
        except Forbidden as error:
            wait = max(self._wait(FORBIDDEN_RETRY), error.retry_after)
            self._failures += 1
            self._note_refusal(error, wait)
        except ClusterError as error:
            if isinstance(error, Busy):
                self._hear()  # it answers, and a new process would hear the same
            wait = max(self._wait(), error.retry_after)
            self._failures += 1
            self._broke = True
            log.warning("the watch of %s broke, and goes on in %.1f s: %s", self._what, wait, error)
        return wait

    async def _list(self) -> None:
        found: list[Seen[V]] = []
        version = ""
        async with aclosing(self._source.list()) as pages:
            async for page, as_of in pages:
                found += (seen for seen in map(self.mirror.see, page) if seen is not None)
                version = as_of
                self._hear()
        self.mirror.replace(found, version)
        self._version, self._broke = version, False
        self._note_grant()
        self.known = True
        self.settled.set()

    async def _make_sure(self) -> None:
        """Raise Restored when the server has gone back."""
        now = await self._source.newest()
        if int(now) < int(self._version):
            raise Restored(self._what, self._version, now)
        self._broke = False

    async def _watch(self) -> float:
        began, heard = self._clock(), False
        stream = self._source.watch(self._version, seconds=WATCH_TIME, silence=SILENCE, opened=self._note_grant)
        async with aclosing(stream) as events:
            async for kind, it in events:
                self._hear()
                self.mirror.hear(kind, it)
                self._version = it["metadata"]["resourceVersion"]
                self._failures, heard = 0, True
        self._hear()
        if heard or self._clock() - began >= SHORTEST:
            self._failures = 0
            return 0.0
        wait = self._wait()
        self._failures += 1
        return wait

    def _hear(self) -> None:
        self._heard = self._clock()

    def _note_refusal(self, error: Forbidden, wait: float) -> None:
        """What was known grows old from now on: for a while that does not matter, then nothing is known."""
        self._hear()
        if not self.refused:
            log.warning("%s are not shown to us, which is tried again in %.1f s: %s", self._what, wait, error)
            self._refused_since = self._clock()
        self.refused = str(error)
        if self.known and self._clock() - self._refused_since >= FORBIDDEN_GRACE:
            log.warning("%s are not known any more, until we may see them: %s", self._what, error)
            self.known, self._version = False, ""
        self.settled.set()

    def _note_grant(self) -> None:
        if self.refused:
            log.info("%s are shown to us again", self._what)
            self.refused = ""

    def _wait(self, longest: float = LONGEST_RETRY) -> float:
        return min(longest, FIRST_RETRY * 2.0 ** min(self._failures, 20)) * (1.0 + self._chance())
