"""Of several operators one acts: the one that holds a Lease. ``Election`` is the rule, ``Leadership`` its shell.

The others look at the Lease and wait. Who holds it renews it every ``RETRY_PERIOD``, and counts it as its own until
``RENEW_DEADLINE`` after the moment at which it *sent* the last write that succeeded. A candidate takes it over
``LEASE_DURATION`` after it *saw* the last change of it, which was later. So there is never more than one, whatever the
clocks of their machines show: each measures time on its own, by a clock that nobody sets. What lies between the two
times is for calls that are still under way.

Who does not hold the Lease any more must not act, and a process cannot know how late it is: it may have been stopped,
or its machine with it. So every call to the API server asks ``time_left`` first, takes no longer than that, and when
nothing is left the process ends on the spot. What such a call could still do when it was already sent is harmless as
well: a status is written only over the version that was read, and a pod is deleted by its UID.

``kubernetes.aio.leaderelection`` is not used. It measures by the wall clock; a request that hangs stops it from
noticing that the lease ran out; a refused connection ends it with an exception and lets the leader's work go on; and
who sees that somebody else has taken over keeps acting until its own deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol

from fthsdp.errors import ConfigError
from fthsdp_operator.cluster import AlreadyExists, Busy, ClusterError, Conflict, Manifest, Unanswered

__all__ = [
    "LEASE_DURATION",
    "RENEW_DEADLINE",
    "RETRY_PERIOD",
    "Election",
    "Leadership",
    "Leases",
    "Place",
    "identity",
]

log = logging.getLogger(__name__)

KIND = "Lease"
LEASE_DURATION = 15.0
"""Seconds for which others leave a lease alone that nobody renews. Whole ones: the Lease has no others."""
RENEW_DEADLINE = 10.0
"""Seconds after which a leader that could not renew its lease ends."""
RETRY_PERIOD = 2.0
"""Seconds between two looks at the lease."""
ATTEMPT_TIMEOUT = RENEW_DEADLINE / 2
"""Seconds for one attempt: when a connection is dead, there is time for one over another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the Lease is."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Leases(Protocol):
    """What is needed of an API server."""

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return an object, or None."""
        ...

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        """Create an object; raises AlreadyExists."""
        ...

    async def replace(self, manifest: Mapping[str, Any]) -> Manifest:
        """Replace an object; raises Conflict when it is not at the version that the manifest names any more."""
        ...


def identity() -> str:
    """Return a name that no other process has, and that tells people where this one runs."""
    return f"{socket.gethostname()}_{uuid.uuid4()}"


class Election:
    """What one candidate knows of the lease, and what it may write. No clock and no I/O: ``now`` is in seconds."""

    def __init__(self, place: Place, me: str) -> None:
        self._place = place
        self._me = me
        self._spec: Mapping[str, Any] = {}
        """The lease as it was seen last."""
        self._since = -math.inf
        """When it was first seen like that."""

    @property
    def holder(self) -> str:
        """Who held the lease when it was seen last; empty when nobody did."""
        return str(self._spec.get("holderIdentity") or "")

    def claim(self, lease: Manifest | None, now: float, wall: float) -> Manifest | None:
        """Return the lease to be written in order to have it; None while it is somebody else's.

        ``wall`` is Unix time, and only for people who read the lease. One that was deleted, or made anew, still counts
        for as long as it would have: its holder may not know yet.
        """
        if lease is not None:
            self._note(lease, now)
        if self.holder not in ("", self._me) and now < self._since + self._duration():
            return None
        return self._with(lease, self._claimed(wall))

    def resign(self, lease: Manifest | None) -> Manifest | None:
        """Return the lease to be written in order to be rid of it; None when it is not ours."""
        spec = (lease or {}).get("spec") or {}
        if spec.get("holderIdentity") != self._me:
            return None
        return self._with(lease, {name: value for name, value in spec.items() if name != "holderIdentity"})

    def _note(self, lease: Manifest, now: float) -> None:
        spec = lease.get("spec") or {}
        if spec and spec != self._spec:
            self._spec, self._since = spec, now

    def _duration(self) -> float:
        return float(self._spec.get("leaseDurationSeconds") or LEASE_DURATION)

    def _claimed(self, wall: float) -> dict[str, Any]:
        written = datetime.fromtimestamp(wall, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        ours = self.holder == self._me
        changes = int(self._spec.get("leaseTransitions") or 0)
        return {
            **self._spec,
            "holderIdentity": self._me,
            "leaseDurationSeconds": int(LEASE_DURATION),
            "acquireTime": self._spec.get("acquireTime") if ours else written,
            "renewTime": written,
            "leaseTransitions": changes if ours or not self._spec else changes + 1,
        }

    def _with(self, lease: Manifest | None, spec: Mapping[str, Any]) -> Manifest:
        fresh = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": KIND,
            "metadata": {"name": self._place.name, "namespace": self._place.namespace},
        }
        return {**(lease or fresh), "spec": dict(spec)}


def _clock() -> float:
    """Seconds since the machine started, those included for which it slept: nobody sets this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _end(why: str) -> NoReturn:
    """End the process without any cleaning up, which might still write something."""
    log.critical("%s", why)
    logging.shutdown()
    os._exit(1)


class Leadership:
    """Gets the lease, keeps it, gives it back; ``end`` is called when it is lost, and does not return."""

    def __init__(
        self,
        leases: Leases,
        place: Place,
        *,
        me: str,
        clock: Callable[[], float] = _clock,
        end: Callable[[str], NoReturn] = _end,
    ) -> None:
        self._leases = leases
        self._place = place
        self._clock = clock
        self._end = end
        self._election = Election(place, me)
        self._until = -math.inf
        """When it stops being ours for certain, by our clock."""
        self._asked = False
        """We have tried to write it."""

    def time_left(self) -> float:
        """Return for how many seconds the lease is ours for certain; ends the process when that is over."""
        left = self._until - self._clock()
        if left <= 0:
            self._end(f"the lease {self._place} ran out: another operator may act by now, so this one ends")
        return left

    async def acquire(self) -> None:
        """Wait until the lease is ours, also for an API server that does not answer.

        Raises ConfigError when the first look at it is refused.
        """
        seen = None
        while not await self._attempt(first=seen is None):
            if self._election.holder != seen:
                seen = self._election.holder
                log.info("standing by: %s holds the lease %s", seen or "nobody", self._place)
            await asyncio.sleep(RETRY_PERIOD)
        log.info("this operator holds the lease %s", self._place)

    async def _attempt(self, *, first: bool) -> bool:
        try:
            return await self._try(ATTEMPT_TIMEOUT)
        except (Conflict, AlreadyExists):
            return False  # somebody else was faster
        except (ClusterError, TimeoutError) as error:
            if first and not isinstance(error, Unanswered | Busy | TimeoutError):
                raise ConfigError(f"the lease {self._place} cannot be had: {_words(error)}") from error
            log.warning("the lease %s: %s", self._place, _words(error))
            return False

    async def keep(self) -> NoReturn:
        """Renew the lease for as long as that succeeds, then end the process."""
        while True:
            await asyncio.sleep(min(RETRY_PERIOD, self.time_left()))
            try:
                ours = await self._try(min(ATTEMPT_TIMEOUT, self.time_left()))
            except Exception as error:  # also a mistake of ours must not keep an operator alive that does not renew
                log.warning("the lease %s could not be renewed: %s", self._place, _words(error))
                continue
            if not ours:
                self._end(f"the lease {self._place} was taken over by {self._election.holder}: this operator ends")

    async def resign(self) -> None:
        """Give the lease back, so that another operator begins at once; call it when nothing acts any more."""
        self._until = -math.inf
        if not self._asked:
            return
        try:
            async with asyncio.timeout(ATTEMPT_TIMEOUT):
                lease = self._election.resign(await self._leases.get(KIND, self._place.namespace, self._place.name))
                if lease is not None:
                    await self._leases.replace(lease)
        except (ClusterError, TimeoutError) as error:
            log.warning("the lease %s was not given back, and runs out: %s", self._place, _words(error))

    async def _try(self, seconds: float) -> bool:
        """Get or renew the lease; False when it is somebody else's."""
        async with asyncio.timeout(seconds):
            lease = await self._leases.get(KIND, self._place.namespace, self._place.name)
            sent = self._clock()
            claim = self._election.claim(lease, sent, time.time())
            if claim is None:
                return False
            self._asked = True
            await (self._leases.create(claim) if lease is None else self._leases.replace(claim))
        self._until = sent + RENEW_DEADLINE
        return True


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
