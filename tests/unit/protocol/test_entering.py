"""How a member enters an epoch that a broken ring made necessary."""

import pytest

from fthsdp.coordinator.messages import EpochRecord, Member, Outcome, Role
from fthsdp.protocol.entering import Entry, how_to_enter


def decided(step: int, *, serving: bool = True) -> EpochRecord:
    members = tuple(Member(replica=r, attempt=0, role=Role.ACTIVE, addresses=("h:1",)) for r in (0, 1))
    return EpochRecord(number=5, members=members, outcome=Outcome(step=step, serving=serving))


@pytest.mark.parametrize(
    ("step", "serving", "entry"),
    [
        (7, True, Entry.GO_ON),
        (6, True, Entry.ROLL_FORWARD),
        (6, False, Entry.LOST),
        (8, True, Entry.LOST),
        (5, True, Entry.LOST),
    ],
)
def test_a_full_member(step: int, serving: bool, entry: Entry) -> None:
    assert how_to_enter(decided(7, serving=serving), step=step, full=True) is entry


@pytest.mark.parametrize(
    ("step", "donors", "kept_last", "entry"),
    [
        (7, {0, 1}, True, Entry.GO_ON),
        (6, {0, 1}, False, Entry.ROLL_FORWARD),
        (8, {0}, True, Entry.DROP_LAST),
        (8, {0}, False, Entry.START_OVER),
        (9, {0}, True, Entry.START_OVER),
        (7, {0, 2}, True, Entry.START_OVER),
        (7, set(), True, Entry.GO_ON),
    ],
)
def test_a_shadow(step: int, donors: set[int], kept_last: bool, entry: Entry) -> None:
    found = how_to_enter(decided(7), step=step, full=False, donors=frozenset(donors), kept_last=kept_last)
    assert found is entry
