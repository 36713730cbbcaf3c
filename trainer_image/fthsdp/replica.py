"""How the ranks of one replica are held together outside the training thread.

The leader's control side hears from the coordinator at any moment, also while the training threads compute or wait.
What it decides has to reach every rank's rings at once (connect, cancel, a go), and what the rings of any rank notice
has to reach the leader. This module carries both over one connection per rank; ``protocol.leader`` decides.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from fthsdp.coordinator.addressbook import AddressBook
from fthsdp.coordinator.client import LeaderClient
from fthsdp.coordinator.messages import EpochRecord, FromCoordinator, JoinRecord, Member, Phase, RankReport, StepRecord
from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.errors import ConnectionLost, Refused, RingBroken, WireError
from fthsdp.ftar import Engine, RailMember
from fthsdp.protocol.leader import AskRanks, Cancel, Connect, Effect, Heard, Leader, TellCoordinator
from fthsdp.tls import Tls
from fthsdp.wire import (
    Json,
    decode_common,
    encode_frame,
    open_blocking,
    receive_body,
    receive_frame,
    send_encoded,
    send_frame,
)

__all__ = ["Follower", "LeaderShell", "RankPort", "Reporter"]

log = logging.getLogger(__name__)

PURPOSE = "replica"
_ALIVE_INTERVAL = 1.0
"""Seconds between a rank's signs of life to its leader."""
_LOOK_INTERVAL = 0.2
"""Seconds between the leader's looks for ranks that give none."""
_PROBE_PATIENCE = 2.0
"""Seconds in which a rank has to say where it is: it is asked in a thread that has nothing else to do."""
_T = TypeVar("_T")


class Reporter(Protocol):
    """Where a rank's notices go."""

    def connected(self, epoch: int) -> None:
        """This rank has both neighbours of this epoch's ring."""

    def broken(self, epoch: int, suspect: int | None, reason: str) -> None:
        """This rank's ring of this epoch broke."""

    def leaving(self, reason: str) -> None:
        """This rank was told to stop."""


class RankPort:
    """What the leader's control side can do at one rank, from any thread."""

    def __init__(self, identity: Identity, engine: Engine) -> None:
        self._replica, self._rank = identity.replica, identity.rank
        self._engine = engine
        self._changed = threading.Condition()
        self._records: dict[int, EpochRecord] = {}
        self._book = AddressBook()
        self._heard = 0
        self.whereabouts: Callable[[], RankReport] = self._before_training
        """Set by whoever runs the training thread."""

    def _before_training(self) -> RankReport:
        return RankReport(rank=self._rank, epoch=0, step=0, phase=Phase.BODY, seconds=0.0)

    @property
    def heard(self) -> int:
        """Newest epoch that may begin at the next boundary; 0 for none."""
        with self._changed:
            return self._heard

    def record(self, epoch: int) -> EpochRecord:
        """Return an announced epoch.

        Waits when its number came round the ring before its announcement did, which can only happen to a replica that
        leaves: whoever stays has connected the epoch before anybody may begin it.
        """
        with self._changed:
            self._changed.wait_for(lambda: epoch in self._records)
            return self._records[epoch]

    def connect(self, record: EpochRecord) -> None:
        """Connect the ring of this epoch in the background, unless this replica is not in it."""
        with self._changed:
            self._records = {n: r for n, r in self._records.items() if n > record.number - 8} | {record.number: record}
            self._changed.notify_all()
        if record.member(self._replica) is None:
            return
        line = [
            RailMember(replica=m.replica, attempt=m.attempt, address=m.addresses[self._rank]) for m in record.members
        ]
        try:
            self._engine.connect(record.number, line)
        except RingBroken as error:
            log.info("a fence was faster than its announcement: %s", error)

    def cancel(self, up_to: int) -> None:
        """Close the rings of all epochs up to this one."""
        self._engine.cancel(up_to)

    def hear(self, epoch: int) -> None:
        """Put this epoch's number into the next header."""
        with self._changed:
            self._heard = max(self._heard, epoch)

    def _located(self, record: EpochRecord) -> EpochRecord:
        """Put in the addresses on this rank's rail, which the leader has said at some time; others are not known."""
        return self._book.complete(record).with_addresses(lambda member: ("",) * self._rank + member.addresses)

    def apply(self, frame: Json) -> None:
        """Carry out a command that came over the wire; raises WireError."""
        try:
            match frame:
                case {"connect": dict(record)}:
                    self.connect(self._located(EpochRecord.model_validate(record)))
                case {"cancel": int(up_to)}:
                    self.cancel(up_to)
                case {"heard": int(epoch)}:
                    self.hear(epoch)
                case _:
                    raise WireError(f"not a command of the leader: {frame!r}"[:200])
        except ValueError as error:
            raise WireError(f"not a command of the leader: {error}"[:200]) from error


class LeaderShell:
    """The shell around ``Leader``: the coordinator's client on one side, all ranks of the replica on the other."""

    def __init__(self, leader: Leader, *, port: RankPort, endpoint: Endpoint) -> None:
        self._leader = leader
        self._port = port
        self._client: LeaderClient | None = None
        self._links: dict[int, socket.socket] = {}
        self._book = AddressBook()
        """What was said to the ranks: all are linked before there is anything to say."""
        self._changed = threading.Condition(threading.RLock())
        self._heard: dict[int, float] = {}
        """By rank, when it last said something."""
        self._closed = threading.Event()
        endpoint.serve(PURPOSE, self._serve_rank, judge=self._judge_rank)

    def start(self, client: LeaderClient, *, timeout: float, silence_timeout: float) -> None:
        """Wait until all other ranks are linked, then say hello to the coordinator; raises ConnectionLost.

        A rank that says nothing for ``silence_timeout`` seconds is frozen when it is waited for.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._links) == self._leader.world_size - 1, timeout):
                missing = sorted(set(range(1, self._leader.world_size)) - set(self._links))
                raise ConnectionLost(f"ranks {missing} of this replica did not link up within {timeout:.0f} s")
            self._client = client
        client.start()
        threading.Thread(target=self._watch, args=(silence_timeout,), name="fthsdp-watch", daemon=True).start()

    def _watch(self, silence_timeout: float) -> None:
        """Look for ranks that stand still. Time in which this process stood still itself is no evidence."""
        looked = time.monotonic()
        while not self._closed.wait(_LOOK_INTERVAL):
            now = time.monotonic()
            gap, looked = now - looked, now
            with self._changed:
                if gap > silence_timeout / 2:
                    self._heard = {rank: heard + gap for rank, heard in self._heard.items()}
                silent = {r: now - heard for r, heard in self._heard.items() if now - heard >= silence_timeout}
            if silent:
                self.run(partial(Leader.ranks_silent, seconds=silent, timeout=silence_timeout))

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        if self._client is not None:
            self._client.close()
        with self._changed:
            for link in self._links.values():
                link.close()

    # --- what the shell is told

    def on_message(self, message: FromCoordinator) -> None:
        """Take in a message of the coordinator (from the client's thread)."""
        self.run(lambda leader: leader.hear(message))

    def connected(self, epoch: int) -> None:
        """Take in this rank's own notice."""
        self.run(lambda leader: leader.ring_connected(0, epoch))

    def broken(self, epoch: int, suspect: int | None, reason: str) -> None:
        """Take in this rank's own notice."""
        self.run(lambda leader: leader.ring_broken(epoch, suspect, reason))

    def leaving(self, reason: str) -> None:
        """Take in this rank's own notice."""
        self.run(lambda leader: leader.asks_to_leave(reason))

    def run(self, event: Callable[[Leader], list[Effect]]) -> None:
        """Give the leader an event and carry out what it returns."""
        with self._changed:
            effects = event(self._leader)
            if self._client is not None:
                self._client.send_state(self._leader.state, now=TellCoordinator() in effects)
            for effect in effects:
                self._carry_out(effect)
            self._changed.notify_all()

    def ask(self, question: Callable[[Leader], _T]) -> _T:
        """Return the leader's answer to something that has no effects."""
        with self._changed:
            return question(self._leader)

    def wait(self, question: Callable[[Leader], _T | None], timeout: float | None) -> _T | None:
        """Wait until the leader has an answer to this question; None when there is none within the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: question(self._leader), timeout)

    def publish(self, record: StepRecord | JoinRecord) -> None:
        """Send a record to the coordinator, in the background."""
        assert self._client is not None
        self._client.record(record)

    # --- carrying out

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Connect(record=record):
                self._connect_ranks(record)
                self._port.connect(record)
            case Cancel(up_to=up_to):
                self._to_ranks({"cancel": up_to})
                self._port.cancel(up_to)
                self.run(lambda leader: leader.rings_cancelled(0, up_to))
            case Heard(epoch=epoch):
                self._to_ranks({"heard": epoch})
                self._port.hear(epoch)
            case AskRanks(probe=probe):
                self._to_ranks({"probe": probe})
                self.run(lambda leader: leader.reports(probe, self._port.whereabouts()))
                timer = threading.Timer(_PROBE_PATIENCE, self.run, [lambda leader: leader.probe_over(probe)])
                timer.daemon = True
                timer.start()
            case TellCoordinator():
                """The client was given the newest state before anything else was carried out."""

    def _connect_ranks(self, record: EpochRecord) -> None:
        """Tell each rank of this epoch, and those addresses on its own rail that it does not know."""
        abridged = self._book.abridge(record)
        if not any(member.addresses for member in abridged.members):
            self._to_ranks({"connect": abridged.model_dump(mode="json")})
            return
        for rank in list(self._links):
            own = abridged.with_addresses(partial(_address_on, rank))
            self._to_rank(rank, encode_frame({"connect": own.model_dump(mode="json")}))

    def _to_ranks(self, message: Json) -> None:
        frame = encode_frame(message)
        for rank in list(self._links):
            self._to_rank(rank, frame)

    def _to_rank(self, rank: int, frame: bytes) -> None:
        try:
            send_encoded(self._links[rank], frame)
        except ConnectionLost as error:
            # The rank is gone, so this replica is: its process group fails, and whoever started it ends the rest.
            log.warning("rank %d of this replica: %s", rank, error)
            self._links.pop(rank).close()

    def _judge_rank(self, hello: Json) -> None:
        rank = hello.get("rank")
        if not isinstance(rank, int) or not 0 < rank < self._leader.world_size:
            raise Refused(f"this replica has no rank {rank!r}")
        if hello.get("replica") != self._leader.replica:
            raise Refused(f"this is replica {self._leader.replica}, not {hello.get('replica')!r}")

    def _serve_rank(self, sock: socket.socket, hello: Json) -> None:
        rank = int(hello["rank"])
        with self._changed:
            self._links[rank] = sock
            self._heard[rank] = time.monotonic()
            self._changed.notify_all()
        try:
            while True:
                self._take_notice(rank, decode_common(receive_body(sock)))
        except WireError as error:
            log.info("link to rank %d of this replica: %s", rank, error)
        finally:
            sock.close()

    def _take_notice(self, rank: int, frame: Json) -> None:
        with self._changed:
            self._heard[rank] = time.monotonic()
        match frame:
            case {"alive": True}:
                """That is all."""
            case {"connected": int(epoch)}:
                self.run(lambda leader: leader.ring_connected(rank, epoch))
            case {"broken": int(epoch), "suspect": int() | None as suspect, "reason": str(reason)}:
                self.run(lambda leader: leader.ring_broken(epoch, suspect, reason))
            case {"cancelled": int(up_to)}:
                self.run(lambda leader: leader.rings_cancelled(rank, up_to))
            case {"probe": int(probe), "report": dict(report)}:
                told = _report(report | {"rank": rank})
                self.run(lambda leader: leader.reports(probe, told))
            case {"leaving": str(reason)}:
                self.run(lambda leader: leader.asks_to_leave(reason))
            case _:
                raise WireError(f"not a notice of a rank: {frame!r}"[:200])


def _address_on(rail: int, member: Member) -> tuple[str, ...]:
    return member.addresses[rail : rail + 1]


def _report(report: Json) -> RankReport:
    try:
        return RankReport.model_validate(report)
    except ValueError as error:
        raise WireError(f"not a report of a rank: {error}"[:200]) from error


class Follower:
    """A rank other than the leader: notices go to the leader, its commands to this rank's port."""

    def __init__(self, address: str, key: bytes, *, identity: Identity, port: RankPort, tls: Tls | None = None) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._closed = threading.Event()
        details: Json = {"replica": identity.replica, "rank": identity.rank}
        self._sock = open_blocking(
            address, key, job=identity.job, purpose=PURPOSE, details=details, timeout=30.0, tls=tls
        )
        self._thread = threading.Thread(target=self._listen, name="fthsdp-follower", daemon=True)

    def start(self) -> None:
        """Begin to carry out the leader's commands, and to give signs of life."""
        self._thread.start()
        threading.Thread(target=self._live, name="fthsdp-alive", daemon=True).start()

    def _live(self) -> None:
        while not self._closed.wait(_ALIVE_INTERVAL):
            self._send({"alive": True})

    def close(self) -> None:
        """Close the connection and end the threads."""
        self._closed.set()
        with self._lock:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                log.debug("the leader was gone first")
        self._thread.join(timeout=5.0)
        self._sock.close()

    def connected(self, epoch: int) -> None:
        """Tell the leader."""
        self._send({"connected": epoch})

    def broken(self, epoch: int, suspect: int | None, reason: str) -> None:
        """Tell the leader."""
        self._send({"broken": epoch, "suspect": suspect, "reason": reason})

    def leaving(self, reason: str) -> None:
        """Tell the leader."""
        self._send({"leaving": reason})

    def _send(self, frame: Json) -> None:
        with self._lock:
            try:
                send_frame(self._sock, frame)
            except ConnectionLost as error:
                # Without its leader this replica is lost; the next vote inside the replica fails and says so.
                self._closed.set()
                log.warning("the leader of this replica is gone: %s", error)

    def _listen(self) -> None:
        try:
            while True:
                command = receive_frame(self._sock)
                if "probe" in command:
                    report = self._port.whereabouts().model_dump(mode="json")
                    self._send({"probe": command["probe"], "report": report})
                    continue
                self._port.apply(command)
                if "cancel" in command:
                    self._send({"cancelled": command["cancel"]})
        except WireError as error:
            log.info("link to the leader of this replica: %s", error)
