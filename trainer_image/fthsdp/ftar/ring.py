"""One rail of one epoch as one member sees it: a connection to either neighbour and the collectives in line.

We dial our right neighbour and send chunks to it; our left one dials us. Against the stream only credits, keep-alives
and goodbyes travel. Collectives begin in the order in which they were submitted and their frames travel in that order,
so each side knows which frame is next. A ring is driven by one thread and knows no locks.

A connection that fails fails the ring: all its sockets are closed at once, so that the neighbours see it in turn and
the break runs round the ring without any timeout. A neighbour that said goodbye first has finished all that it began;
it is missed only when a collective still needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fthsdp.errors import FthsdpError, RingBroken, WireError
from fthsdp.ftar.collective import AllReduce, Collective
from fthsdp.ftar.connection import Connection
from fthsdp.ftar.frames import Header, Kind
from fthsdp.ftar.reduce import Scratch, Sink
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


@dataclass(slots=True, eq=False)
class _InLine:
    """A collective and how many of its frames are through."""

    collective: Collective
    sent: int = 0
    received: int = 0


class Ring:
    """Sends, receives and counts for the collectives of one epoch."""

    def __init__(self, *, epoch: int, members: Sequence[RailMember], index: int, settings: FtarSettings) -> None:
        self.epoch = epoch
        self.members = tuple(members)
        self.index = index
        self.state = RingState.CONNECTING
        self.error: FthsdpError | None = None
        """Why it is closed."""
        self.left: Connection | None = None
        self.right: Connection | None = None
        self._settings = settings
        self._scratch: Scratch | None = None
        self._sending: deque[_InLine] = deque()
        """Submitted and not sent completely."""
        self._receiving: deque[_InLine] = deque()
        """Submitted and not received completely."""
        self._unfinished: deque[_InLine] = deque()
        self._on_the_wire: _InLine | None = None
        """Whose frame was begun last."""
        self._sent = self._allowed = 0
        """Frames since the connection began: sent to the right, and what it has given credit for."""
        self._told = 0
        """Frames that we have given the left credit for."""
        self._granted: deque[int] = deque()
        """Sizes of frames that may come."""
        self._ungranted: deque[int] = deque()
        """Sizes of frames that we wait for without having given credit yet."""
        self._granted_bytes = 0

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
    def connections(self) -> tuple[Connection, ...]:
        """Those that are open."""
        return tuple(c for c in (self.left, self.right) if c is not None and not c.departed)

    @property
    def idle(self) -> bool:
        """Whether no collective is under way."""
        return not self._unfinished

    def attach_left(self, connection: Connection) -> None:
        """The left neighbour has dialled us."""
        connection.on_header, connection.on_frame = self._place, self._from_left
        self.left = connection
        self._grant()

    def attach_right(self, connection: Connection) -> None:
        """We have dialled the right neighbour."""
        connection.on_frame = self._from_right
        self.right = connection

    def missing(self) -> RailMember | None:
        """Return a neighbour that is not connected yet."""
        if len(self.members) == 1:
            return None
        if self.right is None:
            return self.right_member
        return self.left_member if self.left is None else None

    # --- collectives ---

    def submit(self, collective: Collective) -> None:
        """Put a collective into line; it fails at once when the ring is closed."""
        if self.error is not None:
            collective.fail(self.error)
            return
        collective.begin(len(self.members), self.index)
        if isinstance(collective, AllReduce):
            self._scratch = self._scratch or Scratch()
            collective.use(self._scratch)
        entry = _InLine(collective)
        self._unfinished.append(entry)
        if collective.num_sends:
            self._sending.append(entry)
        if collective.num_receives:
            self._receiving.append(entry)
        self._ungranted.extend(map(collective.size, range(collective.num_receives)))
        self._grant()
        self._finish_done()

    def pump(self, now: float) -> None:
        """Send what can be sent; raises RingBroken."""
        for connection in self.connections:
            try:
                while connection.flush(now) and connection is self.right and self._begin_next(connection):
                    pass
            except WireError as error:
                raise self.broken_by(self.peer_of(connection), str(error)) from error
        self._finish_done()
        self._miss_departed()

    def _begin_next(self, right: Connection) -> bool:
        if not self._sending or self._sent >= self._allowed:
            return False
        entry = self._sending[0]
        frame = entry.collective.outgoing(entry.sent, received=entry.received)
        if frame is None:
            return False
        right.begin_frame(*frame)
        self._on_the_wire = entry
        self._sent += 1
        entry.sent += 1
        if entry.sent == entry.collective.num_sends:
            self._sending.popleft()
        return True

    def _finish_done(self) -> None:
        while self._unfinished and self._is_done(self._unfinished[0]):
            self._unfinished.popleft().collective.succeed()

    def _is_done(self, entry: _InLine) -> bool:
        # Its last frame has to be with the kernel before its tensors are given back.
        if entry is self._on_the_wire and self.right is not None and not self.right.idle:
            return False
        return entry.sent == entry.collective.num_sends and entry.received == entry.collective.num_receives

    # --- frames ---

    def _place(self, header: Header) -> Sink:
        if not self._granted:
            raise WireError(f"sent '{header}' without credit")
        entry = self._receiving[0]
        return entry.collective.incoming(entry.received, header)

    def _from_left(self, header: Header) -> None:
        if header.kind is Kind.CREDIT:
            raise WireError("gave credit against the stream")
        if header.kind not in (Kind.REDUCE, Kind.GATHER):
            return
        self._granted_bytes -= self._granted.popleft()
        entry = self._receiving[0]
        entry.received += 1
        if entry.received == entry.collective.num_receives:
            self._receiving.popleft()
        self._grant()

    def _from_right(self, header: Header) -> None:
        if header.kind is not Kind.CREDIT:
            return
        if header.number < self._allowed:
            raise WireError(f"took credit back: {header.number} after {self._allowed}")
        self._allowed = header.number

    def _grant(self) -> None:
        if self.left is None:
            return
        window = self._settings.window * self._settings.chunk_bytes
        told = self._told
        while self._ungranted and (not self._granted or self._granted_bytes + self._ungranted[0] <= window):
            self._granted.append(self._ungranted.popleft())
            self._granted_bytes += self._granted[-1]
            self._told += 1
        if self._told > told:
            self.left.say(Header(kind=Kind.CREDIT, epoch=self.epoch, number=self._told))

    # --- the end ---

    def _miss_departed(self) -> None:
        if self._receiving and self.left is not None and self.left.departed:
            raise self.broken_by(self.left_member, "it left while a collective still needed it")
        if self._sending and self.right is not None and self.right.departed:
            raise self.broken_by(self.right_member, "it left while a collective still needed it")

    def broken_by(self, member: RailMember, reason: str) -> RingBroken:
        """Return the error that names a neighbour."""
        return RingBroken(f"epoch {self.epoch}: replica {member.replica}: {reason}", suspect=member.replica)

    def peer_of(self, connection: Connection) -> RailMember:
        """Return the neighbour on the other side."""
        return self.left_member if connection is self.left else self.right_member

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
        for connection in (self.left, self.right):
            if connection is not None:
                connection.close()
        self.left = self.right = None
        unfinished, self._unfinished = self._unfinished, deque()
        self._sending.clear()
        self._receiving.clear()
        for entry in unfinished:
            entry.collective.fail(error)
