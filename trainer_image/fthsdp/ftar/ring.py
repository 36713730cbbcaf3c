"""One rail of one epoch as one member sees it: a connection to either neighbour and the collectives in line.

We dial our right neighbour and send chunks to it; our left one dials us, with as many connections as there are streams.
Against the stream only credits, keep-alives and goodbyes travel. Collectives begin in the order in which they were
submitted and their frames are dealt over the streams in that order, so each side knows which frame is next on each. A
ring is driven by one thread and knows no locks.

A connection that fails fails the ring, one of several streams too: all its sockets are closed at once, so that the
neighbours see it in turn and the break runs round the ring without any timeout. A neighbour that said goodbye first has
finished all that it began; it is missed only when a collective still needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fthsdp.errors import FthsdpError, RingBroken, WireError
from fthsdp.ftar.collective import Collective
from fthsdp.ftar.connection import Connection
from fthsdp.ftar.lanes import Inlet, InLine, Outlet
from fthsdp.ftar.settings import FtarSettings

__all__ = ["RailMember", "Ring", "RingState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RailMember:
    """One replica on this rail."""

    replica: int
    attempt: int
    address: str
    """host:port of its endpoint."""


class RingState(StrEnum):
    """How far a ring is."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LEAVING = "leaving"
    """We said goodbye and read until the neighbours have closed."""
    CLOSED = "closed"


class Ring:
    """Sends, receives and counts for the collectives of one epoch."""

    def __init__(self, *, epoch: int, members: Sequence[RailMember], index: int, settings: FtarSettings) -> None:
        self.epoch = epoch
        self.members = tuple(members)
        self.index = index
        self.state = RingState.CONNECTING
        self.error: FthsdpError | None = None
        """Why it is closed."""
        self._inlets = [Inlet(settings) for _ in range(settings.streams)]
        self._outlets = [Outlet(settings) for _ in range(settings.streams)]
        self._dealt_out = self._dealt_in = 0
        """Frames so far: the next one belongs to this stream, counted round."""
        self._unfinished: deque[InLine] = deque()

    # --- neighbours ---

    @property
    def left_member(self) -> RailMember:
        """The member that sends to us."""
        return self.members[self.index - 1]

    @property
    def right_member(self) -> RailMember:
        """The member that we send to."""
        return self.members[(self.index + 1) % len(self.members)]

    @property
    def connections(self) -> list[Connection]:
        """Those that are open."""
        lanes = (*self._inlets, *self._outlets)
        return [lane.connection for lane in lanes if lane.connection is not None and not lane.connection.departed]

    @property
    def idle(self) -> bool:
        """Whether no collective is under way."""
        return not self._unfinished

    def awaits_left(self, stream: int) -> bool:
        """Whether the left neighbour has not dialled us for this stream yet."""
        return self.state is RingState.CONNECTING and self._inlets[stream].connection is None

    def attach_left(self, stream: int, connection: Connection) -> None:
        """The left neighbour has dialled us."""
        self._inlets[stream].attach(connection)

    def attach_right(self, stream: int, connection: Connection) -> None:
        """We have dialled the right neighbour."""
        self._outlets[stream].attach(connection)

    def missing(self) -> RailMember | None:
        """Return a neighbour that is not connected yet, on all streams."""
        if len(self.members) == 1:
            return None
        if any(outlet.connection is None for outlet in self._outlets):
            return self.right_member
        return self.left_member if any(inlet.connection is None for inlet in self._inlets) else None

    # --- collectives ---

    def submit(self, collective: Collective) -> None:
        """Put a collective into line; it fails at once when the ring is closed."""
        if self.error is not None:
            collective.fail(self.error)
            return
        collective.begin(len(self.members), self.index)
        entry = InLine(collective)
        self._unfinished.append(entry)
        streams = len(self._outlets)
        for position in range(collective.num_sends):
            self._outlets[(self._dealt_out + position) % streams].due.append((entry, position))
        for position in range(collective.num_receives):
            self._inlets[(self._dealt_in + position) % streams].await_frame(entry, position)
        self._dealt_out += collective.num_sends
        self._dealt_in += collective.num_receives
        for inlet in self._inlets:
            inlet.grant()
        self._finish_done()

    def send_on(self, now: float) -> None:
        """Send what can be sent to the right neighbour; raises RingBroken."""
        try:
            for outlet in self._outlets:
                outlet.pump(now)
        except WireError as error:
            raise self.broken_by(self.right_member, str(error)) from error

    def pump(self, now: float) -> None:
        """Send what can be sent, end what is through, and miss who is gone; raises RingBroken."""
        self.send_on(now)
        try:
            for inlet in self._inlets:
                inlet.pump(now)
        except WireError as error:
            raise self.broken_by(self.left_member, str(error)) from error
        self._finish_done()
        self._miss_departed()

    def _finish_done(self) -> None:
        while self._unfinished and self._unfinished[0].done:
            self._unfinished.popleft().collective.succeed()

    # --- the end ---

    def _miss_departed(self) -> None:
        for lanes, member in ((self._inlets, self.left_member), (self._outlets, self.right_member)):
            if any(lane.missed for lane in lanes):
                raise self.broken_by(member, "it left while a collective still needed it")

    def broken_by(self, member: RailMember, reason: str) -> RingBroken:
        """Return the error that names a neighbour."""
        return RingBroken(f"epoch {self.epoch}: replica {member.replica}: {reason}", suspect=member.replica)

    def peer_of(self, connection: Connection) -> RailMember:
        """Return the neighbour on the other side."""
        return self.left_member if any(c.connection is connection for c in self._inlets) else self.right_member

    def leave(self) -> None:
        """Say goodbye; only when idle."""
        assert self.idle
        self.state = RingState.LEAVING
        self.error = RingBroken(f"epoch {self.epoch}: its ring is closed")
        for connection in self.connections:
            connection.end()

    def close(self, error: FthsdpError) -> None:
        """Close everything at once; what is under way fails with ``error``."""
        self.state = RingState.CLOSED
        self.error = self.error or error
        for lane in (*self._inlets, *self._outlets):
            lane.close()
        unfinished, self._unfinished = self._unfinished, deque()
        for entry in unfinished:
            entry.collective.fail(error)
