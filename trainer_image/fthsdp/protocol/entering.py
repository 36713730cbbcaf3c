"""How a member enters an epoch that was made after a broken ring: a pure decision."""

from __future__ import annotations

from enum import StrEnum

from fthsdp.coordinator.messages import EpochRecord

__all__ = ["Entry", "how_to_enter"]


class Entry(StrEnum):
    """What to do at the boundary that the decision names."""

    GO_ON = "go-on"
    """Stand at that boundary already: retry the step in flight, or wait when the job is paused."""
    ROLL_FORWARD = "roll-forward"
    """One step behind: fetch the reduced gradients of that step from the source and apply them."""
    DROP_LAST = "drop-last"
    """A shadow kept a step of an attempt that does not count: forget it."""
    START_OVER = "start-over"
    """A shadow's base is not on the way to that boundary: begin a new download there."""
    LOST = "lost"
    """It stands elsewhere: start again as a joiner."""


def how_to_enter(record: EpochRecord, *, replica: int, step: int, full: bool, since: int = 0) -> Entry:
    """Decide for a member at ``step``; a shadow (not ``full``) has or gets its stripes from the end of step ``since``.

    Whether a shadow starts over was decided with the epoch, because its donors have to copy for it.
    """
    assert record.outcome is not None
    outcome = record.outcome
    if not full and replica in record.snapshots:
        return Entry.START_OVER
    if outcome.step == step:
        return Entry.GO_ON
    if outcome.step == step + 1 and outcome.serving:
        return Entry.ROLL_FORWARD
    return Entry.DROP_LAST if not full and outcome.step == step - 1 >= since else Entry.LOST
