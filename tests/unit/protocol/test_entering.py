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
    assert how_to_enter(decided(7, serving=serving), replica=0, step=step, full=True) is entry


@pytest.mark.parametrize(
    ("step", "since", "renewed", "entry"),
    [
        (7, 4, False, Entry.GO_ON),
        (7, 7, False, Entry.GO_ON),
        (6, 4, False, Entry.ROLL_FORWARD),
        (8, 7, False, Entry.DROP_LAST),
        (8, 8, False, Entry.LOST),
        (9, 4, False, Entry.LOST),
        (7, 4, True, Entry.START_OVER),
        (9, 4, True, Entry.START_OVER),
    ],
)
def test_a_shadow(step: int, since: int, renewed: bool, entry: Entry) -> None:
    record = decided(7).model_copy(update={"snapshots": (0,) if renewed else (1,)})
    assert how_to_enter(record, replica=0, step=step, full=False, since=since) is entry
