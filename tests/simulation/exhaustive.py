"""Every fault at every point of a small job: two steps of three replicas with two rails, and up to two faults.

A point is an event of the run, and a run is replayed from its seed. Replicas that differ in nothing but their number
are not all tried with faults that last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from tests.simulation.faults import Fault, Kind, run
from tests.simulation.world import World

__all__ = ["pairs", "singles", "small_job"]

REPLICAS, RANKS, STEPS = 3, 2, 2

_FAULTS: Sequence[tuple[Kind, int, int]] = (
    *((Kind.KILL, replica, 0) for replica in range(REPLICAS)),
    *((Kind.CUT_RING, replica, rank) for replica in range(REPLICAS) for rank in range(RANKS)),
    (Kind.FREEZE, 0, 0),
    (Kind.FREEZE_RANK, 1, 1),
    (Kind.CUT_LINK, 1, 0),
    (Kind.LEAVE, 2, 0),
    (Kind.UNPLUG_COORDINATOR, 0, 0),
    (Kind.DEAFEN_COORDINATOR, 0, 0),
    (Kind.FREEZE_COORDINATOR, 0, 0),
    (Kind.CRASH_COORDINATOR, 0, 0),
    (Kind.CRASH_BEFORE_PERSIST, 0, 0),
    (Kind.CRASH_AFTER_PERSIST, 0, 0),
)
"""Kind, replica, rank."""


def small_job(seed: int) -> World:
    """Return the job whose every point is tried."""
    return World(seed, replicas=REPLICAS, ranks=RANKS, steps=STEPS, unruly=0.2, download_seconds=0.01)


def _points(seed: int) -> int:
    """Return how many events there are before the first replica has finished, when nothing breaks."""
    world = small_job(seed)
    while not world.finished:
        world.next()
    return world.clock.events


def singles(seed: int) -> Iterator[tuple[Fault, ...]]:
    """Every fault at every point."""
    for at in range(_points(seed)):
        for kind, replica, rank in _FAULTS:
            yield (Fault(at=at, kind=kind, replica=replica, rank=rank),)


def pairs(seed: int, *, stride: int = 1) -> Iterator[tuple[Fault, ...]]:
    """Every fault at every point after every other one, up to where the run ends with that one alone.

    With a ``stride``, only one in so many of the first faults.
    """
    for (first,) in islice(singles(seed), 0, None, stride):
        alone = run(small_job(seed), [first])
        for at in range(first.at, alone.clock.events):
            for kind, replica, rank in _FAULTS:
                yield (first, Fault(at=at, kind=kind, replica=replica, rank=rank))
