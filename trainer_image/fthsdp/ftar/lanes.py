"""The two directions of one stream: what is due on it, in which order, and against how much credit.

A ring deals the frames of its collectives over its streams in turn, so both sides know which frame comes next on each
of them. On a stream they keep their order; between streams they may overtake one another, and a collective counts what
has come without a gap.
"""

from __future__ import annotations

from collections import deque

from fthsdp.errors import WireError
from fthsdp.ftar.collective import Collective
from fthsdp.ftar.connection import Connection
from fthsdp.ftar.frames import Header, Kind
from fthsdp.ftar.reduce import Sink, WireBuffer
from fthsdp.ftar.settings import FtarSettings, WireDtype

__all__ = ["InLine", "Inlet", "Outlet"]


class InLine:
    """A collective and how far it is."""

    __slots__ = ("_ahead", "collective", "received", "sent")

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.sent = 0
        """Frames that are with the kernel."""
        self.received = 0
        """Frames that are complete, from the first one on without a gap."""
        self._ahead: set[int] = set()
        """Complete frames behind a gap: they came on a faster stream."""

    @property
    def done(self) -> bool:
        """Whether nothing of it is left to do. Until then its tensors are in use."""
        return self.sent == self.collective.num_sends and self.received == self.collective.num_receives

    def arrived(self, position: int) -> None:
        """Count a complete frame."""
        if position != self.received:
            self._ahead.add(position)
            return
        self.received += 1
        while self.received in self._ahead:
            self._ahead.remove(self.received)
            self.received += 1


def _buffer(settings: FtarSettings) -> WireBuffer | None:
    if settings.wire_dtype is WireDtype.FLOAT32:
        return None
    return WireBuffer(settings.wire_dtype, settings.chunk_bytes)


class _Lane:
    """What both directions have."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.due: deque[tuple[InLine, int]] = deque()
        """Collectives and positions of the frames that are still to come or to go."""

    @property
    def missed(self) -> bool:
        """Whether the neighbour left although something is due here."""
        return bool(self.due) and self.connection is not None and self.connection.departed

    def close(self) -> None:
        """Close the connection; nothing is due any more."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        self.due.clear()


class Outlet(_Lane):
    """Frames to the right neighbour."""

    def __init__(self, settings: FtarSettings) -> None:
        super().__init__()
        self._buffer = _buffer(settings)
        self._under_way: InLine | None = None
        """Whose frame was begun last, until it is with the kernel."""
        self._begun = self._allowed = 0
        """Frames since the connection began: begun, and what it has given credit for."""

    def attach(self, connection: Connection) -> None:
        """Use a connection that we have dialled."""
        connection.on_frame = self._heard
        self.connection = connection

    def pump(self, now: float) -> None:
        """Send what can be sent; raises ConnectionLost."""
        connection = self.connection
        if connection is None or connection.departed or connection.full:
            return
        while connection.flush(now):
            if self._under_way is not None:
                self._under_way.sent += 1
                self._under_way = None
            if not self._begin_next(connection):
                return

    def _begin_next(self, connection: Connection) -> bool:
        if not self.due or self._begun >= self._allowed:
            return False
        entry, position = self.due[0]
        frame = entry.collective.outgoing(position, received=entry.received, buffer=self._buffer)
        if frame is None:
            return False
        self.due.popleft()
        connection.begin_frame(*frame)
        self._under_way = entry
        self._begun += 1
        return True

    def _heard(self, header: Header) -> None:
        if header.kind is not Kind.CREDIT:
            return
        if header.number < self._allowed:
            raise WireError(f"took credit back: {header.number} after {self._allowed}")
        self._allowed = header.number


class Inlet(_Lane):
    """Frames from the left neighbour."""

    def __init__(self, settings: FtarSettings) -> None:
        super().__init__()
        self._buffer = _buffer(settings)
        self._window = settings.window * settings.chunk_bytes // settings.streams
        """Bytes that may be under way."""
        self._granted: deque[int] = deque()
        """Sizes of frames that may come."""
        self._ungranted: deque[int] = deque()
        """Sizes of frames that we wait for without having given credit yet."""
        self._granted_bytes = 0
        self._told = 0
        """Frames since the connection began that we have given credit for."""

    def attach(self, connection: Connection) -> None:
        """Use a connection on which the left neighbour has dialled us."""
        connection.on_header, connection.on_frame = self._place, self._arrived
        self.connection = connection
        self.grant()

    def pump(self, now: float) -> None:
        """Send credits and keep-alives; raises ConnectionLost."""
        if self.connection is not None and not self.connection.departed:
            self.connection.flush(now)

    def await_frame(self, entry: InLine, position: int) -> None:
        """Put a frame into line; ``grant`` tells the neighbour."""
        self.due.append((entry, position))
        self._ungranted.append(entry.collective.size(position))

    def grant(self) -> None:
        """Give credit, when so much of it is used that a message is worth its cost."""
        if self.connection is None or self._granted_bytes > self._window // 2:
            return
        told = self._told
        while self._ungranted and (not self._granted or self._granted_bytes + self._ungranted[0] <= self._window):
            self._granted.append(self._ungranted.popleft())
            self._granted_bytes += self._granted[-1]
            self._told += 1
        if self._told > told:
            self.connection.say(Header(Kind.CREDIT, self.connection.epoch, self._told))

    def _place(self, header: Header) -> Sink:
        if not self._granted:
            raise WireError(f"sent '{header}' without credit")
        entry, position = self.due[0]
        return entry.collective.incoming(position, header, buffer=self._buffer)

    def _arrived(self, header: Header) -> None:
        if header.kind is Kind.CREDIT:
            raise WireError("gave credit against the stream")
        if header.kind not in (Kind.REDUCE, Kind.GATHER):
            return
        self._granted_bytes -= self._granted.popleft()
        entry, position = self.due.popleft()
        entry.arrived(position)
        self.grant()
