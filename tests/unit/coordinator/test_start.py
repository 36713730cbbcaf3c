"""From which state a run begins."""

from __future__ import annotations

import pytest

from fthsdp.coordinator.messages import EpochRecord, Member, MemberState, Outcome, Role
from fthsdp.coordinator.start import first_epoch, replaced


def state(origin: str = "a", checkpoint: int = 0) -> MemberState:
    return MemberState(origin=origin, checkpoint=checkpoint)


def begin(states: dict[int, MemberState], *, wanted: int = 3, least: int = 1) -> EpochRecord:
    members = {r: Member(replica=r, attempt=4, role=Role.SHADOW, addresses=(f"h{r}:1",)) for r in states}
    return first_epoch(states, members=members, number=7, wanted=wanted, least=least)


@pytest.mark.parametrize(
    ("states", "step", "active", "others"),
    [
        pytest.param({0: state(), 1: state(), 2: state()}, 0, (0, 1, 2), (), id="equal initial weights"),
        pytest.param({0: state("a"), 1: state("b"), 2: state("a")}, 0, (0, 2), (1,), id="unequal initial weights"),
        pytest.param({1: state("b"), 2: state("a")}, 0, (1,), (2,), id="the lowest replica's weights"),
        pytest.param(
            {0: state("a", 50), 1: state("a", 50)}, 50, (0, 1), (), id="a checkpoint that all can read"
        ),
        pytest.param(
            {0: state("w"), 1: state("c", 50), 2: state("b", 40)}, 50, (1,), (0, 2), id="the newest checkpoint wins"
        ),
        pytest.param(
            {0: state("a", 40), 1: state("a", 50), 2: state("b", 50)}, 50, (1,), (0, 2),
            id="one checkpoint that two read differently, and another one of the same content",
        ),
    ],
)  # fmt: skip
def test_the_furthest_state_of_the_lowest_replica_is_everybodys(
    states: dict[int, MemberState], step: int, active: tuple[int, ...], others: tuple[int, ...]
) -> None:
    record = begin(states)
    assert (record.number, record.wanted, record.paused) == (7, 3, False)
    assert record.outcome == Outcome(step=step)
    assert record.active == active
    assert record.snapshots == others
    assert [m.replica for m in record.members] == sorted(states)
    assert {m.attempt for m in record.members} == {4}
    assert replaced(states) == others


def test_no_more_train_than_are_wanted_and_a_spare_with_the_same_state_has_lost_nothing() -> None:
    states = dict.fromkeys(range(5), state())
    record = begin(states)
    assert record.active == (0, 1, 2)
    assert record.snapshots == (3, 4)
    assert replaced(states) == ()


def test_too_few_with_the_same_state_wait_until_the_others_have_it() -> None:
    record = begin({0: state("a"), 1: state("b"), 2: state("c")}, least=2)
    assert record.active == (0,)
    assert record.paused
