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

__all__ = ["Connection", "Peer"]

Peer = tuple[int, int]
"""Replica and attempt."""


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
        self.on_header: Callable[[Header], Sink | None] = _refuse_payload
        self.on_frame: Callable[[Header], None] = lambda header: None
        self._control: deque[bytes] = deque()
        self._outgoing: list[memoryview] = []
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
        self._outgoing = [memoryview(header.encode()), payload]

    def flush(self, now: float) -> bool:
        """Send what the socket takes; True when all of it is gone. Raises ConnectionLost."""
        while self._outgoing or self._control:
            if not self._outgoing:
                self._outgoing = [memoryview(b"".join(self._control))]
                self._control.clear()
            try:
                sent = self.sock.sendmsg(self._outgoing)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionLost(f"{error.strerror or error} while sending") from error
            self.spoke = now
            self._drop(sent)
        if self._ending and not self._ended:
            self._ended = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        return True

    def _drop(self, sent: int) -> None:
        while self._outgoing and sent >= len(self._outgoing[0]):
            sent -= len(self._outgoing.pop(0))
        if sent:
            self._outgoing[0] = self._outgoing[0][sent:]

    # --- in ---

    def receive(self, now: float) -> bool:
        """Read once; False when nothing was there. Raises ConnectionLost at the end, WireError on nonsense."""
        room = self._head_room if self._sink is None else self._sink.room()
        try:
            count = self.sock.recv_into(room)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(f"{error.strerror or error} while receiving") from error
        if not count:
            raise ConnectionLost("it closed the connection")
        self.heard = now
        if self._sink is None:
            self._head_room = self._head_room[count:]
            if not self._head_room:
                self._read_header()
        else:
            self._sink.filled(count)
        if self._header is not None and (self._sink is None or not self._sink.room()):
            self._finish_frame(self._header)
        return True

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

    def _finish_frame(self, header: Header) -> None:
        self._header = self._sink = None
        self.departed = self.departed or header.kind is Kind.GOODBYE
        self.on_frame(header)

    def close(self) -> None:
        """Close the socket at once; again is fine."""
        self.sock.close()


def _refuse_payload(header: Header) -> Sink | None:
    raise WireError(f"sent '{header}', which nobody asked for")
