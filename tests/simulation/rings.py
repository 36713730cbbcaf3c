"""The rings of all rails and epochs: collectives that each member completes in its own time, or sees break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from tests.simulation.clock import Clock, Owner

__all__ = ["SILENCE_TIMEOUT", "Port", "Rings", "Work"]

SILENCE_TIMEOUT = 5.0
"""Seconds without a keep-alive after which a neighbour is taken for gone."""
CONNECT_TIMEOUT = 10.0
"""Seconds within which a ring has to be connected."""

Name = tuple[int, int]
"""A replica and its attempt."""


class Port(Protocol):
    """What a rank is to its rings."""

    @property
    def owner(self) -> Owner:
        """The process."""

    @property
    def name(self) -> Name:
        """Replica and attempt."""

    def ring_connected(self, epoch: int) -> None:
        """Both neighbours are there."""

    def ring_broken(self, epoch: int, suspect: int | None, reason: str) -> None:
        """The ring broke for another reason than our own cancelling."""


@dataclass(eq=False, slots=True)
class Work:
    """A collective as one member sees it."""

    done: bool = False
    result: tuple[Any, ...] | None = None
    """By ring position; None when it broke."""
    _waiter: Callable[[], None] | None = None

    def then(self, waiter: Callable[[], None]) -> None:
        """Call this once it is done."""
        if self.done:
            waiter()
        else:
            self._waiter = waiter

    def end(self, result: tuple[Any, ...] | None) -> None:
        """Complete it, or let it break."""
        if not self.done:
            self.done, self.result = True, result
            if self._waiter is not None:
                self._waiter()


class _State(Enum):
    OPEN = auto()
    LEFT = auto()
    CLOSED = auto()


@dataclass(eq=False)
class _End:
    """One member's part of a ring."""

    port: Port
    state: _State = _State.OPEN
    connected: bool = False
    submitted: list[Any] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    promised: int = 0
    """How many of the works will complete unless the ring breaks here first."""
    completed: float = 0.0

    @property
    def idle(self) -> bool:
        return all(work.done for work in self.works)


@dataclass(eq=False)
class _Ring:
    line: tuple[Name, ...]
    ends: dict[Name, _End] = field(default_factory=dict)

    def neighbours(self, name: Name) -> list[Name]:
        if len(self.line) == 1:
            return []
        here = self.line.index(name)
        return [self.line[here - 1], self.line[(here + 1) % len(self.line)]]


class Rings:
    """All rings of one rail."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rings: dict[int, _Ring] = {}
        self._cancelled: dict[Name, int] = {}
        self._active: dict[Name, int] = {}

    # --- what a rank does -------------------------------------------------------------------------------------------

    def connect(self, port: Port, epoch: int, line: tuple[Name, ...]) -> None:
        """Connect this ring in the background, unless it was cancelled or is over."""
        if epoch <= self._cancelled.get(port.name, 0) or epoch < self._active.get(port.name, 0):
            return
        ring = self._rings.setdefault(epoch, _Ring(line))
        assert ring.line == line, f"epoch {epoch} has two lists of members: {ring.line} and {line}"
        if port.name in ring.ends:
            return
        end = ring.ends[port.name] = _End(port)
        for name in {port.name, *ring.neighbours(port.name)}:
            if name in ring.ends:
                self._look_at_connections(epoch, name)
        port.owner.after(CONNECT_TIMEOUT, lambda: self._blame_missing(epoch, end))

    def activate(self, port: Port, epoch: int) -> None:
        """Use this ring from now on and leave those before."""
        self._active[port.name] = max(epoch, self._active.get(port.name, 0))
        for number, ring in self._rings.items():
            end = ring.ends.get(port.name)
            if number >= epoch or end is None or end.state is not _State.OPEN:
                continue
            if end.idle and end.connected:
                end.state = _State.LEFT
                self._hang_up(number, port.name)
            else:
                self._close(number, end)

    def cancel(self, port: Port, up_to: int) -> None:
        """Close the rings of all epochs up to this one."""
        self._cancelled[port.name] = max(up_to, self._cancelled.get(port.name, 0))
        for number, ring in self._rings.items():
            end = ring.ends.get(port.name)
            if number <= up_to and end is not None and end.state is not _State.CLOSED:
                self._close(number, end)

    def submit(self, port: Port, payload: Any) -> Work:
        """Give this rank's part of the next collective of the ring that is active."""
        work = Work()
        epoch = self._active[port.name]
        ring = self._rings.get(epoch)
        end = ring.ends.get(port.name) if ring is not None else None
        if ring is None or end is None or end.state is not _State.OPEN:
            port.owner.soon(lambda: work.end(None))
            return work
        end.submitted.append(payload)
        end.works.append(work)
        self._look_at_progress(epoch)
        for name in ring.neighbours(port.name):
            if name in ring.ends and ring.ends[name].state is not _State.OPEN:
                self._hang_up(epoch, name)
        return work

    # --- what happens to it -----------------------------------------------------------------------------------------

    def die(self, port: Port) -> None:
        """The process is gone: its neighbours see their connections close."""
        for number, ring in self._rings.items():
            end = ring.ends.get(port.name)
            if end is not None and end.state is not _State.CLOSED:
                end.state = _State.CLOSED
                self._hang_up(number, port.name)

    def freeze(self, port: Port) -> None:
        """The process stands still: after a while its neighbours miss its keep-alives."""
        owner = port.owner

        def blame() -> None:
            if not (owner.alive and owner.frozen):
                return
            for number, ring in self._rings.items():
                end = ring.ends.get(port.name)
                if end is not None and end.state is _State.OPEN:
                    for name in ring.neighbours(port.name):
                        self._seen_gone(number, name, port.name, "nothing was heard of it")

        self._clock.after(SILENCE_TIMEOUT + self._clock.delay(), blame)

    def cut(self, epoch: int, name: Name) -> None:
        """A connection of this member is reset."""
        ring = self._rings.get(epoch)
        end = ring.ends.get(name) if ring is not None else None
        if ring is not None and end is not None and end.state is _State.OPEN and len(ring.line) > 1:
            self._break(epoch, end, ring.neighbours(name)[0][0], "connection reset")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _look_at_connections(self, epoch: int, name: Name) -> None:
        ring = self._rings[epoch]
        end = ring.ends[name]
        if end.connected or end.state is not _State.OPEN:
            return
        others = [ring.ends.get(other) for other in ring.neighbours(name)]
        if all(other is not None and other.state is _State.OPEN for other in others):
            end.port.owner.soon(lambda: self._connected(epoch, end))

    def _connected(self, epoch: int, end: _End) -> None:
        if end.state is _State.OPEN and not end.connected:
            end.connected = True
            end.port.ring_connected(epoch)
            self._look_at_progress(epoch)
            ring = self._rings[epoch]
            for name in ring.neighbours(end.port.name):
                if ring.ends[name].state is not _State.OPEN:
                    self._hang_up(epoch, name)

    def _blame_missing(self, epoch: int, end: _End) -> None:
        if end.state is _State.OPEN and not end.connected:
            ring = self._rings[epoch]
            missing = [n for n in ring.neighbours(end.port.name) if n not in ring.ends]
            self._break(epoch, end, missing[0][0] if missing else None, "the ring did not connect")

    def _look_at_progress(self, epoch: int) -> None:
        """Let every member complete, in its own time, what all have submitted."""
        ring = self._rings[epoch]
        if len(ring.ends) < len(ring.line) or not all(end.connected for end in ring.ends.values()):
            return
        ready = min(len(end.submitted) for end in ring.ends.values())
        for end in ring.ends.values():
            for number in range(ready):
                if number == end.promised:
                    end.promised += 1
                    self._complete(ring, end, number)

    def _complete(self, ring: _Ring, end: _End, number: int) -> None:
        work = end.works[number]
        result = tuple(ring.ends[name].submitted[number] for name in ring.line)
        end.completed = max(end.completed, self._clock.now + self._clock.delay())
        end.port.owner.after(end.completed - self._clock.now, lambda: work.end(result))

    def _break(self, epoch: int, end: _End, suspect: int | None, reason: str) -> None:
        self._close(epoch, end)
        end.port.ring_broken(epoch, suspect, reason)

    def _close(self, epoch: int, end: _End) -> None:
        end.state = _State.CLOSED
        for work in end.works:
            work.end(None)
        self._hang_up(epoch, end.port.name)

    def _hang_up(self, epoch: int, name: Name) -> None:
        """The neighbours of this member see, each in its own time, that its connections are closed."""
        ring = self._rings[epoch]
        for other in ring.neighbours(name):
            end = ring.ends.get(other)
            if end is not None and end.state is not _State.CLOSED:
                end.port.owner.soon(lambda other=other: self._seen_gone(epoch, other, name, "connection closed"))

    def _seen_gone(self, epoch: int, name: Name, gone: Name, reason: str) -> None:
        ring = self._rings[epoch]
        end, other = ring.ends.get(name), ring.ends.get(gone)
        if end is None or end.state is not _State.OPEN:
            return
        if other is not None and other.state is _State.LEFT and len(other.submitted) >= len(end.submitted):
            return  # it left in good order, and owes us nothing
        if not end.connected and other is not None and other.state is not _State.OPEN:
            # It is dialled again and again until the time for connecting is over.
            return
        self._break(epoch, end, gone[0], reason)
