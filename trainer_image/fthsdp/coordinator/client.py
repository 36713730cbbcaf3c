"""How a leader, and the operator, talk to the coordinator.

``LeaderClient`` is made of threads, because a training process has no event loop: one thread keeps a connection and
reads it, one writes. No call of it ever waits for the network, so training goes on while the coordinator is away.
Everything it says can be said again: the newest state, and the records that were not confirmed.

``OperatorClient`` is for asyncio and holds at most one connection, opened when needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pydantic import BaseModel

from fthsdp.coordinator.addressbook import AddressBook, complete
from fthsdp.coordinator.messages import (
    Exited,
    FromCoordinator,
    Hello,
    JoinRecord,
    MemberState,
    Recorded,
    Records,
    RefusedMember,
    State,
    Status,
    StatusRequest,
    StepRecord,
    parse_from_coordinator,
)
from fthsdp.errors import ConnectionLost, Refused, Untrusted, WireError
from fthsdp.timeouts import TIMEOUTS
from fthsdp.tls import Tls
from fthsdp.wire import encode_frame, open_async, open_blocking, read_frame, receive_frame, send_frame

__all__ = ["LeaderClient", "OperatorClient"]

log = logging.getLogger(__name__)

DIAL_TIMEOUT = 5.0
"""Seconds for one attempt to connect and shake hands. Nobody answers at the address of a pod that is gone, and a name
may lead there for some seconds: the next attempt asks for the address again."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.05, 2.0
"""Seconds between attempts; doubled each time, with jitter so that many leaders do not come back at once."""
RECORD_INTERVAL = 1.0
"""Seconds between two batches of records."""
RECORD_BATCH = 500
"""Steps in one batch: about 250 kB."""
HOST_LOST_AFTER = 10.0
"""Seconds without an acknowledgement after which the kernel gives a connection up (TCP_USER_TIMEOUT)."""


class LeaderClient:
    """The connection of a replica's leader to the coordinator, kept for as long as the replica runs.

    ``on_message`` is called in the client's own thread, one message at a time, on every connection from ``Welcome`` on.
    A refusal for good, also one by the handshake (wrong key, job or protocol version), arrives there as
    ``RefusedMember``; after it nothing more comes. A certificate that is not accepted is one only before the first
    connection: later it has run out, and a renewed one will do.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        *,
        job: str,
        replica: int,
        attempt: int,
        addresses: Sequence[str],
        on_message: Callable[[FromCoordinator], None],
        heartbeat_interval: float = TIMEOUTS["heartbeat_interval"].default,
        times: Mapping[str, float] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """``times`` are those that this replica's ranks go by, named as in ``fthsdp.timeouts``; None: the defaults."""
        self._address = address
        self._key = key
        self._tls = tls
        self._job = job
        self._replica = replica
        self._attempt = attempt
        self._addresses = tuple(addresses)
        self._on_message = on_message
        self._heartbeat_interval = heartbeat_interval
        self._times = dict(times or {})
        self._changed = threading.Condition()
        self._state = MemberState()
        self._state_is_news = False
        self._steps: deque[StepRecord] = deque()
        self._joins: deque[JoinRecord] = deque()
        self._unconfirmed: Records | None = None
        self._heartbeat_at = self._records_at = 0.0
        self._flushing = False
        self._closing = False
        self._over = False
        """Refused for good: there is no use in connecting again."""
        self._trusted = False
        """Whether there has been a connection."""
        self._sock: socket.socket | None = None
        self._writing = threading.Lock()
        """Held while a socket is written to or closed, so that its number is not reused under a write."""
        self._reader = threading.Thread(target=self._keep_connected, name="fthsdp-coordinator-reader", daemon=True)
        self._writer = threading.Thread(target=self._keep_writing, name="fthsdp-coordinator-writer", daemon=True)

    # --- what the leader calls; nothing here waits for the network ----------------------------------------------------

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._reader.start()
        self._writer.start()

    def send_state(self, state: MemberState, *, now: bool = True) -> None:
        """Say where the member stands with each heartbeat until the next call, and ``now`` too."""
        with self._changed:
            self._state = state
            self._state_is_news |= now
            self._changed.notify_all()

    def record(self, record: StepRecord | JoinRecord) -> None:
        """Hand over a final step or a finished join; it is kept until the coordinator has confirmed it."""
        with self._changed:
            if isinstance(record, StepRecord):
                self._steps.append(record)
            else:
                self._joins.append(record)
            self._changed.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Wait until all records are confirmed, or for ``timeout`` seconds, and end the connection and the threads."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            if self._reader.is_alive():
                self._changed.wait_for(lambda: self._over or not (self._steps or self._joins), timeout)
            self._closing = True
            self._hang_up()
            self._changed.notify_all()
        for thread in (self._reader, self._writer):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(DIAL_TIMEOUT + 1.0)

    def _hang_up(self) -> None:
        """End the connection in a way that wakes both threads; the reader closes it. ``_changed`` is held."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock = None
        self._unconfirmed = None

    # --- the reading thread -------------------------------------------------------------------------------------------

    def _keep_connected(self) -> None:
        backoff = FIRST_BACKOFF
        while not (self._closing or self._over):
            began = time.monotonic()
            try:
                self._converse()
            except Refused as refusal:
                if self._trusted and isinstance(refusal, Untrusted):
                    log.warning("connection to the coordinator, trying again: %s", refusal)
                else:
                    self._deliver(RefusedMember(reason=str(refusal)))
            except WireError as error:
                log.info("connection to the coordinator at %s: %s", self._address, error)
            backoff = FIRST_BACKOFF if time.monotonic() - began > LONGEST_BACKOFF else min(2 * backoff, LONGEST_BACKOFF)
            with self._changed:
                if not self._over:
                    self._changed.wait_for(lambda: self._closing, backoff * random.uniform(0.5, 1.0))  # noqa: S311

    def _converse(self) -> None:
        sock = self._connect()
        try:
            self._read(sock)
        finally:
            with self._changed:
                self._hang_up()
            with self._writing:
                sock.close()

    def _connect(self) -> socket.socket:
        details = {"replica": self._replica, "attempt": self._attempt}
        sock = open_blocking(
            self._address,
            self._key,
            job=self._job,
            purpose="leader",
            details=details,
            timeout=DIAL_TIMEOUT,
            tls=self._tls,
        )
        self._trusted = True
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(HOST_LOST_AFTER * 1000))
        with self._changed:
            if self._closing:
                sock.close()
                raise ConnectionLost("closing")
            hello = Hello(
                replica=self._replica,
                attempt=self._attempt,
                addresses=self._addresses,
                state=self._state,
                times=self._times,
            )
            self._state_is_news = False
        try:
            send_frame(sock, hello.model_dump(mode="json"))
        except WireError:
            sock.close()
            raise
        with self._changed:
            self._sock = sock
            self._changed.notify_all()
        return sock

    def _read(self, sock: socket.socket) -> None:
        book = AddressBook()
        while not (self._closing or self._over):
            message = complete(parse_from_coordinator(receive_frame(sock)), book)
            if isinstance(message, Recorded):
                self._confirmed(message)
            else:
                self._deliver(message)

    def _deliver(self, message: FromCoordinator) -> None:
        if isinstance(message, RefusedMember):
            with self._changed:
                self._over = True
                self._changed.notify_all()
        self._on_message(message)

    def _confirmed(self, recorded: Recorded) -> None:
        with self._changed:
            sent, self._unconfirmed = self._unconfirmed, None
            if sent is None or recorded != _confirmation(sent):
                raise WireError(f"the coordinator confirmed {recorded!r}, which was not sent")
            for _ in sent.steps:
                self._steps.popleft()
            for _ in sent.joins:
                self._joins.popleft()
            self._changed.notify_all()

    # --- the writing thread -------------------------------------------------------------------------------------------

    def _keep_writing(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_to_write, self._patience())
                if self._closing or self._over:
                    return
                sock = self._sock
                frames = [] if sock is None else self._frames_due()
            if sock is not None:
                self._write(sock, frames)

    def _frames_due(self) -> list[BaseModel]:
        now = time.monotonic()
        frames: list[BaseModel] = []
        if self._state_is_news or now >= self._heartbeat_at:
            frames.append(State(state=self._state))
            self._state_is_news, self._heartbeat_at = False, now + self._heartbeat_interval
        if self._may_record(now):
            self._unconfirmed = self._next_batch()
            frames.append(self._unconfirmed)
            self._records_at = now + RECORD_INTERVAL
        return frames

    def _patience(self) -> float:
        """Seconds until something is due, if nothing happens before."""
        if self._sock is None:
            return self._heartbeat_interval
        recording = bool(self._steps or self._joins) and self._unconfirmed is None
        due = min(self._heartbeat_at, self._records_at) if recording else self._heartbeat_at
        return max(due - time.monotonic(), 0.0)

    def _has_to_write(self) -> bool:
        if self._closing or self._over:
            return True
        now = time.monotonic()
        return self._sock is not None and (self._state_is_news or now >= self._heartbeat_at or self._may_record(now))

    def _may_record(self, now: float) -> bool:
        waiting = bool(self._steps or self._joins) and self._unconfirmed is None
        return waiting and (self._flushing or now >= self._records_at)

    def _next_batch(self) -> Records:
        return Records(steps=tuple(self._steps)[:RECORD_BATCH], joins=tuple(self._joins))

    def _write(self, sock: socket.socket, frames: Sequence[BaseModel]) -> None:
        data = b"".join(encode_frame(frame.model_dump(mode="json")) for frame in frames)
        try:
            with self._writing:
                sock.sendall(data)
        except OSError as error:
            log.debug("writing to the coordinator: %s", error)
            with self._changed:
                if self._sock is sock:
                    self._hang_up()


def _confirmation(records: Records) -> Recorded:
    return Recorded(step=records.steps[-1].step if records.steps else 0, joins=len(records.joins))


class OperatorClient:
    """What the operator, or the launcher of a local run, tells and asks the coordinator. For one task at a time."""

    def __init__(self, address: str, key: bytes, *, job: str, timeout: float = 5.0, tls: Tls | None = None) -> None:
        self._address = address
        self._key = key
        self._job = job
        self._timeout = timeout
        self._tls = tls
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def exited(self, message: Exited) -> Status:
        """Report the end of a replica's attempt; it has been taken in when this returns.

        Raises ConnectionLost (the coordinator is away: tell it again later) or Refused.
        """
        return await self._ask(message, StatusRequest())

    async def status(self) -> Status:
        """Ask how the job stands; raises ConnectionLost or Refused."""
        return await self._ask(StatusRequest())

    async def close(self) -> None:
        """Close the connection."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream[1].close()
            with contextlib.suppress(OSError):
                await stream[1].wait_closed()

    async def _ask(self, *messages: BaseModel) -> Status:
        async with self._lock:
            reused = self._stream is not None
            try:
                return await self._exchange(messages)
            except ConnectionLost:
                await self.close()
                if not reused:
                    raise
                return await self._exchange(messages)

    async def _exchange(self, messages: Sequence[BaseModel]) -> Status:
        if self._stream is None:
            self._stream = await open_async(
                self._address, self._key, job=self._job, purpose="operator", timeout=self._timeout, tls=self._tls
            )
        reader, writer = self._stream
        try:
            async with asyncio.timeout(self._timeout):
                for message in messages:
                    writer.write(encode_frame(message.model_dump(mode="json")))
                answer = parse_from_coordinator(await read_frame(reader))
        except (OSError, TimeoutError) as error:
            await self.close()
            raise ConnectionLost(f"{self._address}: {error or f'no answer within {self._timeout:g} s'}") from error
        if not isinstance(answer, Status):
            raise WireError(f"the coordinator answered {answer.kind!r} to a status request")
        return answer
