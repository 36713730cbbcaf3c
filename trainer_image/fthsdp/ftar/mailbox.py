"""Requests to a thread that sleeps in a selector."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable

__all__ = ["Mailbox"]


class Mailbox:
    """Calls that others leave and one thread makes. ``waker`` becomes readable when there are some."""

    def __init__(self) -> None:
        self.waker, self._wake = socket.socketpair()
        for sock in (self.waker, self._wake):
            sock.setblocking(False)
        self._requests: deque[Callable[[], None]] = deque()

    def leave(self, request: Callable[[], None]) -> None:
        """Have ``request`` called in the thread; from any thread, never waits."""
        self._requests.append(request)
        # A full pipe wakes the thread as well.
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def hush(self) -> None:
        """Make ``waker`` unreadable again; before ``work_off``, so that nothing left meanwhile is overlooked."""
        with contextlib.suppress(BlockingIOError):
            self.waker.recv(4096)

    def work_off(self) -> None:
        """Make all calls that were left, also those that they leave themselves."""
        while self._requests:
            self._requests.popleft()()

    def close(self) -> None:
        """Close the sockets; requests can still be left and worked off."""
        self.waker.close()
        self._wake.close()
