"""Dialling the right neighbour in a thread of its own, so that it can take its time and be called off at any moment."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from fthsdp.errors import ConnectionLost, WireError
from fthsdp.tls import Tls, TlsSocket
from fthsdp.wire import Json, greet_blocking, parse_address

__all__ = ["Dial", "Dials"]

_PAUSE = 0.05
"""Seconds between attempts while nobody listens yet."""


class Dial:
    """One connection in the making; ``on_done`` gets the socket or the reason, in the dialling thread."""

    def __init__(
        self,
        address: str,
        key: bytes,
        *,
        job: str,
        details: Json,
        timeout: float,
        tls: Tls | None,
        on_done: Callable[[socket.socket | WireError], None],
    ) -> None:
        self._address, self._key, self._job, self._details = address, key, job, details
        self._tls = tls
        self._deadline = time.monotonic() + timeout
        self._on_done = on_done
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fthsdp-dial", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Give up; ``on_done`` is not called any more unless it is being called now."""
        with self._lock:
            self._cancelled.set()
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    @property
    def running(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread."""
        self._thread.join()

    def _run(self) -> None:
        while True:
            result = self._try_once()
            if isinstance(result, ConnectionLost) and time.monotonic() < self._deadline and self._pause():
                continue
            break
        if self._cancelled.is_set():
            if isinstance(result, socket.socket):
                result.close()
            return
        self._on_done(result)

    def _pause(self) -> bool:
        return not self._cancelled.wait(_PAUSE)

    def _try_once(self) -> socket.socket | WireError:
        try:
            family, kind, number, _, where = socket.getaddrinfo(*parse_address(self._address), type=socket.SOCK_STREAM)[
                0
            ]
            sock = socket.socket(family, kind, number)
            sock = sock if self._tls is None else TlsSocket(sock, self._tls, server_side=False)
        except OSError as error:
            return ConnectionLost(f"{self._address}: {error}")
        except WireError as error:
            return error
        with self._lock:
            self._sock = sock
            if self._cancelled.is_set():
                sock.close()
                return ConnectionLost("called off")
        try:
            sock.settimeout(max(0.05, self._deadline - time.monotonic()))
            sock.connect(where)
            greet_blocking(sock, self._key, job=self._job, purpose="rail", details=self._details)
        except (OSError, WireError) as error:
            with self._lock:
                self._sock = None
            sock.close()
            return error if isinstance(error, WireError) else ConnectionLost(f"{self._address}: {error}")
        with self._lock:
            self._sock = None
        return sock


class Dials:
    """The connections in the making, by epoch and stream, and the threads of those that are over."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, int], Dial] = {}
        self._over: list[Dial] = []

    def add(self, epoch: int, stream: int, dial: Dial) -> None:
        """Keep a dial that has begun."""
        self._running[epoch, stream] = dial

    def done(self, epoch: int, stream: int) -> None:
        """It has called ``on_done``; its thread may still run."""
        dial = self._running.pop((epoch, stream), None)
        if dial is not None:
            self._over.append(dial)

    def cancel(self, epoch: int) -> None:
        """Give up those of ``epoch``."""
        for key in [key for key in self._running if key[0] == epoch]:
            self._running[key].cancel()
            self.done(*key)

    def forget_ended(self) -> None:
        """Forget threads that have ended."""
        self._over = [dial for dial in self._over if dial.running]

    def join(self) -> None:
        """Wait for the threads of those that are over."""
        for dial in self._over:
            dial.join()
