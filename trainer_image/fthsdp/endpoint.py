"""The one port at which a rank can be reached.

Everything that others want of a rank (a rail, a stripe of its state) comes to this port, says its purpose in the
handshake and proves that it holds the job's key before anything else of it is read. What belongs to a purpose is
somebody else's: they register a handler, which gets the proven connection.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fthsdp.errors import ConfigError, NotReady, Refused, WireError
from fthsdp.tls import Tls, TlsSocket
from fthsdp.wire import Json, accept_blocking

__all__ = ["Endpoint"]

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a connection may take to prove that it belongs here."""
MOST_UNPROVEN = 256
"""Connections that may be in a handshake at a time; one more and the oldest of them is closed."""
_LOOK_AGAIN = 0.5
"""Seconds between looks for connections whose handshake takes too long, while there are any."""

Handler = Callable[[socket.socket, Json], None]
Judge = Callable[[Json], None]


def _anybody(hello: Json) -> None:
    """Let everybody in who holds the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    handler: Handler
    judge: Judge


class Endpoint:
    """A listening socket, a thread that accepts, and a thread for each connection until its handler returns."""

    def __init__(self, *, host: str, key: bytes, job: str, tls: Tls | None = None) -> None:
        """Listen on a free port of ``host``, with TLS or without; raises ConfigError when that is no address.

        Where ``host`` is not an address of this machine (the pod sits behind address translation), all addresses
        are listened on and ``host`` is what others are told.
        """
        self._key = key
        self._job = job
        self.tls = tls
        """What goes for connections to this endpoint goes for those that its rank dials to others."""
        self._listener = _listen(host)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        """host:port to tell others."""
        self._lock = threading.Lock()
        self._services: dict[str, _Service] = {}
        self._unproven: dict[socket.socket, float] = {}
        """Connections in a handshake, oldest first, and when it has to be over."""
        self._handled: set[socket.socket] = set()
        """Connections that a handler has not returned from."""
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._waker, self._wake = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="fthsdp-endpoint", daemon=True)
        self._acceptor.start()

    def serve(self, purpose: str, handler: Handler, *, judge: Judge = _anybody) -> None:
        """Give connections of this purpose to ``handler``, in a thread of their own; it owns the socket.

        ``judge`` sees the proven hello first and raises Refused to turn it away with a reason.
        """
        with self._lock:
            if self._closed:
                raise NotReady(f"the endpoint {self.address} is closed")
            self._services[purpose] = _Service(handler=handler, judge=judge)

    def close(self) -> None:
        """Stop listening, cut the connections that are still handled here, and end the threads. Idempotent."""
        with self._lock:
            self._closed = True
            threads = [self._acceptor, *self._threads]
            for sock in (*self._unproven, *self._handled):
                _cut(sock)
            with contextlib.suppress(OSError):
                self._wake.send(b"x")
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    # --- the accepting thread ---

    def _accept(self) -> None:
        with self._listener, self._waker, self._wake:
            while not self._closed:
                timeout = _LOOK_AGAIN if self._unproven else None
                readable, _, _ = select.select([self._listener, self._waker], [], [], timeout)
                self._cut_late(time.monotonic())
                if self._listener in readable:
                    self._accept_one()

    def _accept_one(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # Out of descriptors: the connection stays in the queue until some are free.
                select.select([self._waker], [], [], _LOOK_AGAIN)
            return
        sock = sock if self.tls is None else TlsSocket(sock, self.tls, server_side=True)
        thread = threading.Thread(target=self._serve, args=(sock,), name="fthsdp-connection", daemon=True)
        with self._lock:
            if self._closed:
                sock.close()
                return
            if len(self._unproven) >= MOST_UNPROVEN:
                _cut(next(iter(self._unproven)))
                del self._unproven[next(iter(self._unproven))]
            self._unproven[sock] = time.monotonic() + HANDSHAKE_TIMEOUT
            self._threads.add(thread)
            thread.start()

    def _cut_late(self, now: float) -> None:
        with self._lock:
            for sock in [sock for sock, deadline in self._unproven.items() if deadline < now]:
                _cut(sock)
                del self._unproven[sock]

    # --- a connection's own thread ---

    def _serve(self, sock: socket.socket) -> None:
        try:
            proven = self._shake_hands(sock)
            if proven is not None:
                proven[0].handler(sock, proven[1])
        finally:
            with self._lock:
                self._handled.discard(sock)
                self._threads.discard(threading.current_thread())

    def _shake_hands(self, sock: socket.socket) -> tuple[_Service, Json] | None:
        try:
            hello = accept_blocking(sock, self._key, job=self._job, judge=self._judge, timeout=HANDSHAKE_TIMEOUT)
        except (WireError, OSError):
            with self._lock:
                self._unproven.pop(sock, None)
            sock.close()
            return None
        with self._lock:
            self._unproven.pop(sock, None)
            if self._closed:
                sock.close()
                return None
            self._handled.add(sock)
            return self._services[hello["purpose"]], hello

    def _judge(self, hello: Json) -> None:
        with self._lock:
            service = self._services.get(str(hello.get("purpose")))
        if service is None:
            raise Refused(f"{self.address} does not serve {hello.get('purpose')!r}")
        service.judge(hello)


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"{host!r} is not an address of this machine: {error}") from error
    try:
        return socket.create_server((where[0], 0), family=family, backlog=128)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise ConfigError(f"cannot listen on {host!r}: {error}") from error
        everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"  # noqa: S104 (whoever connects has to prove the key)
        return socket.create_server((everywhere, 0), family=family, backlog=128)


def _cut(sock: socket.socket) -> None:
    # Wakes the thread that reads from it; closing would not, and the number could be somebody else's by then.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
