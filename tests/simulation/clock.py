"""Simulated time: what happens when is decided by a seed, and can be replayed from it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

__all__ = ["Channel", "Clock", "Owner"]

Action = Callable[[], None]


@dataclass(eq=False)
class Owner:
    """A process, as time sees it: nothing happens in it while it is frozen, and never again once it is dead."""

    clock: Clock
    alive: bool = True
    frozen: bool = False
    backlog: list[Action] = field(default_factory=list)

    def after(self, delay: float, action: Action) -> None:
        """Do this after ``delay`` seconds."""
        self.clock.after(delay, lambda: self.act(action))

    def soon(self, action: Action) -> None:
        """Do this after a delay as of a thread that is woken, or of a message inside a machine."""
        self.after(self.clock.delay(), action)

    def act(self, action: Action) -> None:
        """Do this now, unless it is frozen or dead."""
        if self.alive and self.frozen:
            self.backlog.append(action)
        elif self.alive:
            action()

    def thaw(self) -> None:
        """Go on, with what was left undone first."""
        self.frozen = False
        undone, self.backlog = self.backlog, []
        for action in undone:
            self.soon(action)


class Clock:
    """A queue of what is to happen."""

    def __init__(self, seed: int, *, unit: float = 0.002, unruly: float = 0.05) -> None:
        """``unit`` is a usual delay in seconds; a share ``unruly`` of the delays is up to fifty times as long."""
        self.random = Random(seed)
        self.now = 0.0
        self.events = 0
        self._unit = unit
        self._unruly = unruly
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    def after(self, delay: float, action: Action) -> None:
        """Do this after ``delay`` seconds."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, action))

    def delay(self) -> float:
        """Return a random delay."""
        long = self.random.random() < self._unruly
        return self.random.random() * self._unit * (50 if long else 1)

    def next(self) -> None:
        """Let the next thing happen."""
        self.now, _, action = heapq.heappop(self._queue)
        self.events += 1
        action()


class Channel:
    """One direction of a connection: in order, each message with a delay of its own, until it is cut."""

    def __init__(self, receiver: Owner) -> None:
        self._receiver = receiver
        self._newest = 0.0
        self._open = True

    def send(self, action: Action) -> None:
        """Let the receiver do this when the message arrives."""
        clock = self._receiver.clock
        self._newest = max(self._newest, clock.now + clock.delay())
        self._receiver.after(self._newest - clock.now, lambda: action() if self._open else None)

    def hold(self, until: float) -> None:
        """Let nothing that is sent from now on arrive before this time."""
        self._newest = max(self._newest, until)

    def cut(self) -> None:
        """Lose what is under way, and all that is still to come."""
        self._open = False
