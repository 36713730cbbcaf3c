"""One connection between two neighbours of a rail: frames in and out of a socket that never blocks.

Both directions are always read, whatever the ring is doing: data is sent only against credit, so nothing that has no
place yet can stand in front of a keep-alive.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable

from fthsdp.errors import ConnectionLost, WireError
from fthsdp.ftar.frames import HEADER_BYTES, Header, Kind
from fthsdp.ftar.reduce import Sink
from fthsdp.tls import TlsSocket

__all__ = ["Connection", "Peer"]

Peer = tuple[int, int]
"""Replica and attempt."""

_LOCAL_BUFFER = 512 << 10
"""Bytes that the kernel holds for a neighbour on the same machine (it doubles them). Nothing is on the way there, so
more would only be out of the cache when it is read: that costs a third more processor time per byte. Between machines
the kernel fits its buffers to the path."""


class Connection:
    """A socket of the progress loop. ``on_header`` says where a payload goes, ``on_frame`` gets each complete frame."""

    def __init__(self, sock: socket.socket, *, peer: Peer, epoch: int, silence_timeout: float, now: float) -> None:
        self.sock = sock
        self.peer = peer
        self.epoch = epoch
        self.heard = now
        """When the last bytes came."""
        self.spoke = now
        """When the last bytes went."""
        self.departed = False
        """The peer said goodbye."""
        self.interest = selectors.EVENT_READ
        """What the progress loop waits for."""
        self.full = False
        """The socket took not all of what was sent last; the progress loop says when it takes more."""
        self.on_header: Callable[[Header], Sink | None] = _refuse_payload
        self.on_frame: Callable[[Header], None] = lambda header: None
        self._control: deque[bytes] = deque()
        self._outgoing: list[bytes | memoryview] = []
        self._left = 0
        """Bytes of ``_outgoing``."""
        self._head = bytearray(HEADER_BYTES)
        self._head_room = memoryview(self._head)
        self._header: Header | None = None
        self._sink: Sink | None = None
        self._ending = False
        self._ended = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished acknowledges nothing; the kernel then ends the connection after this time.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_timeout * 1000))
        if _on_this_machine(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER)

    # --- out ---

    @property
    def idle(self) -> bool:
        """Whether the next frame can be handed over."""
        return not self._outgoing

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait for the socket."""
        return bool(self._outgoing or self._control)

    def say(self, header: Header) -> None:
        """Send a frame without payload as soon as the current frame is through."""
        if not self._ending:
            self._control.append(header.encode())

    def end(self) -> None:
        """Say goodbye and close our direction once that is sent."""
        self.say(Header(kind=Kind.GOODBYE, epoch=self.epoch))
        self._ending = True

    def begin_frame(self, header: Header, payload: memoryview) -> None:
        """Make this the frame that ``flush`` sends; only when idle."""
        self._outgoing = [header.encode(), payload]
        self._left = HEADER_BYTES + len(payload)

    def flush(self, now: float) -> bool:
        """Send what the socket takes; True when all of it is gone. Raises ConnectionLost."""
        while not self.full and (self._outgoing or self._control):
            if not self._outgoing:
                self._outgoing = [b"".join(self._control)]
                self._left = len(self._outgoing[0])
                self._control.clear()
            self._send_once(now)
        if self._ending and not self._ended and not self.full:
            self._ended = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        return not self.full

    def _send_once(self, now: float) -> None:
        try:
            sent = self.sock.sendmsg(self._outgoing)
        except BlockingIOError:
            self.full = True
            return
        except OSError as error:
            raise ConnectionLost(f"{error.strerror or error} while sending") from error
        self.spoke = now
        self._left -= sent
        if not self._left:
            self._outgoing.clear()
            return
        self.full = True
        while sent >= len(self._outgoing[0]):
            sent -= len(self._outgoing.pop(0))
        self._outgoing[0] = memoryview(self._outgoing[0])[sent:]

    # --- in ---

    @property
    def pending(self) -> bool:
        """Whether there may be something to read that no selector knows of."""
        return isinstance(self.sock, TlsSocket) and self.sock.pending

    def receive(self, now: float) -> bool:
        """Read once; whether more is likely to be there. Raises ConnectionLost at the end, WireError on nonsense."""
        if self._sink is None and not self._fill_header(now):
            return False
        # Behind a header its payload is most likely there as well.
        return self._sink is None or self._fill_sink(self._sink, now)

    def _fill_header(self, now: float) -> bool:
        wanted = len(self._head_room)
        count = self._receive_into(self._head_room, now)
        self._head_room = self._head_room[count:]
        if count == wanted:
            self._read_header()
        return count == wanted

    def _fill_sink(self, sink: Sink, now: float) -> bool:
        room = sink.room()
        count = self._receive_into(room, now)
        if count:
            sink.filled(count)
        self._finish_if_complete(sink)
        return count == len(room)

    def _receive_into(self, room: memoryview, now: float) -> int:
        try:
            count = self.sock.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(f"{error.strerror or error} while receiving") from error
        if not count:
            raise ConnectionLost("it closed the connection")
        self.heard = now
        return count

    def _finish_if_complete(self, sink: Sink | None) -> None:
        if self._header is not None and (sink is None or not sink.room()):
            header, self._header, self._sink = self._header, None, None
            self.departed = self.departed or header.kind is Kind.GOODBYE
            self.on_frame(header)

    def _read_header(self) -> None:
        self._head_room = memoryview(self._head)
        header = Header.decode(self._head)
        if header.epoch != self.epoch:
            raise WireError(f"sent '{header}' on a connection of epoch {self.epoch}")
        if header.kind in (Kind.REDUCE, Kind.GATHER):
            self._sink = self.on_header(header)
        elif header.length:
            raise WireError(f"sent '{header}' with {header.length} bytes of payload")
        self._header = header
        self._finish_if_complete(self._sink)

    def close(self) -> None:
        """Close the socket at once; again is fine."""
        self.sock.close()


def _on_this_machine(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    return False


def _refuse_payload(header: Header) -> Sink | None:
    raise WireError(f"sent '{header}', which nobody asked for")
