"""Each situation of a job's membership, step by step, in simulated time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

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
    Announce,
    Assigned,
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
    Welcome,
)

_M = TypeVar("_M")


@dataclass
class Job:
    """A coordinator in simulated time, and leaders that say what the test tells them to."""

    replicas: int = 3
    least: int = 1
    ledger: Ledger | None = None
    now: float = 1000.0
    spares: int = field(default=0, kw_only=True)
    effects: list[Effect] = field(default_factory=list)
    """Of the last event."""
    states: dict[int, MemberState] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    connections: dict[int, int] = field(default_factory=dict)
    stored: list[Ledger] = field(default_factory=list)
    cut_off: bool = field(default=False, kw_only=True)
    """Whether the store cannot be reached."""
    asked: bool = field(default=False, kw_only=True)
    """Whether the store owes an answer."""

    def __post_init__(self) -> None:
        settings = MembershipSettings(
            replicas=self.replicas, min_replicas=self.least, spares=self.spares, start_timeout=60
        )
        self.core = Membership(settings, ledger=self.ledger, now=self.now)

    def do(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.stored += [e.ledger for e in effects if isinstance(e, Persist)]
        self.asked |= any(isinstance(e, AskStore) for e in effects)
        if self.asked and not self.cut_off:
            self.asked = False
            effects += self.do(StoreAnswered())
        self.effects = [e for e in effects if not isinstance(e, AskStore)]
        return self.effects

    def hello(
        self,
        replica: int,
        attempt: int = 0,
        *,
        ranks: int = 2,
        port: int = 1,
        times: dict[str, float] | None = None,
        **state: Any,
    ) -> None:
        connection = max([0, *self.connections.values()]) + 1
        known = self.attempts.get(replica)
        if state or known != attempt:
            self.states[replica] = MemberState(**{"origin": "a"} | state)
        self.attempts[replica], self.connections[replica] = attempt, connection
        addresses = tuple(f"10.0.{replica}.{attempt}:{port + rank}" for rank in range(ranks))
        message = Hello(
            replica=replica, attempt=attempt, addresses=addresses, state=self.states[replica], times=times or {}
        )
        self.do(Received(connection=connection, replica=replica, attempt=attempt, message=message))

    def say(self, replica: int, **changes: Any) -> list[Effect]:
        self.states[replica] = self.states[replica].model_copy(update=changes)
        return self.do(
            Received(
                connection=self.connections[replica],
                replica=replica,
                attempt=self.attempts[replica],
                message=State(state=self.states[replica]),
            )
        )

    def all_say(self, *replicas: int, **changes: Any) -> None:
        for replica in replicas or tuple(self.states):
            self.say(replica, **changes)

    def cut(self, replica: int) -> list[Effect]:
        return self.do(Disconnected(connection=self.connections[replica]))

    def dies(self, replica: int) -> list[Effect]:
        self.states.pop(replica, None)
        return self.do(Exited(replica=replica, attempt=self.attempts[replica], reason="killed", detected=self.now))

    def gives_up(self, replica: int, attempt: int) -> list[Effect]:
        """The operator starts no attempt after this one."""
        self.states.pop(replica, None)
        return self.do(Exited(replica=replica, attempt=attempt, reason="abandoned", detected=self.now, final=True))

    def pass_time(self, seconds: float, *alive: int) -> list[Effect]:
        """Let time pass in small steps; those ``alive`` go on with their heartbeats."""
        effects: list[Effect] = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for replica in alive:
                effects += self.say(replica)
            effects += self.do(Tick())
        self.effects = effects
        return effects

    def sent(self, replica: int, kind: type[_M]) -> list[_M]:
        return [
            e.message
            for e in self.effects
            if isinstance(e, Send) and e.replica == replica and isinstance(e.message, kind)
        ]

    def of(self, kind: type[_M]) -> list[_M]:
        return [e for e in self.effects if isinstance(e, kind)]

    def started(self, step: int = 0) -> Job:
        """All replicas train in epoch 1 and are at this step."""
        for replica in range(self.replicas):
            self.hello(replica)
        self.all_say(epoch=1, connected=1, step=step, serves=True)
        return self

    def restarted(self) -> Job:
        """The same job with a new coordinator that finds the newest ledger; nobody is connected."""
        return Job(
            self.replicas, self.least, self.stored[-1], self.now, [], dict(self.states), dict(self.attempts),
            dict(self.connections), list(self.stored),
        )  # fmt: skip


def installed(job: Job, replica: int) -> EpochRecord:
    (message,) = job.sent(replica, Install)
    return message.record


def stored(record: EpochRecord) -> EpochRecord:
    return record.with_addresses(lambda member: ())


def roles(record: EpochRecord) -> dict[int, Role]:
    return {m.replica: m.role for m in record.members}


# --- the start ------------------------------------------------------------------------------------------------------


def test_the_first_epoch_waits_for_all_replicas_and_makes_them_active() -> None:
    job = Job()
    for replica in (2, 0):
        job.hello(replica)
        assert job.sent(replica, Welcome)
        assert not job.of(Persist)
    job.hello(1)
    record = installed(job, 0)
    assert record.number == 1
    assert record.active == (0, 1, 2)
    assert record.wanted == 3
    assert record.outcome is not None
    assert record.outcome.step == 0
    assert [job.sent(r, Install) for r in (1, 2)] == [[Install(record=record)]] * 2


def test_the_first_epoch_is_persisted_before_anybody_hears_of_it() -> None:
    job = Job(replicas=1)
    job.hello(0)
    kinds = [type(e.message if isinstance(e, Send) else e) for e in job.effects]
    assert kinds.index(Persist) < kinds.index(Install)
    (persisted,) = job.of(Persist)
    assert persisted.expected == 0
    assert persisted.ledger.current == stored(installed(job, 0))


def test_a_ledger_of_a_hundred_thousand_ranks_is_small() -> None:
    job = Job(replicas=12)
    for replica in range(12):
        job.hello(replica, ranks=8192)
    assert len(job.stored[-1].encode()) < 4096
    assert len(installed(job, 0).members[11].addresses) == 8192


def test_after_the_start_timeout_the_least_number_of_replicas_is_enough() -> None:
    job = Job(replicas=3, least=2)
    job.hello(0)
    job.pass_time(61, 0)
    assert not job.stored
    job.hello(2)
    assert installed(job, 2).active == (0, 2)


@pytest.mark.parametrize(
    ("spares", "least", "come"),
    [
        pytest.param(0, 1, (1, 2), id="two are left"),
        pytest.param(1, 1, (1, 2, 3), id="a spare takes its place"),
        pytest.param(0, 3, (1, 2, 0), id="minReplicas cannot be reached without it"),
    ],
)
def test_a_run_that_begins_does_not_wait_for_a_replica_of_which_no_attempt_follows(
    spares: int, least: int, come: tuple[int, ...]
) -> None:
    job = Job(replicas=3, least=least, spares=spares)
    job.gives_up(0, attempt=4)
    assert job.core.abandoned == (0,)
    for replica in come:
        assert not job.stored
        job.hello(replica, attempt=5)
    assert {member.replica for member in job.stored[-1].current.members} == set(come)


def test_nor_does_one_that_begins_again_after_all_were_lost() -> None:
    job = Job(replicas=3)
    for replica in range(3):
        job.hello(replica)
    job.gives_up(2, attempt=0)
    job.dies(0)
    job.dies(1)
    before = len(job.stored)
    job.hello(0, attempt=1)
    assert len(job.stored) == before
    job.hello(1, attempt=1)
    assert installed(job, 1).active == (0, 1)


def test_a_replica_that_was_given_up_may_come_back_under_a_new_attempt_and_is_waited_for_again() -> None:
    job = Job(replicas=2)
    job.gives_up(1, attempt=0)
    job.hello(1, attempt=0)
    (refusal,) = job.sent(1, RefusedMember)
    assert "was taken out or replaced" in refusal.reason
    assert job.core.abandoned == (1,)
    job.hello(1, attempt=1)
    assert job.core.abandoned == ()
    assert not job.stored
    job.gives_up(1, attempt=0)  # said again, by somebody who is late
    assert job.core.abandoned == ()
    job.hello(0)
    assert installed(job, 0).active == (0, 1)


def test_the_start_is_told_with_the_step_and_whose_weights_were_replaced() -> None:
    job = Job()
    job.hello(0)
    job.hello(1, origin="b")
    job.hello(2)
    assert job.of(Started) == [Started(epoch=1, step=0, replicas=(0, 2), replaced=(1,))]
    assert installed(job, 1).snapshots == (1,)
    assert roles(installed(job, 1)) == {0: Role.ACTIVE, 1: Role.SHADOW, 2: Role.ACTIVE}


def test_the_first_epoch_waits_until_it_is_known_from_which_state_each_can_begin() -> None:
    job = Job()
    job.hello(0)
    job.hello(1, origin="")
    job.hello(2)
    assert not job.stored
    job.say(1, origin="c", checkpoint=50)
    record = installed(job, 0)
    assert record.outcome is not None
    assert record.outcome.step == 50
    assert record.active == (1,)
    assert record.snapshots == (0, 2)


def test_a_start_with_too_few_of_the_same_state_is_paused_until_the_others_have_it() -> None:
    job = Job(replicas=2, least=2)
    job.hello(0)
    job.hello(1, origin="b")
    assert installed(job, 0).paused
    job.say(0, epoch=1, step=0, serves=True)
    job.say(1, epoch=1, base=1)
    job.say(1, step=0, serves=True)
    job.all_say(fence=1)
    record = installed(job, 1)
    assert (record.paused, record.active) == (False, (0, 1))


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"replica": 3}, "replica 3 attempt 0 does not exist: this job has replicas 0…2"),
        ({"replica": -1}, "replica -1 attempt 0 does not exist"),
        ({"replica": 1, "attempt": 0}, "replica 1 attempt 0 was taken out or replaced"),
        ({"replica": 2, "port": 7}, "replica 2 attempt 0 is in use by another process"),
        ({"replica": 1, "attempt": 2, "ranks": 3}, "replica 1 attempt 2 has 3 ranks, but the other replicas have 2"),
        ({"replica": 1, "attempt": 2, "ranks": 0}, "replica 1 attempt 2 names no address"),
        ({"replica": 1, "attempt": 2, "epoch": 1}, "replica 1 attempt 2 is no member any more"),
        (
            {"replica": 1, "attempt": 2, "times": {"ring_connect_timeout": 60.0, "of another version": 1.0}},
            "replica 1 attempt 2 does not fit the coordinator: connect-timeout is 60 s: it must be longer than the"
            " ring's connect-timeout (60 s): a ring that does not connect says why",
        ),
        ({"replica": 1, "attempt": 2, "epoch": 9}, "replica 1 attempt 2 knows epoch 9, but the newest here is 1"),
    ],
)
def test_who_does_not_belong_is_refused_by_name_and_nobody_else_notices(hello: dict[str, Any], reason: str) -> None:
    job = Job()
    job.hello(0)
    job.hello(1, attempt=1)
    job.hello(2)
    job.all_say(epoch=1, step=0, serves=True)
    job.hello(**hello)
    (refusal,) = job.sent(hello["replica"], RefusedMember)
    assert refusal.reason.startswith(reason)
    assert job.of(Drop) == [Drop(connection=job.connections[hello["replica"]])]
    assert not job.of(Removed)
    assert not job.of(Fenced)


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_known_exit_fences_the_others_at_once() -> None:
    job = Job().started(step=5)
    job.dies(2)
    (removed,) = job.of(Removed)
    assert (removed.replica, removed.cause, removed.member) == (2, Cause.EXITED, True)
    assert job.sent(0, Break) == job.sent(1, Break) == [Break(epoch=1)]
    assert not job.of(Persist)


def test_a_step_that_nobody_has_is_retried_under_the_list_it_began_with() -> None:
    job = Job().started(step=5)
    begun = Assigned(step=6, replicas=(0, 1, 2))
    job.dies(2)
    job.say(0, fence=1, begun=begun)
    assert not job.of(Persist)
    job.say(1, fence=1, begun=begun)
    record = installed(job, 0)
    assert record.number == 2
    assert record.active == (0, 1)
    assert record.outcome is not None
    kept = begun.model_copy(update={"survivors": ((0, 1),)})
    assert (record.outcome.step, record.outcome.source, record.outcome.assigned) == (5, None, kept)


def test_a_step_that_somebody_has_is_rolled_forward_from_there() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.say(0, fence=1)
    job.say(1, fence=1, step=6)
    outcome = installed(job, 0).outcome
    assert outcome is not None
    assert (outcome.step, outcome.source) == (6, 1)


def test_a_second_failure_in_a_gather_needs_no_second_fence() -> None:
    job = Job(replicas=4).started(step=5)
    job.dies(3)
    job.say(0, fence=1)
    job.say(1, fence=1)
    job.dies(2)
    assert installed(job, 0).active == (0, 1)
    assert not job.of(Fenced)


def test_a_failure_while_a_decision_is_installed_makes_the_next_one() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1)
    job.dies(1)
    assert job.sent(0, Break) == [Break(epoch=2)]
    job.say(0, fence=2)
    assert installed(job, 0).number == 3


def test_a_ring_that_breaks_between_healthy_replicas_costs_nobody_its_place() -> None:
    job = Job().started(step=5)
    job.say(0, broken=1, suspects=(1,), reason="connection reset by replica 1")
    assert "connection reset by replica 1" in job.of(Fenced)[0].reason
    job.all_say(fence=1)
    assert installed(job, 0).active == (0, 1, 2)
    assert not job.of(Removed)


def test_a_new_ring_that_cannot_be_connected_is_broken_before_anybody_entered_it() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1)
    job.say(0, broken=2, reason="replica 1 did not answer")
    assert job.sent(1, Break) == [Break(epoch=2)]


def test_a_break_of_an_older_epoch_is_no_news() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1, broken=1)
    job.all_say(0, 1, epoch=2)
    assert not job.of(Fenced)


def test_a_member_that_reconnects_within_the_grace_loses_nothing() -> None:
    job = Job().started()
    job.cut(1)
    job.pass_time(0.5, 0, 2)
    job.hello(1)
    job.pass_time(3, 0, 1, 2)
    assert not job.of(Removed)
    assert not job.of(Fenced)


def test_a_closed_connection_is_evidence_after_the_grace() -> None:
    job = Job().started()
    job.cut(1)
    job.pass_time(1, 0, 2)
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(1, Cause.CONNECTION_LOST)]


@pytest.mark.parametrize("order", ["connection first", "ring first"])
def test_a_closed_connection_and_a_ring_neighbour_are_evidence_at_once(order: str) -> None:
    job = Job().started()
    ring = {"broken": 1, "suspects": (1,), "reason": "closed"}
    first, then = (job.cut(1), job.say(2, **ring)) if order == "connection first" else (job.say(2, **ring), job.cut(1))
    effects = [*first, *then]
    assert [e.cause for e in effects if isinstance(e, Removed)] == [Cause.CONNECTION_LOST]


def test_a_silent_member_is_taken_out_and_told_why() -> None:
    job = Job().started()
    job.pass_time(5, 0, 2)
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(1, Cause.SILENT)]
    assert "Silent" in job.sent(1, RefusedMember)[0].reason


def test_a_coordinator_that_stood_still_blames_nobody() -> None:
    job = Job().started()
    job.now += 30
    job.do(Tick())
    assert not job.of(Removed)
    job.pass_time(4, 0, 1, 2)
    assert not job.of(Removed)


def test_a_member_that_talks_but_does_not_answer_a_fence_is_taken_out_in_the_end() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.say(0, fence=1)
    job.pass_time(10, 0, 1)
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(1, Cause.HUNG)]
    assert installed(job, 0).active == (0,)


@pytest.mark.parametrize(
    ("failed", "cause"),
    [
        ("StateDiverged: rank 1 has another digest after step 5", Cause.STATE_DIVERGED),
        ("Frozen: rank 3 gave no sign of life for 5 s", Cause.FROZEN),
        ("out of step with the others", Cause.FAILED),
    ],
)
def test_who_says_that_it_has_failed_is_taken_out_at_once_with_its_own_words(failed: str, cause: Cause) -> None:
    job = Job().started(step=5)
    job.say(1, failed=failed)
    assert [(r.replica, r.cause, r.reason) for r in job.of(Removed)] == [(1, cause, failed)]
    assert job.sent(0, Break) == job.sent(2, Break) == [Break(epoch=1)]
    assert [(v.replica, v.cause) for v in job.core.verdicts] == [(1, cause)]
    assert failed in job.sent(1, RefusedMember)[0].reason
    job.all_say(0, 2, fence=1)
    assert installed(job, 0).active == (0, 2)


def test_a_failure_that_was_told_needs_no_grace_and_a_newcomer_can_tell_one_too() -> None:
    job = joining()
    job.cut(2)
    job.hello(2, attempt=1, failed="StateDiverged: the stripes do not fit")
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(2, Cause.STATE_DIVERGED)]
    assert job.of(Withdrawn)
    assert not job.of(Fenced)


def test_a_newer_attempt_replaces_the_older_one_and_joins_later() -> None:
    job = Job().started(step=5)
    job.hello(1, attempt=1)
    assert [(r.replica, r.attempt, r.cause) for r in job.of(Removed)] == [(1, 0, Cause.REPLACED)]
    job.all_say(0, 2, fence=1)
    assert installed(job, 0).active == (0, 2)
    job.all_say(0, 2, epoch=2)
    (announced,) = job.sent(1, Announce)
    assert roles(announced.record) == {0: Role.ACTIVE, 1: Role.SHADOW, 2: Role.ACTIVE}


def test_an_exit_reported_before_its_attempt_says_hello_turns_it_away() -> None:
    job = Job().started()
    job.do(Exited(replica=1, attempt=4, reason="evicted", detected=job.now))
    job.hello(1, attempt=4)
    assert job.sent(1, RefusedMember)


def test_the_thawed_one_is_refused() -> None:
    job = Job().started(step=5)
    job.pass_time(5, 0, 2)
    job.all_say(0, 2, fence=1)
    job.hello(1, epoch=1, step=5, serves=True)
    assert "was taken out" in job.sent(1, RefusedMember)[0].reason


def test_when_everybody_is_gone_the_run_starts_again_under_a_higher_number() -> None:
    job = Job().started(step=5)
    for replica in range(3):
        job.dies(replica)
    assert job.of(Decided) == [Decided(record=None)]
    for replica in range(3):
        job.hello(replica, attempt=1)
    record = installed(job, 0)
    assert record.number > 1
    assert record.outcome is not None
    assert record.outcome.step == 0
    assert record.active == (0, 1, 2)
    assert job.of(Started) == [Started(epoch=record.number, step=0, replicas=(0, 1, 2), replaced=())]


def test_when_everybody_is_gone_the_run_starts_again_from_the_newest_checkpoint() -> None:
    job = Job().started(step=57)
    for replica in range(3):
        job.dies(replica)
    job.hello(0, attempt=1, origin="c", checkpoint=50)
    job.hello(1, attempt=1, origin="b", checkpoint=40)
    job.hello(2, attempt=1, origin="c", checkpoint=50)
    (start,) = job.of(Started)
    assert (start.step, start.replicas, start.replaced) == (50, (0, 2), (1,))
    job.say(0, epoch=start.epoch, step=50)
    job.say(2, epoch=start.epoch, step=50)
    job.dies(2)
    job.say(0, fence=start.epoch)
    job.say(1, fence=start.epoch)
    outcome = installed(job, 0).outcome
    assert outcome is not None
    assert (outcome.step, outcome.serving) == (50, False)
    assert installed(job, 0).snapshots == (1,)


def test_who_waited_while_everything_was_lost_has_the_time_to_see_the_newest_checkpoint() -> None:
    job = Job(replicas=1, spares=1).started(step=57)
    job.hello(1, origin="b", checkpoint=40)
    job.pass_time(1, 0, 1)
    job.dies(0)
    assert job.of(Decided) == [Decided(record=None)]
    job.cut(1)
    job.hello(1)
    job.pass_time(5, 1)
    assert not job.of(Started)
    job.say(1, origin="c", checkpoint=50)
    effects = job.pass_time(6, 1)
    assert [e.step for e in effects if isinstance(e, Started)] == [50]


def test_a_verdict_names_who_is_silent_but_not_who_is_known_to_be_gone() -> None:
    job = Job().started(step=5)
    job.dies(0)
    job.pass_time(6, 1)
    assert [(v.replica, v.attempt, v.cause) for v in job.core.verdicts] == [(2, 0, Cause.SILENT)]


def test_who_has_not_yet_entered_the_first_epoch_survives_the_death_of_another() -> None:
    job = Job()
    for replica in range(3):
        job.hello(replica)
    job.dies(0)
    job.all_say(1, 2, fence=1)
    assert job.of(Decided) == [Decided(record=None)]
    assert job.of(Removed) == []
    job.hello(0, attempt=1)
    assert installed(job, 1).number == 2
    assert installed(job, 1).active == (0, 1, 2)


def test_a_shadow_left_without_anybody_to_catch_up_from_has_to_start_again() -> None:
    job = joining()
    begin(job)
    for replica in (0, 1):
        job.dies(replica)
    job.say(2, fence=3)
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(2, Cause.ORPHANED)]
    assert job.sent(2, RefusedMember)


# --- planned changes ------------------------------------------------------------------------------------------------


def joining() -> Job:
    """Replica 2 of three has died, and its next attempt is announced in epoch 3."""
    job = Job().started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1)
    job.all_say(0, 1, epoch=2, connected=2)
    job.hello(2, attempt=1)
    return job


def begin(job: Job) -> None:
    """The announced epoch 3 begins."""
    job.all_say(0, 1, 2, connected=3)
    job.all_say(0, 1, epoch=3, step=8)
    job.say(2, epoch=3, base=3)


def test_a_join_is_announced_then_connected_then_begun() -> None:
    job = joining()
    assert job.of(Proposed)
    record = job.sent(0, Announce)[0].record
    assert (record.number, record.outcome, record.snapshots) == (3, None, (2,))
    assert roles(record) == {0: Role.ACTIVE, 1: Role.ACTIVE, 2: Role.SHADOW}
    job.all_say(0, 1, connected=3)
    assert not job.sent(0, Go)
    job.say(2, connected=3)
    assert [job.sent(r, Go) for r in range(3)] == [[Go(epoch=3)]] * 3
    job.all_say(0, 1, epoch=3)
    job.say(2, epoch=3, base=3)
    assert job.core.epoch == 3


def test_a_ready_shadow_becomes_active() -> None:
    job = joining()
    begin(job)
    job.say(2, step=9)
    record = job.sent(0, Announce)[0].record
    assert roles(record) == dict.fromkeys(range(3), Role.ACTIVE)
    assert record.snapshots == ()


def test_a_joiner_holds_up_nobody_while_it_is_still_being_built() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1)
    job.all_say(0, 1, epoch=2, connected=2)
    job.hello(2, attempt=1, origin="")
    assert not job.of(Proposed)
    job.say(2, origin="a")
    assert job.of(Proposed)


def test_one_proposal_at_a_time_and_what_comes_meanwhile_is_batched_into_the_next() -> None:
    job = Job(replicas=5, least=1).started(step=5)
    for replica in (2, 3, 4):
        job.dies(replica)
    job.all_say(0, 1, fence=1)
    job.all_say(0, 1, epoch=2)
    job.hello(2, attempt=1)
    job.hello(3, attempt=1)
    assert not job.of(Proposed)
    job.hello(4, attempt=1)
    job.all_say(0, 1, 2, connected=3)
    job.all_say(0, 1, 2, epoch=3, base=3)
    assert job.sent(0, Announce)[0].record.snapshots == (3, 4)


def test_a_joiner_that_dies_before_the_go_costs_nobody_anything() -> None:
    job = joining()
    job.dies(2)
    assert [w.epoch for w in job.of(Withdrawn)] == [3]
    assert not job.of(Fenced)
    job.hello(2, attempt=2)
    assert job.sent(0, Announce)[0].record.number == 4


def test_a_joiner_that_dies_after_the_go_breaks_with_the_highest_number() -> None:
    job = joining()
    job.all_say(0, 1, 2, connected=3)
    job.dies(2)
    assert job.sent(0, Break) == [Break(epoch=3)]
    job.all_say(0, 1, fence=3)
    assert installed(job, 0).number == 4
    assert installed(job, 0).active == (0, 1)


def test_a_survivor_that_dies_during_a_join_leaves_the_joiner_in_the_next_epoch() -> None:
    job = joining()
    job.all_say(0, 1, 2, connected=3)
    job.say(0, epoch=3, step=8)
    job.dies(1)
    job.say(0, fence=3)
    job.say(2, fence=3)
    record = installed(job, 0)
    assert roles(record) == {0: Role.ACTIVE, 2: Role.SHADOW}
    assert record.snapshots == (2,)


def test_a_failure_before_the_go_drops_the_proposal_and_does_not_wait_for_the_joiner() -> None:
    job = joining()
    job.dies(1)
    assert [w.epoch for w in job.of(Withdrawn)] == [3]
    assert not job.sent(2, Break)
    job.say(0, fence=3)
    assert installed(job, 0).number == 4


def test_a_proposal_whose_rings_do_not_connect_is_tried_again_later_under_a_new_number() -> None:
    job = joining()
    job.say(0, broken=3, suspects=(2,), reason="replica 2 did not answer")
    assert [w.epoch for w in job.of(Withdrawn)] == [3]
    assert not job.of(Fenced)
    job.pass_time(1.5, 0, 1, 2)
    assert [p.record.number for p in job.of(Proposed)] == [4]


def test_a_joiner_that_never_connects_is_taken_out_in_the_end() -> None:
    job = joining()
    job.all_say(0, 1, connected=3)
    job.pass_time(60, 0, 1, 2)
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(2, Cause.HUNG)]
    assert not job.of(Fenced)


def test_a_shadow_steps_in_at_the_decision_that_removes_an_active() -> None:
    job = joining()
    begin(job)
    job.say(2, step=8)
    job.dies(1)
    job.say(0, fence=4)
    job.say(2, fence=4)
    assert installed(job, 0).active == (0, 2)


def test_leaving_is_planned_and_nobody_is_fenced() -> None:
    job = Job().started(step=5)
    job.say(1, leaving="SIGTERM")
    record = job.sent(0, Announce)[0].record
    assert record.active == (0, 2)
    assert job.sent(1, Announce)
    job.all_say(0, 2, connected=2)
    assert job.sent(1, Go)
    job.cut(1)
    job.all_say(0, 2, epoch=2, step=6)
    assert [(e.replica, e.reason) for e in job.of(Left)] == [(1, "SIGTERM")]
    job.pass_time(3, 0, 2)
    assert not job.of(Removed)
    assert not job.of(Fenced)


def test_a_removal_has_new_stripes_taken_for_shadows_that_still_catch_up() -> None:
    job = joining()
    begin(job)
    job.say(1, leaving="SIGTERM")
    assert job.sent(0, Announce)[0].record.snapshots == (2,)


def test_a_shadow_that_lost_its_base_gets_a_new_one() -> None:
    job = joining()
    begin(job)
    job.say(2, base=0)
    assert not job.of(Proposed)
    job.pass_time(6, 0, 1, 2)
    assert [p.record.snapshots for p in job.of(Proposed)] == [(2,)]


def test_a_newcomer_that_is_told_to_stop_may_go() -> None:
    job = joining()
    job.dies(2)
    job.hello(2, attempt=2, leaving="SIGTERM")
    assert job.sent(2, Bye)
    assert not job.of(Proposed)


def test_when_all_leave_all_may_go() -> None:
    job = Job(replicas=2).started(step=5)
    job.say(0, leaving="suspended")
    job.say(1, leaving="suspended")
    # One of them asked first; the other one follows when that is done.
    job.say(1, connected=2)
    job.cut(0)
    job.say(1, epoch=2)
    record = job.sent(1, Announce)[0].record
    assert record.members == ()
    assert job.sent(1, Go)
    job.cut(1)
    job.pass_time(1.5)
    assert [e.replica for e in job.of(Left)] == [1]


# --- spares ---------------------------------------------------------------------------------------------------------


def with_spare() -> Job:
    """Three replicas train in epoch 3 at step 8; replica 3 is a spare that has caught up."""
    job = Job(spares=1, least=3).started(step=5)
    job.hello(3)
    job.all_say(connected=2)
    job.all_say(0, 1, 2, epoch=2, step=7)
    job.say(3, epoch=2, base=2)
    job.all_say(0, 1, 2, step=8)
    job.say(3, step=8, serves=True)
    return job


def test_a_spare_comes_in_as_a_shadow_and_stays_one_while_all_are_there() -> None:
    job = with_spare()
    assert not job.of(Proposed)
    job.pass_time(10, 0, 1, 2, 3)
    assert not job.effects
    status = {r.replica: (r.role, r.step) for r in job.core.replicas()}
    assert status[3] == (Role.SHADOW, 8)


def test_an_index_beyond_the_spares_is_refused() -> None:
    job = with_spare()
    job.hello(4)
    assert "does not exist: this job has replicas 0…3, spares included" in job.sent(4, RefusedMember)[0].reason


def test_a_spare_is_active_at_the_decision_that_removes_another_and_the_job_does_not_pause() -> None:
    job = with_spare()
    job.dies(1)
    job.all_say(0, 2, 3, fence=2)
    record = installed(job, 3)
    assert (record.active, record.paused) == ((0, 2, 3), False)
    assert job.of(Decided) == [Decided(record=record, stepped_in=(3,))]


def test_who_comes_back_after_a_spare_stepped_in_is_the_spare() -> None:
    job = with_spare()
    job.dies(1)
    job.all_say(0, 2, 3, fence=2)
    job.all_say(0, 2, 3, epoch=3)
    job.hello(1, attempt=1)
    job.all_say(connected=4)
    job.all_say(0, 2, 3, epoch=4)
    job.say(1, epoch=4, base=4)
    job.say(1, step=9, serves=True)
    assert not job.of(Proposed)
    job.dies(3)
    job.all_say(0, 1, 2, fence=4)
    assert installed(job, 1).active == (0, 1, 2)


def test_a_spare_that_still_catches_up_does_not_step_in_and_the_pause_counts_actives_only() -> None:
    job = with_spare()
    job.say(3, step=None, serves=False)
    job.dies(1)
    job.all_say(0, 2, 3, fence=2)
    record = installed(job, 3)
    assert (record.active, record.paused) == ((0, 2), True)
    job.all_say(0, 2, 3, epoch=3)
    job.say(3, step=8)
    job.all_say(0, 2, 3, fence=3)
    assert (installed(job, 3).active, installed(job, 3).paused) == ((0, 2, 3), False)


def test_a_spare_takes_the_place_of_one_who_leaves_at_the_same_boundary() -> None:
    job = with_spare()
    job.say(1, leaving="SIGTERM")
    assert job.sent(0, Announce)[0].record.active == (0, 2, 3)


def test_a_spare_that_dies_disturbs_the_ring_but_not_the_width() -> None:
    job = with_spare()
    job.dies(3)
    job.all_say(0, 1, 2, fence=2)
    assert (installed(job, 0).active, installed(job, 0).paused) == ((0, 1, 2), False)


def test_as_many_as_are_wanted_start_without_waiting_for_the_spares() -> None:
    job = Job(spares=1)
    for replica in (3, 0, 2):
        job.hello(replica)
    assert installed(job, 0).active == (0, 2, 3)


# --- hangs ----------------------------------------------------------------------------------------------------------


def stalled() -> Job:
    """Three replicas of two ranks, asked after 300 s without the end of step 6."""
    job = Job().started(step=5)
    job.pass_time(299, 0, 1, 2)
    assert not job.effects
    job.now += 1
    job.do(Tick())
    assert [job.sent(r, Probe) for r in range(3)] == [[Probe(number=1)]] * 3
    return job


def reports(phase: Phase, *, epoch: int = 1) -> dict[str, Any]:
    """An answer to the first probe, or with epoch 2 to the second one."""
    both = [RankReport(rank=w, epoch=epoch, step=6, phase=phase, seconds=290) for w in range(2)]
    return {"probe": epoch, "ranks": tuple(both)}


def test_a_replica_that_never_joined_the_step_is_taken_out_and_the_others_go_on() -> None:
    job = stalled()
    job.all_say(0, 2, **reports(Phase.COLLECTIVE))
    assert not job.effects
    job.say(1, **reports(Phase.BODY))
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(1, Cause.HUNG)]
    assert "replica 1 rank 0 (and 1 more of its ranks) never joined" in job.of(Removed)[0].reason
    assert [v.reason for v in job.core.verdicts] == [job.of(Removed)[0].reason]
    job.all_say(0, 2, fence=1)
    assert installed(job, 0).active == (0, 2)


def test_a_long_step_is_only_spoken_of() -> None:
    job = stalled()
    job.all_say(0, 1, 2, **reports(Phase.BODY))
    (stall,) = job.of(Stalled)
    assert (stall.step, stall.reason.count("2 in body of step 6")) == (6, 3)
    assert not job.of(Removed)
    assert not job.of(Fenced)
    job.pass_time(149, 0, 1, 2)
    assert not job.effects
    job.pass_time(1, 0, 1, 2)
    assert job.sent(1, Probe) == [Probe(number=2)]


def test_leaders_that_do_not_know_of_probes_lose_nothing() -> None:
    job = stalled()
    job.pass_time(10, 0, 1, 2)
    assert job.of(Stalled)
    assert not job.of(Removed)


def test_one_that_does_not_answer_though_the_others_do_is_taken_out() -> None:
    job = stalled()
    job.all_say(0, 2, **reports(Phase.COLLECTIVE))
    job.pass_time(10, 0, 1, 2)
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(1, Cause.HUNG)]


def test_when_all_have_joined_new_rings_are_made_and_who_does_not_move_then_is_to_blame() -> None:
    job = stalled()
    job.all_say(0, 1, 2, **reports(Phase.COLLECTIVE))
    assert "step 6 does not end though everybody has joined it" in job.of(Fenced)[0].reason
    job.all_say(0, 1, 2, fence=1)
    assert installed(job, 0).active == (0, 1, 2)
    job.all_say(0, 1, 2, epoch=2)
    job.pass_time(300, 0, 1, 2)
    assert job.sent(0, Probe) == [Probe(number=2)]
    job.all_say(0, 1, **reports(Phase.COLLECTIVE, epoch=2))
    job.say(2, **reports(Phase.COLLECTIVE) | {"probe": 2})
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(2, Cause.HUNG)]
    assert "did not move: it still waits in epoch 1" in job.of(Removed)[0].reason


def test_a_probe_is_said_again_after_a_reconnection_and_not_once_it_is_answered() -> None:
    job = stalled()
    job.say(0, **reports(Phase.BODY))
    job.cut(0)
    job.hello(0)
    assert not job.sent(0, Probe)
    job.cut(1)
    job.hello(1)
    assert job.sent(1, Probe) == [Probe(number=1)]


def test_a_coordinator_that_stood_still_for_longer_than_a_stall_asks_nobody() -> None:
    job = Job().started(step=5)
    job.now += 400
    job.do(Tick())
    job.pass_time(299, 0, 1, 2)
    assert not job.effects


def test_a_paused_job_is_not_probed_however_long_it_waits() -> None:
    job = paused()
    job.pass_time(700, 0)
    assert not job.effects


def test_a_member_that_never_enters_a_paused_epoch_does_not_keep_the_newcomers_out_for_ever() -> None:
    job = Job(replicas=3, least=3).started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1)
    job.say(0, epoch=2)
    job.hello(2, attempt=1)
    assert not job.of(Fenced)
    job.pass_time(300, 0, 1, 2)
    job.say(0, **reports(Phase.WAITING))
    job.say(1, **reports(Phase.BODY))
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(1, Cause.HUNG)]
    job.all_say(0, 2, fence=2)
    assert [m.replica for m in installed(job, 2).members] == [0, 2]


# --- pause ----------------------------------------------------------------------------------------------------------


def paused() -> Job:
    """Two replicas are the least; one of them has died, and the other one has settled at step 5."""
    job = Job(replicas=2, least=2).started(step=5)
    job.dies(1)
    job.say(0, fence=1)
    assert installed(job, 0).paused
    job.say(0, epoch=2)
    return job


def test_a_paused_job_takes_a_joiner_in_by_a_decision_and_goes_on_when_it_is_ready() -> None:
    job = paused()
    job.hello(1, attempt=1)
    assert job.sent(0, Break) == job.sent(1, Break) == [Break(epoch=2)]
    job.all_say(0, 1, fence=2)
    record = installed(job, 1)
    assert (record.paused, record.snapshots, roles(record)[1]) == (True, (1,), Role.SHADOW)
    job.say(0, epoch=3)
    job.say(1, epoch=3, base=3)
    assert not job.of(Fenced)
    job.say(1, step=5)
    job.all_say(0, 1, fence=3)
    record = installed(job, 0)
    assert (record.paused, record.active) == (False, (0, 1))


def test_a_paused_job_waits_as_long_as_it_takes() -> None:
    job = paused()
    job.pass_time(600, 0)
    assert not job.effects


def test_who_leaves_a_paused_job_is_let_go_by_a_decision() -> None:
    job = Job(replicas=3, least=3).started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1)
    job.all_say(0, 1, epoch=2)
    job.say(1, leaving="SIGTERM")
    job.all_say(0, 1, fence=2)
    assert job.sent(1, Bye)
    assert installed(job, 0).active == (0,)


# --- the end --------------------------------------------------------------------------------------------------------


def test_when_one_has_finished_the_others_are_told_and_then_all_are_dismissed() -> None:
    job = Job().started(step=9)
    job.say(1, finished=8)
    assert job.sent(0, Close) == job.sent(2, Close) == [Close(step=8)]
    assert not job.sent(1, Close)
    job.say(0, finished=8)
    job.say(2, finished=8)
    assert job.of(Finished) == [Finished(step=8)]
    assert [job.sent(r, Bye) for r in range(3)] == [[Bye()]] * 3
    assert job.core.finished


def test_a_replica_that_dies_at_the_end_does_not_hold_up_the_others() -> None:
    job = Job().started(step=9)
    job.say(1, finished=8)
    job.say(0, finished=8)
    job.dies(2)
    assert job.core.finished
    assert not job.of(Fenced)


def test_a_newcomer_whose_epoch_began_with_the_last_step_is_dismissed_with_the_others() -> None:
    job = joining()
    job.all_say(0, 1, 2, connected=3)
    job.say(2, epoch=3, base=3)
    job.say(0, epoch=3, step=9, finished=8)
    job.cut(2)
    job.hello(2, attempt=1)
    assert not job.sent(2, RefusedMember)
    assert job.sent(2, Close) == [Close(step=8)]
    job.say(1, finished=8)
    assert not job.core.finished
    job.say(2, finished=8)
    assert job.core.finished
    assert not job.of(Removed)


def test_nothing_is_decided_any_more_once_somebody_has_finished() -> None:
    job = Job().started(step=9)
    job.dies(2)
    job.say(1, fence=1)
    job.say(0, finished=8)
    assert not job.of(Persist)
    job.say(1, finished=8)
    assert job.core.finished


# --- restarts of the coordinator ------------------------------------------------------------------------------------


def test_a_restarted_coordinator_disturbs_nobody_who_comes_back() -> None:
    job = Job().started(step=5).restarted()
    for replica in range(3):
        job.hello(replica)
        assert not job.sent(replica, Install)
    job.pass_time(10, 0, 1, 2)
    assert not job.of(Fenced)
    assert job.core.epoch == 1


def test_members_who_looked_for_a_replaced_coordinator_at_its_old_address_are_not_taken_out() -> None:
    job = Job().started(step=5).restarted()
    job.pass_time(20)
    for replica in range(3):
        job.hello(replica)
    job.pass_time(20, 0, 1, 2)
    assert not job.of(Removed)
    assert job.core.epoch == 1


def test_a_restarted_coordinator_fences_when_somebody_does_not_come_back() -> None:
    job = Job().started(step=5).restarted()
    job.hello(0)
    job.hello(1)
    job.pass_time(29, 0, 1)
    assert not job.of(Removed)
    job.pass_time(1, 0, 1)
    assert [(r.replica, r.cause) for r in job.of(Removed)] == [(2, Cause.CONNECTION_LOST)]
    job.all_say(0, 1, fence=1)
    assert installed(job, 0).number == 2


def test_a_coordinator_that_died_between_persisting_and_sending_sends_after_its_restart() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1)
    job = job.restarted()
    job.hello(0)
    assert not job.sent(0, Install)  # where replica 1 is, only replica 1 can say
    job.hello(1)
    for replica in range(2):
        assert stored(installed(job, replica)) == job.stored[-1].current
        assert all(member.addresses for member in installed(job, replica).members)


def test_a_start_that_no_coordinator_lived_to_tell_is_told_by_the_next_one() -> None:
    job = Job()
    for replica in range(3):
        job.hello(replica)
    (start,) = job.of(Started)
    job = job.restarted()
    for replica in range(3):
        assert not job.of(Started)
        job.hello(replica)
    assert job.of(Started) == [start]
    told = [n for n, e in enumerate(job.effects) if isinstance(e, Send) and isinstance(e.message, Install)]
    assert job.effects.index(start) < min(told)


@pytest.mark.parametrize("entered", [(0,), (0, 1, 2)])
def test_a_start_that_somebody_has_heard_of_is_not_told_again(entered: tuple[int, ...]) -> None:
    job = Job()
    for replica in range(3):
        job.hello(replica)
    job.all_say(*entered, epoch=1, connected=1)
    job = job.restarted()
    for replica in range(3):
        job.hello(replica)
        assert not job.of(Started)


def test_who_does_not_come_back_to_a_new_coordinator_does_not_keep_the_others_waiting() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.all_say(0, 1, fence=1)
    job = job.restarted()
    job.hello(0)
    job.pass_time(30, 0)
    job.say(0, fence=2)
    assert installed(job, 0).active == (0,)


def test_another_process_of_the_same_name_is_turned_away_by_a_new_coordinator_too() -> None:
    job = Job().started(step=5).restarted()
    job.hello(1, port=9)
    (refused,) = job.sent(1, RefusedMember)
    assert "is in use by another process" in refused.reason
    job.hello(1)
    assert job.sent(1, Welcome)


def test_a_newcomer_of_another_size_that_comes_first_to_a_new_coordinator_is_turned_away_and_not_the_members() -> None:
    job = Job().started(step=5).restarted()
    job.hello(2, attempt=1, ranks=3)
    (refused,) = job.sent(2, RefusedMember)
    assert refused.reason.endswith("has 3 ranks, but the other replicas have 2")
    for replica in range(2):
        job.hello(replica)
        assert job.sent(replica, Welcome)


def test_a_ledger_with_addresses_and_without_fingerprints_tells_processes_apart_too() -> None:
    job = Job().started(step=5)
    record = job.stored[-1].current.with_addresses(lambda m: tuple(f"10.0.{m.replica}.0:{port}" for port in (1, 2)))
    job.stored.append(Ledger.decode(f'{{"current": {record.model_dump_json()}}}', origin="a test"))
    job = job.restarted()
    job.hello(1, port=9)
    assert job.sent(1, RefusedMember)
    for replica in range(3):
        job.hello(replica)
        assert job.sent(replica, Welcome)


def test_a_neighbours_suspicion_does_not_take_out_who_has_not_yet_reconnected() -> None:
    job = Job().started(step=5).restarted()
    job.hello(0, epoch=1, step=5, serves=True, broken=1, suspects=(1,), reason="closed")
    assert not job.of(Removed)
    job.hello(1)
    job.hello(2)
    job.all_say(fence=1)
    assert installed(job, 1).active == (0, 1, 2)


def test_a_proposal_of_an_earlier_coordinator_is_finished_when_all_are_there() -> None:
    job = joining().restarted()
    for replica in range(3):
        assert not job.of(Send)[1:]
        job.hello(replica, job.attempts[replica])
    for replica in range(3):
        assert job.sent(replica, Announce)
    job.all_say(0, 1, 2, connected=3)
    assert job.sent(0, Go)
    job.all_say(0, 1, 2, epoch=3, base=3)
    assert job.core.epoch == 3


@pytest.mark.parametrize(("entered", "active"), [(True, (0, 1, 2)), (False, (0, 1))])
def test_a_proposal_of_an_earlier_coordinator_is_void_unless_somebody_entered_it(
    entered: bool, active: tuple[int, ...]
) -> None:
    """Epoch 4 makes replica 2 active. Replica 3 dies; its next attempt is not yet there."""
    job = Job(replicas=4).started(step=5)
    job.dies(2)
    job.all_say(0, 1, 3, fence=1)
    job.all_say(0, 1, 3, epoch=2)
    job.hello(2, attempt=1)
    job.all_say(0, 1, 2, 3, connected=3)
    job.all_say(0, 1, 3, epoch=3, step=8)
    job.say(2, epoch=3, base=3)
    job.say(2, step=8)
    assert job.stored[-1].proposal is not None
    assert job.stored[-1].proposal.active == (0, 1, 2, 3)
    job = job.restarted()
    for replica in (0, 1, 2):
        job.hello(replica, job.attempts[replica])
    if entered:
        job.say(0, epoch=4, step=9)
        job.say(2, epoch=4, step=9, serves=True)
    else:
        job.say(2, step=None)
    job.dies(3)
    job.all_say(0, 1, 2, fence=4)
    assert installed(job, 0).number == 5
    assert installed(job, 0).active == active


def test_a_number_of_a_withdrawn_proposal_is_not_used_again_after_a_restart() -> None:
    job = joining()
    job.dies(2)
    job = job.restarted()
    job.hello(0)
    job.hello(1)
    job.pass_time(30, 0, 1)
    job.all_say(0, 1, fence=3)
    assert installed(job, 0).number == 4


def test_a_restarted_coordinator_of_a_finished_run_dismisses_those_who_are_left() -> None:
    job = Job().started(step=9)
    job.all_say(0, 1, finished=8)
    job = job.restarted()
    job.hello(0)
    assert not job.of(Finished)
    job.hello(2, epoch=1, step=9, finished=8)
    job.pass_time(5, 0, 2)
    assert job.of(Finished)
    assert not job.of(Removed)


def test_messages_are_said_once_per_connection_and_again_after_a_reconnection() -> None:
    job = Job().started(step=5)
    job.dies(2)
    job.say(0)
    assert not job.sent(0, Break)
    job.cut(0)
    job.hello(0)
    assert job.sent(0, Break) == [Break(epoch=1)]
    message: FromCoordinator = job.sent(0, Break)[0]
    assert message.kind == "break"
