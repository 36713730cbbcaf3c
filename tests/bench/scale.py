"""A failure in a job of 12 replicas of 8,192 ranks: the real coordinator and leaders in simulated time.

Every message takes 1 ms. What a handler takes on this machine's processor (with encoding, decoding and, for the store,
the disk) is measured and added to its node's clock, so that a node does one thing after the other; all leaders have
machines of their own, as in life. The same failure is played a second time with handlers that take no time: what is
left is the network.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pydantic import BaseModel
from tests.bench.figures import Figure, at_most
from tests.bench.plan import Plan

from fthsdp.coordinator.addressbook import AddressBook, Frames, complete
from fthsdp.coordinator.events import Disconnected, Event, MembershipSettings, Persist, Received, Send
from fthsdp.coordinator.membership import Membership
from fthsdp.coordinator.messages import (
    Assigned,
    FromCoordinator,
    Hello,
    Install,
    MemberState,
    State,
    parse_from_coordinator,
    parse_to_coordinator,
)
from fthsdp.coordinator.store import FileStore
from fthsdp.protocol.leader import Cancel, Effect, Leader, TellCoordinator
from fthsdp.wire import decode_body, decode_common, encode_frame

__all__ = ["large_job"]

REPLICAS, RANKS = 12, 8192
LATENCY = 0.001
"""Seconds of a message from one machine to another."""
STEP = 100
VICTIM = 5
_PREFIX = 4
"""Bytes of a frame before its JSON."""


def _encoded(message: BaseModel) -> bytes:
    return encode_frame(message.model_dump(mode="json"))


class World:
    """Nodes with a clock each, and messages between them; ``charged``: what a handler takes passes on its clock."""

    def __init__(self, *, charged: bool) -> None:
        self.busy: dict[str, float] = defaultdict(float)
        """Processor seconds of each node."""
        self._charged = charged
        self._queue: list[tuple[float, int, str, Callable[[], None]]] = []  # when, order, node, handler
        self._order = itertools.count()
        self._free: dict[str, float] = defaultdict(float)
        self._start = self._waited = 0.0
        self._began: float | None = None
        """Processor time at which the running handler began; None between handlers."""

    @property
    def now(self) -> float:
        """Where the clock of the node stands whose handler runs."""
        if self._began is None or not self._charged:
            return self._start
        return self._start + time.process_time() - self._began + self._waited

    def send(self, node: str, handler: Callable[[], None], *, hops: int = 1) -> None:
        """Let another node do something when the message is there."""
        heapq.heappush(self._queue, (self.now + hops * LATENCY, next(self._order), node, handler))

    def wait(self, action: Callable[[], None]) -> None:
        """Do something that waits for the disk; the wait counts as well."""
        began, busy = time.perf_counter(), time.process_time()
        action()
        self._waited += max(time.perf_counter() - began - (time.process_time() - busy), 0.0)

    def run(self) -> None:
        """Play until nothing is under way."""
        while self._queue:
            at, _, node, handler = heapq.heappop(self._queue)
            self._start, self._waited = max(at, self._free[node]), 0.0
            began = self._began = time.process_time()
            handler()
            spent = time.process_time() - began
            self._began = None
            self._free[node] = self._start + (spent + self._waited if self._charged else 0.0)
            self.busy[node] += spent


class LargeJob:
    """One job, in the middle of a step."""

    def __init__(self, folder: Path, *, charged: bool) -> None:
        self.world = World(charged=charged)
        self.decided: dict[int, float] = {}
        """By replica, when its leader knows what follows."""
        self._loop = asyncio.new_event_loop()
        self._store = FileStore(folder / "epochs.json")
        settings = MembershipSettings(replicas=REPLICAS, min_replicas=1)
        self._membership = Membership(settings, now=0.0)
        self._leaders = {r: Leader(replica=r, world_size=RANKS) for r in range(REPLICAS)}
        self._frames = Frames()
        self._said_to, self._heard_by = ({r: AddressBook() for r in self._leaders} for _ in range(2))
        self._begin()

    def _begin(self) -> None:
        """Bring everybody into the step; nothing of it is measured."""
        for replica in self._leaders:
            addresses = tuple(f"10.{replica}.{rank >> 8}.{rank & 255}:41000" for rank in range(RANKS))
            hello = Hello(replica=replica, attempt=0, addresses=addresses, state=MemberState(origin="00"))
            for effect in self._membership.handle(self._said(replica, hello), 0.0):
                self._prepare(effect)
        begun = Assigned(step=STEP + 1, replicas=tuple(range(REPLICAS)), wanted=REPLICAS)
        for replica, leader in self._leaders.items():
            leader.enters(1, connected=1, step=STEP, begun=begun, serves=True)
            for effect in self._membership.handle(self._said(replica, State(state=leader.state)), 0.0):
                self._prepare(effect)

    def _prepare(self, effect: object) -> None:
        match effect:
            case Persist():
                self._save(effect)
            case Send(message=Install() as message):
                frame = self._frames.encode(message, self._said_to[effect.replica])
                self._leaders[effect.replica].hear(self._read(effect.replica, frame))

    def _read(self, replica: int, frame: bytes) -> FromCoordinator:
        return complete(parse_from_coordinator(decode_body(frame[_PREFIX:])), self._heard_by[replica])

    def _said(self, replica: int, message: Hello | State) -> Received:
        return Received(connection=replica, replica=replica, attempt=0, message=message)

    def fail(self) -> None:
        """Let a replica's machines vanish: its connections close, to the coordinator and along all rails."""
        del self._leaders[VICTIM]
        self.world.send("coordinator", partial(self._handle, Disconnected(connection=VICTIM)))
        line = list(range(REPLICAS))
        for replica in self._leaders:
            right, left = (replica - VICTIM) % REPLICAS, (VICTIM - replica) % REPLICAS
            distance = min(right, left)  # the break runs round the ring both ways
            suspect = line[(replica + (-1 if right <= left else 1)) % REPLICAS]
            self.world.send(f"leader {replica}", partial(self._ranks_break, replica, suspect), hops=distance + 1)
        self.world.run()

    def close(self) -> None:
        """Close the event loop that the store needs."""
        self._loop.close()

    # --- the coordinator's shell

    def _receive(self, replica: int, frame: bytes) -> None:
        message = parse_to_coordinator(decode_body(frame[_PREFIX:]))
        assert isinstance(message, State)
        self._handle(self._said(replica, message))

    def _handle(self, event: Event) -> None:
        for effect in self._membership.handle(event, self.world.now):
            match effect:
                case Persist():
                    self.world.wait(partial(self._save, effect))
                case Send(replica=replica, message=message) if replica in self._leaders:
                    frame = self._frames.encode(message, self._said_to[replica])
                    self.world.send(f"leader {replica}", partial(self._hear, replica, frame))

    def _save(self, effect: Persist) -> None:
        self._loop.run_until_complete(self._store.save(effect.ledger, expected=effect.expected))

    # --- the leaders' shells

    def _hear(self, replica: int, frame: bytes) -> None:
        message = self._read(replica, frame)
        effects = self._leaders[replica].hear(message)
        if isinstance(message, Install):
            self.decided[replica] = self.world.now
        else:
            self._carry_out(replica, effects)

    def _carry_out(self, replica: int, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case TellCoordinator():
                    frame = _encoded(State(state=self._leaders[replica].state))
                    self.world.send("coordinator", partial(self._receive, replica, frame))
                case Cancel(up_to=up_to):
                    encode_frame({"cancel": up_to})
                    self._carry_out(replica, self._leaders[replica].rings_cancelled(0, up_to))
                    self.world.send(f"leader {replica}", partial(self._ranks_cancel, replica, up_to), hops=2)

    def _ranks_cancel(self, replica: int, up_to: int) -> None:
        frame = encode_frame({"cancelled": up_to})
        for rank in range(1, RANKS):
            notice = decode_common(frame[_PREFIX:])
            self._carry_out(replica, self._leaders[replica].rings_cancelled(rank, int(notice["cancelled"])))

    def _ranks_break(self, replica: int, suspect: int) -> None:
        reason = f"replica {suspect}: it closed the connection"
        frame = encode_frame({"broken": 1, "suspect": suspect, "reason": reason})
        for _ in range(RANKS):
            notice = decode_common(frame[_PREFIX:])
            self._carry_out(replica, self._leaders[replica].ring_broken(notice["broken"], suspect, notice["reason"]))


def _decide(*, charged: bool) -> tuple[float, LargeJob]:
    with tempfile.TemporaryDirectory() as folder:
        job = LargeJob(Path(folder), charged=charged)
        try:
            job.fail()
        finally:
            job.close()
    assert len(job.decided) == REPLICAS - 1
    return max(job.decided.values()), job


def large_job(plan: Plan) -> list[Figure]:
    """Play the failure several times."""
    network, _ = _decide(charged=False)
    seconds, coordinator, leader = [], [], []
    for _ in range(plan.repetitions):
        took, job = _decide(charged=True)
        seconds.append(took)
        coordinator.append(job.world.busy["coordinator"])
        leader.append(max(busy for node, busy in job.world.busy.items() if node != "coordinator"))
        plan.say(f"decision known everywhere after {took:.3f} s; processor: coordinator {coordinator[-1]:.3f} s,"
                 f" busiest leader {leader[-1]:.3f} s")  # fmt: skip
    return [
        Figure(
            name=f"decision on a failure, {REPLICAS} replicas x {RANKS:,} ranks, real core, network of 1 ms",
            values=tuple(seconds),
            must=at_most(0.1),
            note="from the last sign of life until every leader knows the decision;"
            f" the network's part {network:.3f} s; processor of the coordinator"
            f" {statistics.median(coordinator):.3f} s, of the busiest leader {statistics.median(leader):.3f} s",
        )
    ]
