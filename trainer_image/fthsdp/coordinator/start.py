"""From which state a run begins: its first epoch, and the first one after everything was lost.

Whoever waits says from which state it could begin: the newest whole checkpoint that it can read, or its initial weights
when there is none. The furthest step wins, and at that step the state of the lowest replica. Those who have that state
train; the others are shadows at first, to whom it is given: their weights were other ones, or they cannot read that
checkpoint, or enough train already.
"""

from __future__ import annotations

from collections.abc import Mapping

from fthsdp.coordinator.messages import EpochRecord, Member, MemberState, Outcome, Role

__all__ = ["LOOK_AGAIN", "first_epoch", "replaced"]

LOOK_AGAIN = 5.0
"""Seconds between looks of a waiting newcomer for a newer checkpoint."""


def first_epoch(
    states: Mapping[int, MemberState], *, members: Mapping[int, Member], number: int, wanted: int, least: int
) -> EpochRecord:
    """Return the epoch in which a run begins.

    ``states`` are the reports of those who wait, by replica (at least one), ``members`` says who they are, ``wanted``
    and ``least`` are the numbers of active replicas to aim at and to train with.
    """
    active = _alike(states)[:wanted]
    shadows = tuple(sorted(states.keys() - set(active)))
    roles = dict.fromkeys(active, Role.ACTIVE) | dict.fromkeys(shadows, Role.SHADOW)
    return EpochRecord(
        number=number,
        members=tuple(members[r].model_copy(update={"role": roles[r]}) for r in sorted(states)),
        wanted=wanted,
        paused=len(active) < least,
        outcome=Outcome(step=states[active[0]].checkpoint),
        snapshots=shadows,
    )


def replaced(states: Mapping[int, MemberState]) -> tuple[int, ...]:
    """Return whose own state is not the one that the run begins from."""
    return tuple(sorted(states.keys() - set(_alike(states))))


def _alike(states: Mapping[int, MemberState]) -> list[int]:
    """Who has the state that the run begins from, in order."""
    furthest = max(state.checkpoint for state in states.values())
    lowest = min(r for r, state in states.items() if state.checkpoint == furthest)
    return sorted(
        r for r, s in states.items() if (s.checkpoint, s.origin) == (states[lowest].checkpoint, states[lowest].origin)
    )
