"""How a step ends when its epoch broke, and what a planned epoch looks like."""

from __future__ import annotations

import pytest

from fthsdp.coordinator.decide import decide, propose
from fthsdp.coordinator.messages import Assigned, CatchingUp, EpochRecord, Member, MemberState, Outcome, Role


def member(replica: int, role: Role = Role.ACTIVE) -> Member:
    return Member(replica=replica, attempt=0, role=role, addresses=(f"h{replica}:1",))


def epoch(active: tuple[int, ...], shadows: tuple[int, ...] = (), *, paused: bool = False) -> EpochRecord:
    members = sorted([*map(member, active), *(member(r, Role.SHADOW) for r in shadows)], key=lambda m: m.replica)
    return EpochRecord(number=4, members=tuple(members), paused=paused)


def at(
    step: int | None, *, serves: bool = True, began: tuple[int, ...] | None = None, leaving: str = ""
) -> MemberState:
    begun = None if began is None or step is None else Assigned(step=step + 1, replicas=began)
    return MemberState(step=step, serves=serves and step is not None, begun=begun, leaving=leaving, fence=4)


NONE = at(None)
LIST = (0, 1, 2)


@pytest.mark.parametrize(
    ("states", "base", "outcome", "active", "snapshots"),
    [
        pytest.param(
            {0: at(5, began=LIST), 1: at(5, began=LIST)}, epoch(LIST),
            Outcome(step=5, assigned=Assigned(step=6, replicas=LIST, survivors=((0, 1),))), (0, 1), (),
            id="nobody has the step: retry",
        ),
        pytest.param(
            {0: at(5, began=LIST), 1: at(6)}, epoch(LIST), Outcome(step=6, source=1), (0, 1), (),
            id="one has the step: roll forward from it",
        ),
        pytest.param(
            {0: at(5, began=LIST), 1: at(6, began=LIST), 2: at(6, began=LIST)}, epoch(LIST),
            Outcome(step=6, source=1, assigned=Assigned(step=7, replicas=LIST)), LIST, (),
            id="the list of the step after is carried, not that of the step before",
        ),
        pytest.param(
            {0: at(5), 1: at(5), 2: NONE}, epoch((0, 1), (2,)), Outcome(step=5, source=0), (0, 1), (2,),
            id="a shadow without state gets stripes, and a source in case it lacks the step",
        ),
        pytest.param(
            {0: at(5), 1: at(6, serves=False)}, epoch((0,), (1,)), Outcome(step=5, source=0), (0,), (1,),
            id="the step of one who cannot serve does not count: it is undone there",
        ),
        pytest.param(
            {0: at(6), 1: at(5, serves=False)}, epoch((0,), (1,)), Outcome(step=6, source=0), (0,), (),
            id="one who cannot serve and is behind rolls forward as a shadow",
        ),
        pytest.param(
            {0: at(5, serves=False), 1: at(6, serves=False)}, epoch((2,), (0, 1)),
            Outcome(step=6, serving=False), (1,), (0,),
            id="only such are left: the furthest is the state, the others start over",
        ),
        pytest.param(
            {0: at(5), 3: at(5)}, epoch((0, 1, 2), (3,)), Outcome(step=5), (0, 3), (),
            id="a ready shadow steps in",
        ),
        pytest.param(
            {0: at(5), 2: at(5), 3: at(5), 4: at(5)}, epoch(LIST, (3, 4)), Outcome(step=5), (0, 2, 3), (),
            id="only as many as are wanted",
        ),
        pytest.param(
            {0: at(5), 3: NONE, 4: at(5, serves=False)}, epoch((0, 1), (3, 4)), Outcome(step=5, source=0), (0, 4), (3,),
            id="a spare that has no state yet does not step in, one that is at the step does",
        ),
        pytest.param(
            {0: at(6), 2: at(5), 3: at(5), 4: at(6)}, epoch(LIST, (3, 4)), Outcome(step=6, source=0), (0, 2, 4), (),
            id="the spare that has the step goes before the one that still has to fetch it",
        ),
        pytest.param(
            {0: at(6), 1: at(5), 3: at(5)}, epoch(LIST, (3,)), Outcome(step=6, source=0), (0, 1, 3), (),
            id="a spare rolls forward like everybody and steps in",
        ),
        pytest.param(
            {0: at(6), 1: at(6), 3: at(5, serves=False)}, epoch(LIST, (3,)), Outcome(step=6, source=0), (0, 1), (),
            id="a spare that has only just caught up, and is behind, rolls forward first",
        ),
        pytest.param(
            {0: at(0), 1: at(0)}, epoch(LIST), Outcome(step=0), (0, 1), (), id="before the first step",
        ),
    ],
)  # fmt: skip
def test_the_decision(
    states: dict[int, MemberState],
    base: EpochRecord,
    outcome: Outcome,
    active: tuple[int, ...],
    snapshots: tuple[int, ...],
) -> None:
    record = decide(states, members={r: member(r) for r in states}, base=base, number=5, wanted=3, least=1)
    assert record is not None
    assert record.number == 5
    assert record.wanted == 3
    assert record.outcome == outcome
    assert record.active == active
    assert record.snapshots == snapshots
    assert [m.replica for m in record.members] == sorted(states)
    assert not record.paused


@pytest.mark.parametrize("states", [{}, {0: NONE}, {0: NONE, 1: NONE}])
def test_there_is_no_decision_without_a_state(states: dict[int, MemberState]) -> None:
    assert decide(states, members={r: member(r) for r in states}, base=epoch(LIST), number=5, wanted=3, least=1) is None


def test_too_few_active_members_pause() -> None:
    states = {0: at(5), 1: at(5)}
    record = decide(states, members={r: member(r) for r in states}, base=epoch(LIST), number=5, wanted=3, least=3)
    assert record is not None
    assert record.paused


def test_a_paused_job_lets_go_who_leaves() -> None:
    states = {0: at(5), 1: at(5, leaving="SIGTERM")}
    base = epoch((0, 1), paused=True)
    record = decide(states, members={r: member(r) for r in states}, base=base, number=5, wanted=3, least=3)
    assert record is not None
    assert record.active == (0,)


def test_who_leaves_a_running_job_stays_through_a_failure_so_that_its_gradients_count() -> None:
    states = {0: at(5), 1: at(5, leaving="SIGTERM")}
    record = decide(states, members={r: member(r) for r in states}, base=epoch(LIST), number=5, wanted=3, least=1)
    assert record is not None
    assert record.active == (0, 1)


def test_each_retry_that_loses_somebody_notes_who_is_left_of_the_list() -> None:
    list_ = Assigned(step=6, replicas=(0, 1, 2, 3), wanted=4)
    after_one = list_.model_copy(update={"survivors": ((0, 1, 3),)})
    assert survivors_of({0: list_, 1: list_, 3: list_}) == after_one.survivors
    assert survivors_of({0: after_one, 1: after_one}) == ((0, 1, 3), (0, 1))
    assert survivors_of({0: after_one, 1: after_one, 3: after_one}) == after_one.survivors


def test_who_has_not_entered_the_epoch_of_the_first_retry_takes_its_survivors_over_from_those_who_have() -> None:
    list_ = Assigned(step=6, replicas=(0, 1, 2, 3))
    ahead = list_.model_copy(update={"survivors": ((0, 1, 3),)})
    assert survivors_of({0: ahead, 1: list_}) == ((0, 1, 3), (0, 1))
    base = epoch((0, 1, 3)).model_copy(update={"outcome": Outcome(step=5, assigned=ahead)})
    assert survivors_of({0: list_, 1: list_}, base=base) == ((0, 1, 3), (0, 1))


def test_a_replica_that_came_back_for_the_same_step_is_no_survivor_and_a_spare_is_none_either() -> None:
    list_ = Assigned(step=6, replicas=(0, 1, 2), survivors=((0, 1),))
    assert survivors_of({0: list_, 1: list_, 2: None, 3: None}) == ((0, 1),)


def test_with_nobody_left_of_the_list_nobody_takes_over() -> None:
    list_ = Assigned(step=6, replicas=(0, 1))
    assert survivors_of({3: list_}) == ()


def survivors_of(begun: dict[int, Assigned | None], *, base: EpochRecord | None = None) -> tuple[tuple[int, ...], ...]:
    """Of the step after 5, when everybody who is left has reported that it began it so."""
    states = {r: MemberState(step=5, serves=True, begun=b, fence=4) for r, b in begun.items()}
    record = decide(
        states, members={r: member(r) for r in states}, base=base or epoch((0, 1, 2, 3)), number=5, wanted=4, least=1
    )
    assert record is not None
    assert record.outcome is not None
    assert record.outcome.assigned is not None
    return record.outcome.assigned.survivors


def test_two_lists_for_one_step_are_a_fault_of_the_protocol() -> None:
    states = {0: at(5, began=(0, 1)), 1: at(5, began=(0, 1, 2))}
    with pytest.raises(AssertionError, match="step 6 began under several lists"):
        decide(states, members={r: member(r) for r in states}, base=epoch(LIST), number=5, wanted=3, least=1)


def leaving(state: MemberState) -> MemberState:
    return state.model_copy(update={"leaving": "x"})


@pytest.mark.parametrize(
    ("states", "base", "joiners", "stranded", "active", "shadows", "snapshots"),
    [
        pytest.param({0: at(5), 1: at(5)}, epoch((0, 1)), (2,), (), (0, 1), (2,), (2,), id="a join"),
        pytest.param({0: at(5), 1: at(5)}, epoch((0,), (1,)), (), (), (0, 1), (), (), id="a promotion"),
        pytest.param({0: at(5), 1: NONE}, epoch((0,), (1,)), (2,), (), (0,), (1, 2), (2,), id="no snapshot twice"),
        pytest.param(
            {0: at(5), 1: at(5, leaving="x"), 2: NONE}, epoch((0, 1), (2,)), (), (), (0,), (2,), (2,),
            id="a removal: stripes of that donor are gone",
        ),
        pytest.param({0: at(5), 1: NONE}, epoch((0,), (1,)), (), (1,), (0,), (1,), (1,), id="a stranded shadow"),
        pytest.param(
            {0: at(5, leaving="x"), 1: NONE}, epoch((0,), (1,)), (2,), (), (0,), (1, 2), (2,),
            id="the last with the state stays while there is somebody to give it to",
        ),
        pytest.param({0: at(5, leaving="x"), 1: leaving(NONE)}, epoch((0,), (1,)), (), (), (), (), (), id="all leave"),
    ],
)  # fmt: skip
def test_the_planned_epoch(
    states: dict[int, MemberState],
    base: EpochRecord,
    joiners: tuple[int, ...],
    stranded: tuple[int, ...],
    active: tuple[int, ...],
    shadows: tuple[int, ...],
    snapshots: tuple[int, ...],
) -> None:
    newcomers = [member(r, Role.SHADOW) for r in joiners]
    record = propose(states, base=base, joiners=newcomers, stranded=stranded, number=5, wanted=3, least=1)
    assert record is not None
    assert record.outcome is None
    assert record.wanted == 3
    assert record.active == active
    assert tuple(m.replica for m in record.members if m.role is Role.SHADOW) == shadows
    assert record.snapshots == snapshots


def test_nothing_is_planned_without_a_reason() -> None:
    states = {0: at(5), 1: NONE}
    base = epoch((0,), (1,))
    assert propose(states, base=base, joiners=[], stranded=[], number=5, wanted=3, least=1) is None


def test_where_fewer_are_wanted_by_now_the_highest_become_spares() -> None:
    base = epoch((0, 1, 2, 3), (4,))
    states = {r: at(5) for r in range(5)}
    record = propose(states, base=base, joiners=[], stranded=[], number=5, wanted=2, least=1)
    assert record is not None
    assert (record.active, record.snapshots, record.paused) == ((0, 1), (), False)
    assert [m.replica for m in record.members] == [0, 1, 2, 3, 4]
    assert propose(states, base=record, joiners=[], stranded=[], number=6, wanted=2, least=1) is None


def test_who_leaves_makes_room_before_anybody_becomes_a_spare() -> None:
    states = {0: leaving(at(5)), 1: at(5), 2: at(5)}
    record = propose(states, base=epoch((0, 1, 2)), joiners=[], stranded=[], number=5, wanted=2, least=1)
    assert record is not None
    assert record.active == (1, 2)


def test_no_more_become_active_than_are_wanted() -> None:
    states = {0: at(5), 1: at(5), 2: at(5)}
    base = epoch((0, 1), (2,))
    assert propose(states, base=base, joiners=[], stranded=[], number=5, wanted=2, least=1) is None


@pytest.mark.parametrize(
    ("since", "at_step", "donors", "renewed"),
    [
        (3, 5, (0, 1), False),
        (3, 4, (0, 1), False),
        (3, 6, (0, 1), False),
        (5, 5, (), False),
        (6, 6, (), True),
        (3, 7, (0, 1), True),
        (3, 3, (0, 1), True),
        (3, 5, (0, 2), True),
    ],
)
def test_a_shadow_goes_on_unless_its_stripes_are_gone_or_lead_elsewhere(
    since: int, at_step: int, donors: tuple[int, ...], renewed: bool
) -> None:
    way = CatchingUp(since=since, at=at_step, donors=donors)
    states = {0: at(5), 1: at(5), 3: NONE.model_copy(update={"catching_up": way})}
    members = {r: member(r) for r in states}
    record = decide(states, members=members, base=epoch((0, 1, 2), (3,)), number=5, wanted=3, least=1)
    assert record is not None
    assert record.snapshots == ((3,) if renewed else ())


def test_the_next_attempt_of_a_donor_that_comes_while_the_job_is_paused_is_no_donor() -> None:
    way = CatchingUp(since=5, at=5, donors=(0, 1))
    states = {0: NONE, 1: at(5), 3: NONE.model_copy(update={"catching_up": way})}
    members = {r: member(r) for r in states}
    record = decide(states, members=members, base=epoch((0, 1), (3,), paused=True), number=5, wanted=3, least=3)
    assert record is not None
    assert record.snapshots == (0, 3)
