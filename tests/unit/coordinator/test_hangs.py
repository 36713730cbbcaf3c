"""Who holds up a step: what the answers to a probe show, and when one is sent."""

from __future__ import annotations

import pytest

from fthsdp.coordinator.hangs import Diagnosis, HangWatch, diagnose
from fthsdp.coordinator.messages import Assigned, EpochRecord, Member, MemberState, Outcome, Phase, RankReport, Role

BODY, COLLECTIVE, VOTE, UPDATE = Phase.BODY, Phase.COLLECTIVE, Phase.VOTE, Phase.UPDATE
WAITING, UNKNOWN = Phase.WAITING, Phase.UNKNOWN
STACK = """
  File "/job/train.py", line 7, in <module>
    main()
  File "/job/data.py", line 33, in load
    read(socket)
"""
LONG, SHORT = 290.0, 20.0


def ranks(*phases: Phase, step: int = 7, epoch: int = 4, seconds: float = LONG) -> tuple[RankReport, ...]:
    return tuple(
        RankReport(rank=w, epoch=epoch, step=step, phase=p, seconds=seconds, stack=STACK if p is BODY else "")
        for w, p in enumerate(phases)
    )


def answer(*phases: Phase, began: tuple[int, ...] = (0, 1, 2), probe: int = 1, **where: float) -> MemberState:
    begun = Assigned(step=7, replicas=began)
    return MemberState(epoch=4, step=6, serves=True, begun=begun, probe=probe, ranks=ranks(*phases, **where))  # type: ignore[arg-type]


def in_a_collective(state: MemberState, *, rank: int) -> MemberState:
    """Let this rank wait for the others of its replica, in the middle of its forward."""
    stack = '  File "/lib/torch/distributed/distributed_c10d.py", line 3, in all_gather\n    work.wait()\n'
    ranks = tuple(r.model_copy(update={"stack": stack}) if r.rank == rank else r for r in state.ranks)
    return state.model_copy(update={"ranks": ranks})


def judge(
    states: dict[int, MemberState], *, shadows: tuple[int, ...] = (), planned: bool = False, newcomer: int | None = None
) -> Diagnosis:
    members = {
        r: Member(
            replica=r, attempt=0, role=Role.SHADOW if r in shadows else Role.ACTIVE, addresses=(f"h{r}:1", f"h{r}:2")
        )
        for r in states
    }
    inside = tuple(m for m in members.values() if m.replica != newcomer)
    record = EpochRecord(number=4, members=inside, outcome=None if planned else Outcome(step=5))
    return diagnose(states, members=members, record=record, probe=1, patience=150.0)


JOINED = answer(COLLECTIVE, COLLECTIVE)


@pytest.mark.parametrize(
    ("odd", "evidence"),
    [
        pytest.param(
            answer(VOTE, BODY),
            "replica 1 rank 1 never joined the collective of step 7: it has been in the body for 290 s,"
            ' at File "/job/data.py", line 33, in load / read(socket)',
            id="a rank in the body",
        ),
        pytest.param(
            answer(BODY, BODY),
            "replica 1 rank 0 (and 1 more of its ranks) never joined the collective of step 7: it has been in the body"
            ' for 290 s, at File "/job/data.py", line 33, in load / read(socket)',
            id="all its ranks",
        ),
        pytest.param(
            in_a_collective(answer(BODY, BODY), rank=0),
            "replica 1 rank 1 (and 1 more of its ranks) never joined the collective of step 7: it has been in the body"
            ' for 290 s, at File "/job/data.py", line 33, in load / read(socket)',
            id="a rank in the body for which another one waits in the body",
        ),
        pytest.param(
            answer(UPDATE, VOTE, step=6),
            "replica 1 rank 0 never joined the next collective: it has been in the update of step 6 for 290 s",
            id="a rank in the update of the step before",
        ),
        pytest.param(
            answer(COLLECTIVE, UNKNOWN),
            "replica 1 rank 1 never joined the collective: it does not answer its leader",
            id="a rank that does not answer its leader",
        ),
        pytest.param(
            answer(COLLECTIVE),
            "replica 1 rank 1 never joined the collective: it does not answer its leader",
            id="a rank that its leader does not mention",
        ),
        pytest.param(
            answer(COLLECTIVE, COLLECTIVE, probe=0), "replica 1 does not answer where its ranks are", id="no answer"
        ),
        pytest.param(
            answer(VOTE, COLLECTIVE).model_copy(
                update={"ranks": (*ranks(VOTE), *ranks(COLLECTIVE, COLLECTIVE, epoch=3)[1:])}
            ),
            "replica 1 rank 1 did not move: it still waits in epoch 3 (collective of step 7)",
            id="a rank that stayed behind when the others entered the epoch",
        ),
    ],
)  # fmt: skip
def test_evidence_names_replica_rank_phase_and_place(odd: MemberState, evidence: str) -> None:
    found = judge({0: JOINED, 1: odd, 2: JOINED})
    assert found.hung == {1: evidence}
    assert not found.joined
    assert judge({0: JOINED, 1: odd}).hung == {1: evidence}


@pytest.mark.parametrize(
    "states",
    [
        pytest.param({0: answer(BODY, BODY), 1: answer(BODY, BODY)}, id="the step is long everywhere"),
        pytest.param({0: answer(BODY, COLLECTIVE), 1: answer(COLLECTIVE, BODY)}, id="some rank of each is not there"),
        pytest.param(
            {0: answer(COLLECTIVE, COLLECTIVE, seconds=SHORT), 1: answer(BODY, BODY)},
            id="the others have only just come",
        ),
        pytest.param(
            {0: JOINED.model_copy(update={"ranks": (*ranks(COLLECTIVE), *ranks(VOTE, VOTE, seconds=SHORT)[1:])}),
             1: answer(BODY, BODY)},
            id="a rank of the others has only just come",
        ),
        pytest.param(
            {0: answer(COLLECTIVE, COLLECTIVE, began=(1, 2)), 1: answer(BODY, BODY)},
            id="who waits had nothing to compute in this step",
        ),
        pytest.param(
            {0: JOINED, 1: answer(COLLECTIVE, COLLECTIVE, seconds=SHORT)}, id="the last one has only just joined"
        ),
        pytest.param(dict.fromkeys(range(3), answer(BODY, BODY, probe=0)), id="nobody answers"),
    ],
)  # fmt: skip
def test_without_evidence_nobody_is_blamed(states: dict[int, MemberState]) -> None:
    found = judge(states)
    assert found.hung == {}
    assert not found.joined


def test_a_shadow_that_waits_says_nothing_about_those_who_compute() -> None:
    assert judge({0: answer(BODY, BODY), 1: answer(BODY, BODY), 2: JOINED}, shadows=(2,)).hung == {}


def test_a_shadow_can_hold_up_the_others_too() -> None:
    found = judge({0: JOINED, 1: JOINED, 2: answer(UPDATE, COLLECTIVE, step=6)}, shadows=(2,))
    assert list(found.hung) == [2]


def test_when_all_have_joined_nobody_is_blamed_and_it_is_said_where_they_are() -> None:
    found = judge({0: answer(VOTE, COLLECTIVE), 1: JOINED})
    assert found.joined
    assert found.hung == {}
    assert found.step == 7
    assert found.summary == (
        "replica 0: 1 in collective of step 7, 1 in vote of step 7; replica 1: 2 in collective of step 7"
    )


def test_who_is_a_step_ahead_does_not_hold_up_those_who_wait_in_the_step_before() -> None:
    ahead, hanging = answer(COLLECTIVE, COLLECTIVE, step=8), answer(BODY, BODY, step=8)
    found = judge({0: JOINED, 1: ahead, 2: hanging})
    assert (found.joined, found.hung, found.step) == (True, {}, 7)
    assert list(judge({0: ahead, 1: ahead, 2: hanging}).hung) == [2]


def test_who_has_not_entered_a_planned_epoch_is_not_behind() -> None:
    found = judge({0: JOINED, 1: answer(COLLECTIVE, COLLECTIVE, epoch=3)}, planned=True)
    assert found.joined
    assert found.hung == {}


def test_a_newcomer_to_the_epoch_after_the_decided_one_is_not_behind() -> None:
    newcomer = answer(COLLECTIVE, COLLECTIVE, epoch=0)
    assert judge({0: JOINED, 1: JOINED, 2: newcomer}, newcomer=2).hung == {}
    assert list(judge({0: JOINED, 1: JOINED, 2: newcomer}).hung) == [2]


def test_nobody_is_behind_while_nobody_has_entered() -> None:
    late = answer(WAITING, WAITING, epoch=3)
    assert judge({0: late, 1: late}).hung == {}


# --- when a probe is sent -------------------------------------------------------------------------------------------


class Clock:
    """A watch over two replicas that says when it asks and what it finds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.watch = HangWatch(stall_timeout=300, answer_timeout=10, now=self.now)
        self.states = {0: MemberState(epoch=4, step=6), 1: MemberState(epoch=4, step=6)}
        self.connected = {0: 900.0, 1: 900.0}
        self.after(0)

    def after(self, seconds: float) -> Diagnosis | None:
        self.now += seconds
        members = {r: Member(replica=r, attempt=0, role=Role.ACTIVE, addresses=(f"h{r}:1",)) for r in self.states}
        record = EpochRecord(number=4, members=tuple(members.values()))
        return self.watch.look(self.states, members=members, connected=self.connected, record=record, now=self.now)

    def say(self, replica: int, **changes: object) -> None:
        self.states[replica] = self.states[replica].model_copy(update=changes)


def test_a_probe_is_sent_when_no_step_has_ended_for_the_stall_timeout() -> None:
    clock = Clock()
    clock.after(200)
    clock.say(1, step=7)
    clock.after(1)
    clock.after(299)
    assert not clock.watch.asking
    clock.after(1)
    assert clock.watch.asking
    assert clock.watch.number == 1


def test_it_is_judged_when_all_have_answered_or_had_the_time_to() -> None:
    clock = Clock()
    clock.after(300)
    clock.say(0, probe=1, ranks=ranks(COLLECTIVE))
    assert clock.after(5) is None
    clock.connected[1] = clock.now
    assert clock.after(6) is None
    found = clock.after(4)
    assert found is not None
    assert found.hung == {1: "replica 1 does not answer where its ranks are"}


def test_a_step_that_ends_meanwhile_makes_the_answers_void() -> None:
    clock = Clock()
    clock.after(300)
    clock.say(0, probe=1, ranks=ranks(COLLECTIVE))
    clock.say(1, step=7)
    assert clock.after(10) is None
    assert not clock.watch.asking


def test_it_is_asked_again_after_half_the_time_under_a_number_that_nobody_has_answered() -> None:
    clock = Clock()
    clock.say(0, probe=8)
    clock.after(0)
    clock.after(300)
    assert clock.watch.number == 9
    for replica in (0, 1):
        clock.say(replica, probe=9, ranks=ranks(BODY))
    assert clock.after(1) is not None
    clock.after(149)
    assert not clock.watch.asking
    clock.after(1)
    assert clock.watch.number == 10
