"""The coordinator's shell: sockets, clock, store and files around the pure ``Membership`` and ``RunRecord``.

All events go through one queue, and one task takes them from there, so an event's effects are complete before the next
event is looked at; a slow store delays decisions, never their order. Records decide nothing and bypass the queue.
Nobody can hold up anybody else: each connection has its own task, what is written to a slow reader is bounded, and
strangers have a deadline and a limit to their number.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeVar, assert_never

from fthsdp.coordinator.addressbook import AddressBook, Frames
from fthsdp.coordinator.archive import Archive
from fthsdp.coordinator.events import (
    AskStore,
    Decided,
    Disconnected,
    Drop,
    Effect,
    Event,
    Fenced,
    Finished,
    Left,
    MembershipSettings,
    Persist,
    Proposed,
    Received,
    Removed,
    Send,
    Stalled,
    Started,
    StoreAnswered,
    Tick,
    Withdrawn,
)
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.membership import Membership
from fthsdp.coordinator.messages import (
    EpochRecord,
    Exited,
    FromCoordinator,
    Hello,
    Recorded,
    Records,
    RefusedMember,
    Role,
    State,
    Status,
    StatusRequest,
    ToCoordinator,
    parse_to_coordinator,
)
from fthsdp.coordinator.record import RunRecord, event_of
from fthsdp.coordinator.store import EpochStore, StoreConflict, StoreUnavailable
from fthsdp.errors import ConnectionLost, Refused, WireError
from fthsdp.tls import Tls
from fthsdp.wire import Json, accept_async, hold_back, read_frame

__all__ = ["Coordinator"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_News = Fenced | Removed | Stalled | Left | Decided | Started | Proposed | Withdrawn | Finished

TICK = 0.1
"""Seconds between two looks at the clock: how late a timeout can be noticed."""
HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a stranger has to prove that it holds the key, and then to say hello."""
MOST_STRANGERS = 256
"""Connections that have proven nothing yet; above this new ones are closed at once."""
LARGEST_BACKLOG = 32 << 20
"""Bytes that may wait for a reader that does not read; above this its connection is cut."""
REPORT_INTERVAL = 10.0
"""Seconds between two reports while something changes."""
FAREWELL_TIMEOUT = 5.0
"""Seconds in which leaders may still hand over records after the run's end, and in which a dropped one is flushed."""
STORE_BACKOFF = (0.1, 5.0)
"""First and longest pause in seconds between attempts to reach the store."""
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps, where there is such a clock: who was not heard meanwhile could not be."""
KEEPALIVE_AFTER = 30
"""Seconds of silence after which the kernel asks whether the host on the other side is still there."""


@dataclass(slots=True)
class _Connection:
    number: int
    writer: asyncio.StreamWriter
    book: AddressBook = field(default_factory=AddressBook)


@dataclass(frozen=True, slots=True)
class _Question:
    """A status request, answered after everything that was said before it."""

    connection: _Connection


class Coordinator:
    """One job's coordinator."""

    def __init__(
        self,
        settings: MembershipSettings,
        *,
        job: str,
        key: bytes,
        store: EpochStore,
        archive: Archive | None = None,
        out: TextIO,
        tls: Tls | None = None,
    ) -> None:
        self._settings = settings
        self._job = job
        self._key = key
        self._tls = tls
        self._store = store
        self._archive = archive
        self._out = out
        self._record = RunRecord(replicas=settings.replicas, spares=settings.spares)
        self._changed = True
        """Whether the report is not what was written last."""
        self._effective: float | None = None
        """As that has it."""
        self._events: asyncio.Queue[Event | _Question] = asyncio.Queue()
        self._connections: dict[int, _Connection] = {}
        self._frames = Frames()
        self._numbers = itertools.count(1)
        self._strangers = 0
        self._handlers: set[asyncio.Task[None]] = set()
        self._leaders: set[asyncio.Task[Any]] = set()
        self._store_asked = asyncio.Event()
        self._unix_at_zero = time.time() - time.clock_gettime(CLOCK)

    def _now(self) -> float:
        """Unix time that never jumps."""
        return self._unix_at_zero + time.clock_gettime(CLOCK)

    # --- running ----------------------------------------------------------------------------------------------------

    async def run(self, host: str, port: int, *, stop: asyncio.Event) -> bool:
        """Serve until the run has finished (True) or ``stop`` is set (False); raises StoreConflict, OSError."""
        if self._archive is not None:
            self._archive.restore(self._record)
        self._membership = Membership(self._settings, ledger=await self._load(), now=self._now())
        server = await asyncio.start_server(self._accepted, host, port, backlog=MOST_STRANGERS)
        for listener in server.sockets:
            log.info("job %s: listening on [%s]:%d", self._job, *listener.getsockname()[:2])
        duties = (self._take_events(), self._ask_store(), self._tick(), self._report_now_and_then())
        work = [asyncio.create_task(duty) for duty in duties]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({*work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._membership.finished:
                await self._say_farewell()
        finally:
            server.close()
            await self._end([*work, stopping, *self._handlers])
            await self._write_report()
            await self._store.close()
        return self._membership.finished

    async def _load(self) -> Ledger | None:
        ledger = await _persistently(self._store.load)
        if ledger is not None:
            log.info("job %s: going on from epoch %d", self._job, ledger.number)
        return ledger

    async def _say_farewell(self) -> None:
        """Give the leaders time to hand over their last records and to close."""
        if self._leaders:
            await asyncio.wait(self._leaders, timeout=FAREWELL_TIMEOUT)

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        for connection in list(self._connections.values()):
            connection.writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if self._events.empty():
                self._events.put_nowait(Tick())

    async def _ask_store(self) -> None:
        """Say when the store answers, which may be never while this coordinator is cut off; raises StoreConflict."""
        while True:
            await self._store_asked.wait()
            self._store_asked.clear()
            ledger = await _persistently(self._store.load)
            if ledger is not None and ledger.number > self._membership.newest:
                raise StoreConflict("the store", found=ledger.number, expected=self._membership.newest)
            self._events.put_nowait(StoreAnswered())

    async def _take_events(self) -> None:
        while not self._membership.finished:
            event = await self._events.get()
            if isinstance(event, _Question):
                self._write(event.connection, self._status())
                continue
            for effect in self._membership.handle(event, self._now()):
                await self._execute(effect)

    # --- effects ----------------------------------------------------------------------------------------------------

    async def _execute(self, effect: Effect) -> None:
        match effect:
            case Persist():
                await _persistently(lambda: self._store.save(effect.ledger, expected=effect.expected))
            case AskStore():
                log.info("somebody is silent: the store is asked whether this coordinator is cut off itself")
                self._store_asked.set()
            case Send():
                connection = self._connections.get(effect.connection)
                if connection is not None:
                    self._write(connection, effect.message)
            case Drop():
                self._drop(effect.connection)
            case (
                Fenced()
                | Removed()
                | Stalled()
                | Left()
                | Decided()
                | Started()
                | Proposed()
                | Withdrawn()
                | Finished()
            ):
                self._note(effect)
            case _ as never:
                assert_never(never)

    def _write(self, connection: _Connection, message: FromCoordinator) -> None:
        writer = connection.writer
        if isinstance(message, RefusedMember):
            log.warning("refused: %s", message.reason)
        if writer.is_closing():
            return
        writer.write(self._frames.encode(message, connection.book))
        if writer.transport.get_write_buffer_size() > LARGEST_BACKLOG:
            log.warning("connection %d does not read what it is sent; it is cut", connection.number)
            writer.transport.abort()

    def _drop(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            connection.writer.close()
            asyncio.get_running_loop().call_later(FAREWELL_TIMEOUT, connection.writer.transport.abort)

    def _note(self, effect: _News) -> None:
        log.info("%s", _in_words(effect))
        event = event_of(effect, self._now())
        if event is not None:
            self._record.note(event)
            self._changed = True
            if self._archive is not None:
                self._archive.append_event(event)

    # --- connections ------------------------------------------------------------------------------------------------

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._strangers >= MOST_STRANGERS:
            writer.transport.abort()
            return
        self._strangers += 1  # here, because many may come before the first of their tasks begins
        if self._tls is not None:
            hold_back(writer)
        handler = asyncio.create_task(self._serve(reader, writer))
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(next(self._numbers), writer)
        self._connections[connection.number] = connection
        peer = writer.get_extra_info("peername")
        try:
            hello = await self._greet(reader, writer)
            if hello["purpose"] == "leader":
                await self._serve_leader(connection, reader, (hello["replica"], hello["attempt"]))
            else:
                await self._serve_operator(connection, reader)
        except ConnectionLost as error:
            log.debug("connection %d from %s: %s", connection.number, peer, error)
        except WireError as error:
            log.warning("connection %d from %s: %s", connection.number, peer, error)
        finally:
            del self._connections[connection.number]
            writer.close()
            asyncio.get_running_loop().call_later(FAREWELL_TIMEOUT, writer.transport.abort)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Json:
        """Shake hands, and be no stranger after that; raises WireError."""
        try:
            hello = await accept_async(
                reader, writer, self._key, job=self._job, judge=_judge, timeout=HANDSHAKE_TIMEOUT, tls=self._tls
            )
        finally:
            self._strangers -= 1
        _watch_host(writer)
        return hello

    async def _serve_leader(self, connection: _Connection, reader: asyncio.StreamReader, who: tuple[int, int]) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                hello = parse_to_coordinator(await read_frame(reader))
        except TimeoutError as error:
            raise ConnectionLost(f"no hello within {HANDSHAKE_TIMEOUT:g} s") from error
        if not isinstance(hello, Hello) or (hello.replica, hello.attempt) != who:
            raise WireError(f"replica {who[0]} attempt {who[1]} did not say its own hello")
        task = asyncio.current_task()
        assert task is not None
        self._leaders.add(task)
        task.add_done_callback(self._leaders.discard)
        try:
            message: ToCoordinator = hello
            while True:
                self._take(connection, hello, message)
                message = parse_to_coordinator(await read_frame(reader))
                if isinstance(message, Hello):
                    raise WireError(f"replica {who[0]} attempt {who[1]} said hello twice")
        finally:
            self._events.put_nowait(Disconnected(connection=connection.number))

    def _take(self, connection: _Connection, hello: Hello, message: ToCoordinator) -> None:
        match message:
            case Hello() | State():
                self._events.put_nowait(
                    Received(
                        connection=connection.number, replica=hello.replica, attempt=hello.attempt, message=message
                    )
                )
            case Records():
                self._keep(connection, message)
            case Exited() | StatusRequest():
                raise WireError(f"a leader may not send {message.kind!r}")
            case _ as never:
                assert_never(never)

    def _keep(self, connection: _Connection, records: Records) -> None:
        fresh = self._record.add(records)
        if fresh.steps or fresh.joins:
            self._changed = True
            if self._archive is not None:
                self._archive.append(fresh)
        newest = records.steps[-1].step if records.steps else 0
        self._write(connection, Recorded(step=newest, joins=len(records.joins)))
        for line in self._record.take_lines():
            print(json.dumps(line), file=self._out, flush=True)

    async def _serve_operator(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        while True:
            match parse_to_coordinator(await read_frame(reader)):
                case Exited() as message:
                    self._events.put_nowait(message)
                case StatusRequest():
                    self._events.put_nowait(_Question(connection))
                case message:
                    raise WireError(f"an operator may not send {message.kind!r}")

    # --- reports ----------------------------------------------------------------------------------------------------

    def _status(self) -> Status:
        return Status(
            epoch=self._membership.epoch,
            paused=self._membership.paused,
            finished=self._membership.finished,
            step=self._record.step,
            loss=self._record.loss,
            samples_per_second=self._record.samples_per_second(self._now()),
            effective_training_time=self._effective,
            replicas=self._membership.replicas(),
            verdicts=self._membership.verdicts,
            abandoned=self._membership.abandoned,
        )

    async def _report_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL)
            await self._write_report()

    async def _write_report(self) -> None:
        if not self._changed:
            return
        self._changed = False
        report = self._record.report()
        self._effective = report["effective_training_time"]
        if self._archive is not None:
            self._archive.write_report(report)
        try:
            await self._store.publish(json.dumps(report))
        except StoreUnavailable as error:
            self._changed = True
            log.warning("the report was not published: %s", error)


# --- helpers --------------------------------------------------------------------------------------------------------


async def _persistently(call: Callable[[], Awaitable[_T]]) -> _T:
    """Call the store until it answers: nothing may be decided before what was decided last is safe."""
    pause, longest = STORE_BACKOFF
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            log.warning("%s; trying again in %.1f s", error, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest)


def _judge(hello: Json) -> None:
    """Turn away who is not for us; raises Refused."""
    purpose = hello.get("purpose")
    if purpose not in ("leader", "operator"):
        raise Refused(f"a coordinator talks to leaders and operators, not to {purpose!r}")
    if purpose == "leader" and not all(type(hello.get(name)) is int for name in ("replica", "attempt")):
        raise Refused("a leader's hello needs the numbers of its replica and its attempt")


def _watch_host(writer: asyncio.StreamWriter) -> None:
    """Let the kernel find out when the host on the other side is gone."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", KEEPALIVE_AFTER), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _in_words(effect: _News) -> str:
    match effect:
        case Fenced():
            return f"fencing everything up to epoch {effect.epoch}: {effect.reason}"
        case Removed():
            return f"replica {effect.replica} attempt {effect.attempt} is out ({effect.cause}): {effect.reason}"
        case Stalled():
            return f"step {effect.step} does not end: {effect.reason}"
        case Left():
            return f"replica {effect.replica} attempt {effect.attempt} left: {effect.reason}"
        case Decided():
            return _decision_in_words(effect)
        case Started():
            return _start_in_words(effect)
        case Proposed():
            return f"planned {_record_in_words(effect.record)}"
        case Withdrawn():
            return f"withdrew epoch {effect.epoch}: {effect.reason}"
        case Finished():
            return f"finished at step {effect.step}"
        case _ as never:
            assert_never(never)


def _decision_in_words(effect: Decided) -> str:
    if effect.record is None:
        return "nobody with a state is left: the run starts again when enough replicas are back"
    spares = f"; replicas {list(effect.stepped_in)} step in" if effect.stepped_in else ""
    return f"decided {_record_in_words(effect.record)}{spares}"


def _start_in_words(start: Started) -> str:
    origin = f"the checkpoint of step {start.step}" if start.step else "the initial weights"
    others = f"; replicas {list(start.replaced)} had another state, and get this one" if start.replaced else ""
    return f"the run starts from {origin} of replica {start.replicas[0]}{others}"


def _record_in_words(record: EpochRecord) -> str:
    shadows = [m.replica for m in record.members if m.role is Role.SHADOW]
    begins = "at the next boundary"
    if record.outcome is not None:
        source = "" if record.outcome.source is None else f", rolled forward from replica {record.outcome.source}"
        begins = f"at step {record.outcome.step}{source}"
    paused = ", paused" if record.paused else ""
    return f"epoch {record.number} {begins}: active {list(record.active)}, shadows {shadows}{paused}"
