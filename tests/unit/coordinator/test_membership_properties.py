"""What holds for a membership in any order of events: leaders that act as they must, and everything else at random."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fthsdp.coordinator.events import (
    AskStore,
    Disconnected,
    Drop,
    Effect,
    Event,
    MembershipSettings,
    Persist,
    Received,
    Removed,
    Send,
    Started,
    StoreAnswered,
    Tick,
)
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.membership import Membership
from fthsdp.coordinator.messages import (
    Announce,
    Break,
    Bye,
    Cause,
    Close,
    EpochRecord,
    Exited,
    FromCoordinator,
    Go,
    Hello,
    Install,
    MemberState,
    Phase,
    Probe,
    RankReport,
    RefusedMember,
    Role,
    State,
)

REPLICAS = 4
LEAST = 2
replicas = st.integers(0, REPLICAS - 1)


def stored(record: EpochRecord) -> EpochRecord:
    return record.with_addresses(lambda member: ())


@dataclass
class Leader:
    """A leader that does what the protocol asks of it, one message at a time."""

    replica: int
    attempt: int
    connection: int | None = None
    alive: bool = True
    frozen: bool = False
    hangs: bool = False
    """A rank of it does not get out of the body of its step; the leader itself goes on talking."""
    state: MemberState = field(default_factory=MemberState)
    inbox: deque[FromCoordinator] = field(default_factory=deque)
    record: EpochRecord | None = None
    announced: EpochRecord | None = None
    heard: int = 0
    missed: Install | None = None
    """What it would have entered if it did not hang."""

    def change(self, **changes: object) -> None:
        self.state = self.state.model_copy(update=changes)

    def act(self, message: FromCoordinator) -> None:
        match message:
            case Announce(record=record) if record.number > max(self.state.epoch, self.state.fence):
                self.announced = record
                if record.member(self.replica):
                    self.change(connected=record.number)
            case Go(epoch=epoch):
                self.heard = max(self.heard, epoch)
            case Break(epoch=epoch):
                self.change(fence=max(epoch, self.state.fence))
            case Probe(number=number):
                self.change(probe=number, ranks=(self.report(),))
            case Install() if self.hangs:
                self.missed = message
            case Install(record=record) if record.number > max(self.state.epoch, self.state.fence):
                self.enter(record)
            case Close(step=step):
                self.change(finished=step)
            case Bye() | RefusedMember():
                self.alive = False
            case _:
                pass

    def report(self) -> RankReport:
        step = 0 if self.state.step is None else self.state.step + 1
        phase = Phase.BODY if self.hangs else Phase.COLLECTIVE
        return RankReport(rank=0, epoch=self.state.epoch, step=step, phase=phase, seconds=60)

    def enter(self, record: EpochRecord) -> None:
        self.record, self.announced = record, None
        member = record.member(self.replica)
        assert member is not None
        assert member.attempt == self.attempt
        step, base, serves = self.state.step, self.state.base, self.state.serves
        if self.replica in record.snapshots:
            base = record.number
        if record.outcome is not None:
            at = record.outcome.step
            assert record.outcome.source is None or record.member(record.outcome.source)
            if self.replica in record.snapshots:
                step, serves = None, False
            elif step is None:
                assert member.role is Role.ACTIVE, "a shadow without a state has to be given one"
                assert at == self.state.checkpoint, "a run begins where those who train in it can begin"
                step, serves = at, at == 0
            else:
                assert step <= at, "a member that is ahead of the decision has to be given new stripes"
                step, serves = at, serves or step < at
        self.change(epoch=record.number, step=step, base=base, serves=serves)


class Memberships(RuleBasedStateMachine):
    """A coordinator, its store, and leaders; the rules are what can happen to them."""

    spares = 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.wanted = REPLICAS - self.spares
        self.settings = MembershipSettings(
            replicas=self.wanted, min_replicas=LEAST, spares=self.spares, start_timeout=30, stall_timeout=20
        )
        self.checkpoint = 0
        self.stored: list[Ledger] = []
        self.leaders: dict[int, Leader] = {}
        self.attempts = dict.fromkeys(range(REPLICAS), -1)
        self.connections = 0
        self.exits: set[tuple[int, int]] = set()
        self.faults = 6
        self.begun: set[int] = set()
        """Planned epochs that have begun somewhere."""
        self.closed: set[tuple[int, int]] = set()
        """Incarnations whose connection was closed at some time."""
        self.hung: set[tuple[int, int]] = set()
        """Incarnations of which a rank did not move at some time."""
        self.muted: set[tuple[int, int]] = set()
        """Incarnations that were frozen, or died without a word, at some time."""
        self.asked = False
        """The store owes an answer."""
        self.cut_off = False
        """The coordinator hears nobody, nobody hears it, and its store does not answer."""
        self.core = Membership(self.settings, now=self.now)
        for replica in range(REPLICAS):
            self.spawn(replica)

    @initialize(started=st.sampled_from([True, True, True, False]))
    def begins(self, started: bool) -> None:
        if started:
            for replica in range(REPLICAS):
                self.connects(replica)
            for replica in range(REPLICAS):
                self.reads(replica, 9)

    # --- the shell

    def do(self, event: Event, *, crash_after: int | None = None) -> None:
        self.execute(self.core.handle(event, self.now)[:crash_after])
        if self.asked and not self.cut_off:
            self.asked = False
            self.do(StoreAnswered())

    def execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Persist(ledger=ledger, expected=expected):
                    assert expected == (self.stored[-1].number if self.stored else 0)
                    assert ledger.number > expected, "numbers only grow"
                    assert all(len(e.active) <= self.wanted for e in (ledger.current, ledger.proposal) if e)
                    self.stored.append(ledger)
                case Send():
                    self.check_persisted(effect.message)
                    for leader in self.leaders.values():
                        if leader.connection == effect.connection:
                            leader.inbox.append(effect.message)
                case Drop():
                    for leader in self.leaders.values():
                        if leader.connection == effect.connection:
                            # What was sent before it is still read.
                            leader.connection = None
                            self.closed.add((leader.replica, leader.attempt))
                case AskStore():
                    self.asked = True
                case Removed():
                    self.check_evidence(effect)
                case Started(step=step):
                    waiting = [o.state.checkpoint for o in self.leaders.values() if o.connection and not o.state.epoch]
                    assert step == max(waiting), "the newest checkpoint that anybody who waits can read"
                case _:
                    pass

    def check_persisted(self, message: FromCoordinator) -> None:
        if isinstance(message, Install):
            assert stored(message.record) in [self.stored[-1].current, self.stored[-1].proposal]
        elif isinstance(message, Announce):
            assert stored(message.record) == self.stored[-1].proposal, "one proposal at a time"

    def check_evidence(self, removed: Removed) -> None:
        who = (removed.replica, removed.attempt)
        match removed.cause:
            case Cause.EXITED:
                assert any(r == removed.replica and attempt >= removed.attempt for r, attempt in self.exits)
            case Cause.CONNECTION_LOST:
                assert who in self.closed
            case Cause.SILENT:
                assert who in self.muted
            case Cause.HUNG:
                unread = self.leaders[removed.replica].inbox
                assert who in self.muted | self.hung or unread, f"it has read all and done as told: {removed}"
            case Cause.STATE_DIVERGED:
                assert self.leaders[removed.replica].state.failed == removed.reason
            case Cause.REPLACED:
                assert self.attempts[removed.replica] > removed.attempt
            case Cause.ORPHANED:
                assert self.leaders[removed.replica].state.step is None

    def spawn(self, replica: int) -> None:
        self.attempts[replica] += 1
        self.leaders[replica] = Leader(replica, self.attempts[replica])
        self.leaders[replica].change(origin=f"step {self.checkpoint}", checkpoint=self.checkpoint)

    def tell(self, leader: Leader) -> None:
        if leader.connection is not None and leader.alive and not (leader.frozen or self.cut_off):
            self.do(Received(connection=leader.connection, replica=leader.replica, attempt=leader.attempt,
                             message=State(state=leader.state)))  # fmt: skip

    def connect(self, leader: Leader) -> None:
        self.connections += 1
        leader.connection = self.connections
        leader.inbox.clear()
        addresses = (f"{leader.replica}.{leader.attempt}:1",)
        hello = Hello(replica=leader.replica, attempt=leader.attempt, addresses=addresses, state=leader.state)
        self.do(Received(connection=self.connections, replica=leader.replica, attempt=leader.attempt, message=hello))

    def active(self, replica: int) -> Leader | None:
        leader = self.leaders[replica]
        return leader if leader.alive and not leader.frozen else None

    def moving(self, replica: int) -> Leader | None:
        leader = self.active(replica)
        return leader if leader is not None and not leader.hangs else None

    # --- what can happen

    @rule(replica=replicas)
    def connects(self, replica: int) -> None:
        leader = self.active(replica)
        if leader is not None and leader.connection is None and not self.cut_off:
            self.connect(leader)

    @rule(replica=replicas, count=st.integers(1, 3))
    def reads(self, replica: int, count: int) -> None:
        leader = self.active(replica)
        while leader is not None and leader.alive and leader.inbox and count and not self.cut_off:
            count -= 1
            leader.act(leader.inbox.popleft())
            self.tell(leader)

    @rule(order=st.permutations(range(REPLICAS)), reading=st.integers(0, 9))
    def life_goes_on(self, order: list[int], reading: int) -> None:
        """Everybody does what there is to do, in some order."""
        for replica in order:
            if not self.leaders[replica].alive:
                self.is_started_again(replica)
            self.connects(replica)
            self.reads(replica, reading)
            self.crosses_a_boundary(replica)
            self.takes_a_step(replica)
            self.shadow_catches_up(replica)

    @rule(replica=replicas)
    def crosses_a_boundary(self, replica: int) -> None:
        """Enter the announced epoch, or leave there when it is without this replica."""
        leader = self.moving(replica)
        if leader is None or leader.announced is None or not self.has_begun(leader, leader.announced.number):
            return
        if leader.announced.member(replica):
            leader.enter(leader.announced)
            self.tell(leader)
        else:
            leader.alive = False
            self.cut(leader)

    def has_begun(self, leader: Leader, number: int) -> bool:
        """The first to cross needs a whole ring in which somebody had heard of it; the others had the same vote."""
        if number <= leader.state.fence:
            return False
        heard = any(other.heard >= number for other in self.leaders.values())
        ring = leader.record.members if leader.record is not None else ()
        if ring and heard and all(self.may_step(m.replica, m.attempt) for m in ring):
            self.begun.add(number)
        return number in self.begun

    def may_step(self, replica: int, attempt: int) -> bool:
        leader = self.leaders[replica]
        return self.is_there(attempt, leader) and not leader.hangs and leader.state.fence < leader.state.epoch

    def is_there(self, attempt: int, leader: Leader) -> bool:
        return leader.attempt == attempt and leader.alive and not leader.frozen

    @rule(replica=replicas)
    def takes_a_step(self, replica: int) -> None:
        leader = self.moving(replica)
        if leader is None or leader.state.step is None or leader.record is None or leader.record.paused:
            return
        ring = [self.leaders[m.replica] for m in leader.record.members]
        together = all(self.may_step(o.replica, o.attempt) and o.state.epoch == leader.state.epoch for o in ring)
        if together and all(o.state.step is None or o.state.step >= leader.state.step for o in ring):
            leader.change(step=leader.state.step + 1, serves=True)
            self.tell(leader)

    @rule(replica=replicas)
    def saves_a_checkpoint(self, replica: int) -> None:
        leader = self.active(replica)
        if leader is not None and leader.state.step is not None and leader.state.serves:
            self.checkpoint = max(self.checkpoint, leader.state.step)

    @rule(replica=replicas)
    @precondition(lambda self: not self.stored)
    def has_other_initial_weights(self, replica: int) -> None:
        leader = self.active(replica)
        if leader is not None and not leader.state.epoch:
            leader.change(origin="other weights")
            self.tell(leader)

    @rule(replica=replicas)
    @precondition(lambda self: self.faults > 0)
    def says_that_it_has_failed(self, replica: int) -> None:
        leader = self.active(replica)
        if leader is not None:
            self.faults -= 1
            leader.change(failed="StateDiverged: a bit has flipped")
            self.tell(leader)
            leader.alive = False

    @rule(replica=replicas)
    def shadow_catches_up(self, replica: int) -> None:
        leader = self.moving(replica)
        if leader is None or leader.record is None or leader.state.step is not None or not leader.state.base:
            return
        donors = [self.leaders[r] for r in leader.record.active]
        steps = [o.state.step for o in donors if o.state.epoch == leader.state.epoch]
        present = [step for step in steps if step is not None]
        if present and leader.state.fence < leader.state.epoch:
            leader.change(step=min(present))
            self.tell(leader)

    @rule(replica=replicas)
    def notices_a_broken_ring(self, replica: int) -> None:
        leader = self.active(replica)
        crossing = leader is not None and leader.announced is not None and leader.announced.number in self.begun
        if leader is not None and leader.record is not None and not crossing:
            ring = [(m, self.leaders[m.replica]) for m in leader.record.members]
            lost = [
                m.replica for m, o in ring if not self.is_there(m.attempt, o) or o.state.fence >= leader.state.epoch
            ]
            if lost:
                leader.change(broken=leader.state.epoch, suspects=tuple(lost[:2]), reason="closed")
                self.tell(leader)

    @rule(replica=replicas, reported=st.booleans())
    @precondition(lambda self: self.faults > 0)
    def dies(self, replica: int, reported: bool) -> None:
        leader = self.leaders[replica]
        self.faults -= 1
        leader.alive = False
        self.muted.add((replica, leader.attempt))
        if reported:
            self.reports_its_exit(replica)

    @rule(replica=replicas)
    def reports_its_exit(self, replica: int) -> None:
        leader = self.leaders[replica]
        if not (leader.alive or self.cut_off):
            self.exits.add((replica, leader.attempt))
            self.do(Exited(replica=replica, attempt=leader.attempt, reason="killed", detected=self.now))

    @rule(replica=replicas)
    def connection_of_the_dead_closes(self, replica: int) -> None:
        if not self.leaders[replica].alive:
            self.cut(self.leaders[replica])

    @rule(replica=replicas)
    @precondition(lambda self: self.faults > 0)
    def network_hiccups(self, replica: int) -> None:
        self.faults -= 1
        self.cut(self.leaders[replica])

    def cut(self, leader: Leader) -> None:
        self.closed.add((leader.replica, leader.attempt))
        connection, leader.connection = leader.connection, None
        leader.inbox.clear()
        if connection is not None:
            self.do(Disconnected(connection=connection))

    @rule()
    @precondition(lambda self: self.faults > 0)
    def the_coordinator_is_cut_off(self) -> None:
        self.faults -= 1
        self.cut_off = True

    @rule()
    def the_coordinator_is_connected_again(self) -> None:
        self.cut_off = False

    @rule(replica=replicas)
    @precondition(lambda self: self.faults > 0)
    def freezes(self, replica: int) -> None:
        self.faults -= 1
        leader = self.leaders[replica]
        leader.frozen = True
        self.muted.add((replica, leader.attempt))

    @rule(replica=replicas)
    def thaws(self, replica: int) -> None:
        self.leaders[replica].frozen = False

    @rule(replica=replicas)
    @precondition(lambda self: self.faults > 0)
    def a_rank_hangs(self, replica: int) -> None:
        leader = self.active(replica)
        if leader is not None and not any(other.hangs for other in self.leaders.values()):
            self.faults -= 1
            leader.hangs = True
            self.hung.add((replica, leader.attempt))

    @rule(replica=replicas)
    def a_rank_goes_on(self, replica: int) -> None:
        leader = self.leaders[replica]
        leader.hangs = False
        if leader.missed is not None:
            leader.act(leader.missed)
            leader.missed = None
            self.tell(leader)

    @rule(replica=replicas)
    def is_started_again(self, replica: int) -> None:
        if not self.leaders[replica].alive:
            self.cut(self.leaders[replica])
            self.spawn(replica)

    @rule(replica=replicas)
    @precondition(lambda self: self.faults > 0)
    def asks_to_leave(self, replica: int) -> None:
        leader = self.active(replica)
        if leader is not None:
            self.faults -= 1
            leader.change(leaving="SIGTERM")
            self.tell(leader)

    @rule(seconds=st.sampled_from([0.2, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            for leader in self.leaders.values():
                self.tell(leader)
            self.do(Tick())

    @rule(crash_after=st.integers(0, 3), replica=replicas)
    @precondition(lambda self: self.faults > 0)
    def coordinator_dies(self, crash_after: int, replica: int) -> None:
        self.faults -= 1
        leader = self.leaders[replica]
        if leader.connection is not None and leader.alive and not (leader.frozen or self.cut_off):
            state = State(state=leader.state)
            received = Received(connection=leader.connection, replica=replica, attempt=leader.attempt, message=state)
            self.do(received, crash_after=crash_after)
        for other in self.leaders.values():
            other.connection = None
            other.inbox.clear()
            self.closed.add((other.replica, other.attempt))
        self.asked = self.cut_off = False
        self.core = Membership(self.settings, ledger=self.stored[-1] if self.stored else None, now=self.now)

    # --- what holds

    @invariant()
    def epochs_grow(self) -> None:
        numbers = [ledger.number for ledger in self.stored]
        assert numbers == sorted(set(numbers))

    def is_waited_for(self, replica: int) -> bool:
        """Whether an active member waits for this one: without such a witness a hang is only a long step."""
        active = self.stored[-1].current.active if self.stored else ()
        return any(
            self.is_there(o.attempt, o) and o.state.step is not None
            for o in map(self.leaders.get, active)
            if o and o.replica != replica
        )

    def long_steps_end(self) -> None:
        for replica, leader in self.leaders.items():
            if leader.hangs and not self.is_waited_for(replica):
                self.a_rank_goes_on(replica)

    def teardown(self) -> None:
        """When faults stop, everybody who is alive gets into the same epoch, and nobody is left waiting."""
        self.faults = 0
        self.cut_off = False
        for second in range(150):
            if second % 75 == 0:  # who waited for it may be gone by now
                self.long_steps_end()
            for replica, leader in list(self.leaders.items()):
                leader.frozen = False
                if not leader.alive:
                    self.reports_its_exit(replica)
            self.life_goes_on(list(range(REPLICAS)), 9)
            for replica in range(REPLICAS):
                self.notices_a_broken_ring(replica)
            self.time_passes(1.0)
        record = self.stored[-1].proposal or self.stored[-1].current
        assert len(record.members) == REPLICAS, f"{record}\n{self.leaders}\n{self.core.replicas()}"
        assert len(record.active) == self.wanted
        assert not record.paused
        assert {leader.state.epoch for leader in self.leaders.values()} == {record.number}


class MembershipsWithASpare(Memberships):
    """The same with one replica fewer to train, which is kept ready instead."""

    spares = 1


Memberships.TestCase.settings = MembershipsWithASpare.TestCase.settings = settings(
    max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestMemberships = Memberships.TestCase
TestMembershipsWithASpare = MembershipsWithASpare.TestCase
