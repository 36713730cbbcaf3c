"""The rail of one rank: rings of several epochs, moved by one thread.

The thread owns all sockets and rings. Everything else only puts requests into its line and wakes it, so no caller ever
waits for the network and a callback may call back. Connections of the next epoch are made while the current one works;
a dial that comes before we know of its epoch is kept until we do.

The same thread sends a keep-alive to each neighbour whenever nothing else went there, also while its rank computes or
waits. Silence therefore means frozen or unreachable. It is counted only while this thread itself runs: after a pause of
the whole machine nobody is blamed for what could not be heard.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.errors import NotReady, Refused, RingBroken, WireError
from fthsdp.ftar.collective import AllGather, AllReduce, Collective, Work
from fthsdp.ftar.connection import Connection
from fthsdp.ftar.dial import Dial, Dials
from fthsdp.ftar.early import EarlyDials
from fthsdp.ftar.frames import LARGEST_PAYLOAD, Header, Kind
from fthsdp.ftar.hello import RailHello, judge_neighbour, judge_stranger
from fthsdp.ftar.mailbox import Mailbox
from fthsdp.ftar.reduce import check_pair
from fthsdp.ftar.ring import RailMember, Ring, RingState
from fthsdp.ftar.settings import FtarSettings
from fthsdp.wire import Json

__all__ = ["Engine"]

_log = logging.getLogger(__name__)

PURPOSE = "rail"
_READS = 8
"""Pieces that are read from one connection before the others get their turn."""


class Engine:
    """All-reduce and all-gather across the replicas that hold the same shard.

    ``on_connected(epoch)`` says that both neighbours of an epoch are there, ``on_broken(epoch, error)`` that its ring
    broke, at most once per epoch and never for what this side cancelled, left or closed. Both come from the progress
    thread, have to be quick, and may call any method except ``close``.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        key: bytes,
        endpoint: Endpoint,
        settings: FtarSettings,
        on_connected: Callable[[int], None],
        on_broken: Callable[[int, RingBroken], None],
    ) -> None:
        self._identity = identity
        self._key = key
        self._tls = endpoint.tls
        self._settings = settings
        self._on_connected = on_connected
        self._on_broken = on_broken
        self._lock = threading.Lock()
        # Under the lock: what callers and the endpoint's threads may look at.
        self._lines: dict[int, tuple[RailMember, ...]] = {}
        """Ring order of each epoch that was connected and neither cancelled nor superseded."""
        self._cancelled = 0
        self._active = 0
        self._closing = False
        self._mailbox = Mailbox()
        # Only in the progress thread.
        self._rings: dict[int, Ring] = {}
        self._deadlines: dict[int, float] = {}
        """When a connecting ring has to be connected, or a leaving one is closed anyway."""
        self._dials = Dials()
        self._early = EarlyDials(settings.streams)
        self._owners: dict[Connection, Ring] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._mailbox.waker, selectors.EVENT_READ, None)
        self._stopped = False
        self._close_by: float | None = None
        self._thread = threading.Thread(target=self._work, name="fthsdp-ftar", daemon=True)
        self._thread.start()
        endpoint.serve(PURPOSE, self._accepted, judge=self._judge)

    # --- what callers use -------------------------------------------------------------------------------------------

    def connect(self, epoch: int, members: Sequence[RailMember]) -> None:
        """Connect the ring of ``epoch`` in the background; ``members`` are in ring order and include this replica.

        A second call for an epoch has no effect. Raises RingBroken for an epoch that was cancelled or superseded,
        NotReady after ``close``, ValueError when this replica is not among the members.
        """
        line = tuple(members)
        me = (self._identity.replica, self._identity.attempt)
        index = next((i for i, m in enumerate(line) if (m.replica, m.attempt) == me), None)
        if index is None:
            raise ValueError(f"epoch {epoch}: replica {me[0]} attempt {me[1]} is not among its members")
        with self._lock:
            self._refuse_gone(epoch)
            if epoch in self._lines:
                return
            self._lines[epoch] = line
            self._mailbox.leave(partial(self._begin_ring, epoch, line, index))

    def activate(self, epoch: int) -> None:
        """Use the ring of ``epoch`` for what is submitted from now on, and leave those of lower epochs.

        It need not be connected yet. When it was cancelled meanwhile, what is submitted fails with RingBroken. Raises
        NotReady when ``connect`` was not called.
        """
        with self._lock:
            if self._closing:
                raise NotReady("this engine is closed")
            if epoch > self._cancelled and epoch not in self._lines:
                raise NotReady(f"epoch {epoch} cannot begin before it was connected")
            self._active = max(self._active, epoch)
            self._lines = {number: line for number, line in self._lines.items() if number >= epoch}
            self._mailbox.leave(partial(self._leave_before, epoch))

    def cancel(self, up_to: int) -> None:
        """Close the rings of all epochs up to ``up_to``; what is under way there fails with RingBroken."""
        with self._lock:
            self._cancelled = max(self._cancelled, up_to)
            self._lines = {number: line for number, line in self._lines.items() if number > up_to}
            self._mailbox.leave(partial(self._cancel_rings, up_to))

    def all_reduce(self, *, step: int, bucket: int, source: torch.Tensor, out: torch.Tensor) -> Work[None]:
        """Put the sum of all members' ``source`` into ``out``: the same bits everywhere; ``source`` is not changed.

        Both are 1-D contiguous fp32 tensors on the CPU with the same number of elements on all members, and belong
        to the engine until the work is done. All members submit the same collectives in the same order.
        """
        check_pair(source, out)
        with self._lock:
            epoch = self._active_epoch()
            collective = AllReduce(
                epoch=epoch, step=step, bucket=bucket, source=source, out=out, settings=self._settings
            )
            self._mailbox.leave(partial(self._submit, epoch, collective))
        return collective.work

    def all_gather(self, *, step: int, payload: bytes) -> Work[list[bytes]]:
        """Collect every member's ``payload`` (at most 64 KiB, any length), by ring position."""
        if len(payload) > LARGEST_PAYLOAD:
            raise ValueError(f"a payload of {len(payload)} bytes is larger than {LARGEST_PAYLOAD}")
        with self._lock:
            epoch = self._active_epoch()
            collective = AllGather(epoch=epoch, step=step, payload=bytes(payload))
            self._mailbox.leave(partial(self._submit, epoch, collective))
        return collective.work

    def close(self, *, linger: float = 0.0) -> None:
        """End everything and wait for the thread; idempotent.

        With ``linger``, what was submitted may still be finished and what was sent still arrives, for at most that
        many seconds; a neighbour that needs nothing more of us sees no error.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                self._lines = {}
                # Without linger nobody is told goodbye, also in a turn of the loop that began before this.
                deadline = time.monotonic() + linger if linger else 0.0
                self._mailbox.leave(partial(self._begin_close, deadline))
        self._thread.join()

    def _refuse_gone(self, epoch: int) -> None:
        if self._closing:
            raise NotReady("this engine is closed")
        if epoch <= self._cancelled:
            raise RingBroken(f"epoch {epoch} was cancelled: everything up to {self._cancelled} is")
        if epoch < self._active:
            raise RingBroken(f"epoch {epoch} is over: epoch {self._active} has begun")

    def _active_epoch(self) -> int:
        if self._closing:
            raise NotReady("this engine is closed")
        if not self._active:
            raise NotReady("no epoch has begun: activate one before submitting to it")
        return self._active

    # --- who may connect (in threads of the endpoint) -----------------------------------------------------------------

    def _judge(self, hello: Json) -> None:
        who = RailHello.read(hello)
        judge_stranger(who, self._identity, self._settings)
        with self._lock:
            try:
                self._refuse_gone(who.epoch)
            except (NotReady, RingBroken) as error:
                raise Refused(str(error)) from error
            line = self._lines.get(who.epoch)
        if line is not None:
            judge_neighbour(who, self._identity, line)

    def _accepted(self, sock: socket.socket, hello: Json) -> None:
        with self._lock:
            if not self._closing:
                self._mailbox.leave(partial(self._arrived, sock, RailHello.read(hello)))
                return
        sock.close()

    # --- the progress thread: requests --------------------------------------------------------------------------------

    def _begin_ring(self, epoch: int, line: tuple[RailMember, ...], index: int) -> None:
        ring = self._rings[epoch] = Ring(epoch=epoch, members=line, index=index, settings=self._settings)
        self._deadlines[epoch] = time.monotonic() + self._settings.connect_timeout
        if len(line) > 1:
            for stream in range(self._settings.streams):
                self._dials.add(epoch, stream, self._dial(ring, stream))
        self._attach_early(ring)
        self._check_connected(ring)

    def _dial(self, ring: Ring, stream: int) -> Dial:
        right = ring.right_member
        return Dial(
            right.address,
            self._key,
            job=self._identity.job,
            details=RailHello.to_neighbour(right, self._identity, self._settings, epoch=ring.epoch, stream=stream),
            timeout=self._settings.connect_timeout,
            tls=self._tls,
            on_done=partial(self._dialled, ring.epoch, stream),
        )

    def _dialled(self, epoch: int, stream: int, result: socket.socket | WireError) -> None:
        # In the dialling thread.
        with self._lock:
            self._mailbox.leave(partial(self._dial_done, epoch, stream, result))

    def _dial_done(self, epoch: int, stream: int, result: socket.socket | WireError) -> None:
        self._dials.done(epoch, stream)
        ring = self._rings.get(epoch)
        if ring is None or ring.state is not RingState.CONNECTING:
            if isinstance(result, socket.socket):
                result.close()
        elif isinstance(result, socket.socket):
            right = ring.right_member
            connection = self._adopt(result, (right.replica, right.attempt), epoch)
            self._owners[connection] = ring
            ring.attach_right(stream, connection)
            self._check_connected(ring)
            if connection.pending:
                # More came along with the end of the handshake.
                self._read(connection, time.monotonic())
        else:
            self._break(ring, ring.broken_by(ring.right_member, f"cannot be reached: {result}"))

    def _arrived(self, sock: socket.socket, who: RailHello) -> None:
        ring = self._rings.get(who.epoch)
        unwanted = ring is None and (who.epoch <= self._cancelled or who.epoch < self._active)
        if unwanted or (ring is not None and not ring.awaits_left(who.stream)):
            sock.close()
            return
        connection = self._adopt(sock, (who.replica, who.attempt), who.epoch)
        for given_up in self._early.add(who.stream, connection):
            self._drop(given_up)
        if ring is not None:
            self._attach_early(ring)
            self._check_connected(ring)

    def _attach_early(self, ring: Ring) -> None:
        left = ring.left_member
        for stream, connection in self._early.take(ring.epoch):
            if connection.peer == (left.replica, left.attempt) and len(ring.members) > 1:
                self._owners[connection] = ring
                ring.attach_left(stream, connection)
            else:
                self._drop(connection)

    def _check_connected(self, ring: Ring) -> None:
        if ring.state is RingState.CONNECTING and ring.missing() is None:
            ring.state = RingState.CONNECTED
            self._deadlines.pop(ring.epoch, None)
            self._call(self._on_connected, ring.epoch)

    def _submit(self, epoch: int, collective: Collective) -> None:
        ring = self._rings.get(epoch)
        if ring is None:
            collective.fail(RingBroken(f"epoch {epoch} was cancelled"))
        else:
            ring.submit(collective)

    def _leave_before(self, epoch: int) -> None:
        for ring in [ring for number, ring in self._rings.items() if number < epoch]:
            if ring.idle and ring.state is RingState.CONNECTED:
                self._leave(ring, time.monotonic() + self._settings.silence_timeout)
            elif ring.state is not RingState.LEAVING:
                self._close_ring(ring, RingBroken(f"epoch {ring.epoch} is over: epoch {epoch} has begun"))
        self._forget(lambda number: number < epoch)

    def _leave(self, ring: Ring, deadline: float) -> None:
        ring.leave()
        self._deadlines[ring.epoch] = deadline

    def _cancel_rings(self, up_to: int) -> None:
        for ring in [ring for number, ring in self._rings.items() if number <= up_to]:
            self._close_ring(ring, RingBroken(f"epoch {ring.epoch} was cancelled"))
        self._forget(lambda number: number <= up_to)

    def _forget(self, gone: Callable[[int], bool]) -> None:
        for connection in self._early.forget(gone):
            self._drop(connection)

    def _begin_close(self, deadline: float) -> None:
        self._close_by = deadline
        self._forget(lambda number: True)

    # --- the progress thread: connections -----------------------------------------------------------------------------

    def _adopt(self, sock: socket.socket, peer: tuple[int, int], epoch: int) -> Connection:
        connection = Connection(
            sock, peer=peer, epoch=epoch, silence_timeout=self._settings.silence_timeout, now=time.monotonic()
        )
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _drop(self, connection: Connection) -> None:
        self._owners.pop(connection, None)
        if connection.sock.fileno() >= 0:
            self._selector.unregister(connection.sock)
            connection.close()

    def _break(self, ring: Ring, error: RingBroken) -> None:
        if ring.state is RingState.CLOSED:
            return
        leaving = ring.state is RingState.LEAVING
        self._close_ring(ring, error, forget=leaving)
        if not leaving:
            _log.info("ring broken: %s", error)
            self._call(self._on_broken, ring.epoch, error)

    def _close_ring(self, ring: Ring, error: RingBroken, *, forget: bool = True) -> None:
        # A broken ring stays known until it is cancelled or superseded: what is submitted to it fails with its error.
        self._deadlines.pop(ring.epoch, None)
        self._dials.cancel(ring.epoch)
        for connection in [c for c, owner in self._owners.items() if owner is ring]:
            self._drop(connection)
        ring.close(error)
        if forget:
            self._rings.pop(ring.epoch, None)

    def _read(self, connection: Connection, now: float) -> None:
        ring = self._owners.get(connection)
        try:
            self._read_pieces(connection, ring, now)
        except WireError as error:
            if ring is None:
                self._early.remove(connection)
                self._drop(connection)
            elif ring.state is RingState.LEAVING:
                self._drop(connection)
            else:
                self._break(ring, ring.broken_by(ring.peer_of(connection), str(error)))
            return
        except RingBroken as error:
            assert ring is not None
            self._break(ring, error)
            return
        if connection.departed:
            # Its goodbye was the last thing that it sent, and it needs nothing more of us.
            self._drop(connection)

    def _read_pieces(self, connection: Connection, ring: Ring | None, now: float) -> None:
        reads = 0
        # What is taken from the kernel but not looked at yet wakes nobody.
        while reads < _READS or connection.pending:
            reads += 1
            more = connection.receive(now)
            if connection.departed:
                return
            if ring is not None:
                # What has come goes on while it is in the processor's cache.
                ring.send_on(now)
            if not more:
                return

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            callback(*args)
        except Exception:
            _log.exception("a callback of the rail's engine failed")

    # --- the progress thread: its loop --------------------------------------------------------------------------------

    def _work(self) -> None:
        # Infinities and NaNs travel like any number; whether they may occur is not for a sum to say.
        with np.errstate(all="ignore"):
            self._run()

    def _run(self) -> None:
        try:
            last = next_look = time.monotonic()
            while not self._stopped:
                events = self._selector.select(max(0.0, next_look - time.monotonic()))
                now = time.monotonic()
                self._forgive(now - last)
                last = now
                self._turn(events, now)
                if now >= next_look:
                    next_look = now + self._settings.keepalive_interval / 4
                    self._look_at_clock(now)
                if self._close_by is not None:
                    next_look = now if self._try_to_end(now) else min(next_look, now + 0.02)
        except BaseException as error:
            _log.exception("the rail's engine failed")
            self._fail_all(RingBroken(f"the rail's engine failed: {error!r}"))
            raise
        finally:
            self._end()

    def _turn(self, events: list[tuple[selectors.SelectorKey, int]], now: float) -> None:
        for key, mask in events:
            if key.data is None:
                self._mailbox.hush()
                continue
            if mask & selectors.EVENT_WRITE:
                key.data.full = False
            if mask & selectors.EVENT_READ:
                self._read(key.data, now)
        self._mailbox.work_off()
        for ring in list(self._rings.values()):
            self._pump(ring, now)
        for connection in self._early:
            self._flush_early(connection, now)

    def _pump(self, ring: Ring, now: float) -> None:
        try:
            ring.pump(now)
        except RingBroken as error:
            self._break(ring, error)
        for connection in ring.connections:
            self._set_interest(connection)

    def _flush_early(self, connection: Connection, now: float) -> None:
        # When this fails, reading fails as well and drops it.
        with contextlib.suppress(WireError):
            connection.flush(now)

    def _set_interest(self, connection: Connection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if connection.sock.fileno() >= 0 and connection.interest != wanted:
            connection.interest = wanted
            self._selector.modify(connection.sock, wanted, connection)

    def _forgive(self, gap: float) -> None:
        if gap > self._settings.keepalive_interval:
            for connection in (*self._owners, *self._early):
                connection.heard += gap

    def _look_at_clock(self, now: float) -> None:
        for connection in (*self._owners, *self._early):
            if now - connection.spoke >= self._settings.keepalive_interval and not connection.wants_write:
                connection.say(Header(kind=Kind.ALIVE, epoch=connection.epoch))
        for ring in list(self._rings.values()):
            if ring.state is not RingState.LEAVING:
                self._blame_silent(ring, now)
            self._blame_late(ring, now)
            self._pump(ring, now)
        self._dials.forget_ended()

    def _blame_silent(self, ring: Ring, now: float) -> None:
        for connection in ring.connections:
            silent = now - connection.heard
            if silent >= self._settings.silence_timeout:
                self._break(ring, ring.broken_by(ring.peer_of(connection), f"silent for {silent:.1f} s"))
                return

    def _blame_late(self, ring: Ring, now: float) -> None:
        if now < self._deadlines.get(ring.epoch, now + 1):
            return
        missing = ring.missing()
        if ring.state is RingState.CONNECTING and missing is not None:
            waited = self._settings.connect_timeout
            self._break(ring, ring.broken_by(missing, f"not connected after {waited} s"))
        else:
            self._close_ring(ring, RingBroken(f"epoch {ring.epoch}: its ring is closed"))

    # --- the progress thread: the end ---------------------------------------------------------------------------------

    def _try_to_end(self, now: float) -> bool:
        assert self._close_by is not None
        for ring in list(self._rings.values()):
            if ring.state is RingState.CONNECTED and ring.idle and now < self._close_by:
                self._leave(ring, self._close_by)
                self._pump(ring, now)
            if self._is_over(ring):
                self._close_ring(ring, RingBroken("this engine is closed"))
        self._stopped = not self._rings or now >= self._close_by
        return self._stopped

    def _is_over(self, ring: Ring) -> bool:
        if ring.state is RingState.LEAVING:
            return all(owner is not ring for owner in self._owners.values())
        return ring.state is RingState.CLOSED or (ring.state is RingState.CONNECTING and ring.idle)

    def _fail_all(self, error: RingBroken) -> None:
        for ring in list(self._rings.values()):
            self._break(ring, error)

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        self._mailbox.work_off()
        for ring in list(self._rings.values()):
            self._close_ring(ring, RingBroken("this engine is closed"))
        self._forget(lambda number: True)
        self._dials.join()
        # A dial that was done in the meantime has left a socket.
        self._mailbox.work_off()
        self._selector.close()
        self._mailbox.close()
