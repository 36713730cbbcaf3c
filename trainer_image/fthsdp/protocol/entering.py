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
    """A full member stands elsewhere: start again as a joiner."""


def how_to_enter(
    record: EpochRecord,
    *,
    step: int,
    full: bool,
    renewed: bool = False,
    donors: frozenset[int] = frozenset(),
    kept_last: bool = False,
) -> Entry:
    """Decide for a member at ``step``.

    ``renewed`` says that the donors copy new stripes for this shadow, and drop the ones from before; ``donors`` are the
    replicas that it still downloads from, ``kept_last`` says that it keeps ``step`` itself as a step not yet replayed.
    """
    assert record.outcome is not None
    outcome = record.outcome
    if full:
        if outcome.step == step:
            return Entry.GO_ON
        return Entry.ROLL_FORWARD if outcome.step == step + 1 and outcome.serving else Entry.LOST
    present = {m.replica for m in record.members}
    if renewed or not donors <= present:
        return Entry.START_OVER
    if outcome.step == step:
        return Entry.GO_ON
    if outcome.step == step + 1 and outcome.serving:
        return Entry.ROLL_FORWARD
    return Entry.DROP_LAST if outcome.step == step - 1 and kept_last else Entry.START_OVER
