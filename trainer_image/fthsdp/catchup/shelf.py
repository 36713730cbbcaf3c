"""What a rank keeps ready for the same rank of other replicas, and how they fetch it.

Two things lie on the shelf: stripes of the state, copied at the boundary where a joiner's epoch begins, and the
outcome of the last step (its reduced gradients), from which a member that missed it rolls forward. A fetch names
exactly what it wants; it waits until that is there, and is told ``gone`` when it never will be. What travels is a
JSON head and raw bytes.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fthsdp.coordinator.messages import Assigned
from fthsdp.errors import ConnectionLost, NotReady, WireError
from fthsdp.protocol.requests import Reduced
from fthsdp.tls import Tls
from fthsdp.wire import Json, open_blocking, receive_frame, send_frame

__all__ = ["FETCH", "Fetcher", "Shelf", "Stripe"]

FETCH = "fetch"
"""Purpose of such a connection in its handshake."""
_PIECE = 4 << 20
"""Bytes handed to the kernel at a time."""
_CONNECT_TIMEOUT = 10.0
"""Seconds for connecting and the handshake."""
_SILENCE_TIMEOUT = 10.0
"""Seconds without a byte after which a fetch in progress is given up."""
_PEER_CHECK = 1.0
"""Seconds between looks whether a waiting peer is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """One donor's part of the state at one boundary."""

    step: int
    start: int
    """Byte offset in the whole state of this rank."""
    data: memoryview
    head: Json
    """What cannot be cut into stripes: the snapshot's description, the sampler."""


@dataclass(slots=True)
class Shelf:
    """Thread-safe; ``serve`` runs in a thread per fetch."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stripes: dict[int, tuple[int, Stripe]] = field(default_factory=dict)
    """By shadow: epoch and stripe."""
    _outcome: Reduced | None = None
    _passed: dict[int, int] = field(default_factory=dict)
    """By shadow: stripes of epochs up to this one will not come (any more)."""
    _kept: tuple[Sequence[int], int] = ((), 0)
    """Whose stripes were to be kept last, and in which epoch."""
    _closed: bool = False

    def put_stripe(self, shadow: int, epoch: int, stripe: Stripe) -> None:
        """Offer a stripe; it replaces an older one for the same shadow.

        One that took so long to copy that its shadow is none any more is not kept.
        """
        with self._changed:
            shadows, since = self._kept
            if epoch < since and shadow not in shadows:
                self._passed[shadow] = since
            else:
                self._stripes[shadow] = (epoch, stripe)
                self._passed[shadow] = epoch - 1
            self._changed.notify_all()

    def keep_stripes_of(self, shadows: Sequence[int], epoch: int) -> None:
        """Drop the stripes of all others; who still waits for one of these waits in vain."""
        with self._changed:
            self._kept = (shadows, epoch)
            for shadow in [s for s in self._stripes if s not in shadows]:
                del self._stripes[shadow]
                self._passed[shadow] = epoch
            self._changed.notify_all()

    def put_outcome(self, outcome: Reduced) -> None:
        """Offer the outcome of the newest step; it replaces that of the step before."""
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()

    def close(self) -> None:
        """Send everybody away."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- serving

    def serve(self, sock: socket.socket, hello: Json) -> None:
        """Serve one fetch; the handler of the purpose ``FETCH``."""
        with sock:
            try:
                match hello:
                    case {"what": "stripe", "shadow": int(shadow), "epoch": int(epoch)}:
                        self._serve_stripe(sock, shadow, epoch)
                    case {"what": "outcome", "step": int(step)}:
                        self._serve_outcome(sock, step)
                    case _:
                        send_frame(sock, {"gone": "this fetch asks for nothing that exists"})
            except (NotReady, WireError) as error:
                _say(sock, {"gone": str(error)})

    def _serve_stripe(self, sock: socket.socket, shadow: int, epoch: int) -> None:
        with self._changed:
            while shadow not in self._stripes or self._stripes[shadow][0] < epoch:
                if self._closed or self._passed.get(shadow, 0) >= epoch:
                    raise NotReady(f"there is no stripe for replica {shadow} in epoch {epoch} any more")
                self._wait_for_change(sock)
            found, stripe = self._stripes[shadow]
        if found != epoch:
            raise NotReady(f"the stripe for replica {shadow} is of epoch {found}, not {epoch}")
        send_frame(sock, {**stripe.head, "step": stripe.step, "start": stripe.start, "bytes": stripe.data.nbytes})
        _send_raw(sock, stripe.data)

    def _serve_outcome(self, sock: socket.socket, step: int) -> None:
        with self._changed:
            # A replica has a step as soon as its leader says so, and another of its ranks may be a moment behind.
            while self._outcome is None or self._outcome.step < step:
                if self._closed:
                    raise NotReady(f"the outcome of step {step} will not come: this rank ends")
                self._wait_for_change(sock)
            outcome = self._outcome
        if outcome.step != step:
            raise NotReady(f"the outcome of step {step} is not here any more, but that of {outcome.step}")
        send_frame(
            sock,
            {
                "headers": [h.hex() for h in outcome.headers],
                "assigned": outcome.assigned.model_dump(mode="json"),
                "sizes": [t.numel() for t in outcome.gradients],
            },
        )
        for tensor in outcome.gradients:
            _send_raw(sock, tensor.numpy().data.cast("B"))

    def _wait_for_change(self, sock: socket.socket) -> None:
        if not self._changed.wait(_PEER_CHECK) and select.select([sock], [], [], 0)[0]:
            raise ConnectionLost("the peer stopped waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """Fetches from the shelf of the same rank of another replica."""

    key: bytes
    job: str
    tls: Tls | None = None

    def stripe(
        self,
        address: str,
        *,
        shadow: int,
        epoch: int,
        opened: Callable[[socket.socket], None],
        into: Callable[[Json], memoryview],
    ) -> Json:
        """Fetch a stripe and return its head, waiting for it as long as it takes.

        ``opened`` gets the socket, so that somebody else can end the wait by shutting it down; ``into`` gets the head
        and returns where the bytes go. Raises ConnectionLost, NotReady, WireError.
        """
        details: Json = {"what": "stripe", "shadow": shadow, "epoch": epoch}
        with self._open(address, details) as sock:
            opened(sock)
            head = self._head(sock)
            self._receive_raw(sock, into(head))
        return head

    def outcome(self, address: str, step: int, sizes: Sequence[int]) -> Reduced:
        """Fetch the outcome of a step whose buckets have these sizes; raises ConnectionLost, NotReady, WireError."""
        details: Json = {"what": "outcome", "step": step}
        with self._open(address, details) as sock:
            sock.settimeout(_SILENCE_TIMEOUT)
            head = self._head(sock)
            if head.get("sizes") != list(sizes):
                raise WireError(f"{address} has buckets of {head.get('sizes')!r} elements, this rank of {list(sizes)}")
            reduced = [torch.empty(n, dtype=torch.float32) for n in sizes]
            for tensor in reduced:
                self._receive_raw(sock, tensor.numpy().data.cast("B"))
        try:
            headers = tuple(bytes.fromhex(h) for h in head["headers"])
            return Reduced(
                step=step, gradients=reduced, headers=headers, assigned=Assigned.model_validate(head["assigned"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"{address} sent an outcome that cannot be read: {error}") from error

    def _open(self, address: str, details: Json) -> socket.socket:
        return open_blocking(
            address, self.key, job=self.job, purpose=FETCH, details=details, timeout=_CONNECT_TIMEOUT, tls=self.tls
        )

    def _head(self, sock: socket.socket) -> Json:
        head = receive_frame(sock)
        if "gone" in head:
            raise NotReady(str(head["gone"]))
        sock.settimeout(_SILENCE_TIMEOUT)
        return head

    def _receive_raw(self, sock: socket.socket, into: memoryview) -> None:
        done = 0
        while done < into.nbytes:
            try:
                got = sock.recv_into(into[done : done + _PIECE])
            except OSError as error:
                raise ConnectionLost(f"a fetch stopped after {done} of {into.nbytes} bytes: {error}") from error
            if not got:
                raise ConnectionLost(f"a fetch ended after {done} of {into.nbytes} bytes")
            done += got


def _send_raw(sock: socket.socket, data: memoryview) -> None:
    try:
        for start in range(0, data.nbytes, _PIECE):
            sock.sendall(data[start : start + _PIECE])
    except OSError as error:
        raise ConnectionLost(f"the peer stopped fetching: {error}") from error


def _say(sock: socket.socket, frame: Json) -> None:
    try:
        send_frame(sock, frame)
    except ConnectionLost:
        return
