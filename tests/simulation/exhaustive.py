"""Every fault at every point of a small job: two steps of three replicas with two rails, and up to two faults.

A run is replayed from its seed up to where the first fault comes, once; the process is then forked, so that each pair
of faults costs only what follows it. A fault that touches one replica is placed only where something has happened to
that replica since the last place: in between it would change nothing.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence

from tests.simulation.faults import Fault, Kind, apply
from tests.simulation.scenarios import Covered
from tests.simulation.world import World

__all__ = ["FAULTS", "every_fault", "small_job"]

REPLICAS, RANKS, STEPS = 3, 2, 2

FAULTS: Sequence[tuple[Kind, int, int]] = (
    *((Kind.KILL, replica, 0) for replica in range(REPLICAS)),
    *((Kind.CUT_RING, replica, rank) for replica in range(REPLICAS) for rank in range(RANKS)),
    *((Kind.FREEZE, replica, 0) for replica in range(REPLICAS)),
    (Kind.FREEZE_RANK, 1, 1),
    (Kind.CUT_LINK, 1, 0),
    (Kind.LEAVE, 0, 0),
    (Kind.LEAVE, 2, 0),
    (Kind.CRASH_COORDINATOR, 0, 0),
    (Kind.CRASH_BEFORE_PERSIST, 0, 0),
    (Kind.CRASH_AFTER_PERSIST, 0, 0),
)
"""Kind, replica, rank. Replicas that differ in nothing but their number are not all tried with what lasts."""


def small_job(seed: int) -> World:
    """Return the job whose every point is tried."""
    return World(seed, replicas=REPLICAS, ranks=RANKS, steps=STEPS, unruly=0.2, download_seconds=0.01)


def every_fault(seed: int, *, second_until: int = 0, stride: int = 1, offset: int = 0) -> Covered:
    """Try every fault at every ``stride``-th event from ``offset`` on; after each, every second one for so many events.

    0 events: single faults only.
    """
    covered = Covered()
    world = small_job(seed)
    while not world.over:
        if world.clock.events % stride == offset and not world.finished:
            for fault in _faults(world):
                covered.add(_in_a_fork(lambda fault=fault: _from_here(world, [fault], second_until)))
                if covered.failures:
                    return covered
        world.next()
    return covered


def _faults(world: World) -> Iterator[Fault]:
    for kind, replica, rank in FAULTS:
        if world.replicas[replica].alive:
            yield Fault(at=world.clock.events, kind=kind, replica=replica, rank=rank)


def _from_here(world: World, faults: list[Fault], second_until: int) -> Covered:
    covered = Covered()
    begun = world.clock.events
    try:
        apply(world, faults[-1])
        for _ in range(second_until):
            if world.finished:
                break
            for fault in _faults(world):
                covered.add(_in_a_fork(lambda fault=fault: _from_here(world, [*faults, fault], 0)))
                if covered.failures:
                    return covered
            world.next()
        world.finish()
    except Exception:
        told = ", ".join(map(str, faults))
        covered.failures.append(f"seed {world.seed} with faults {told}:\n{traceback.format_exc()}")
    covered.runs += 1
    covered.events += world.clock.events - begun
    covered.steps += world.checks.steps
    covered.endings.update(world.checks.endings)
    return covered


def _in_a_fork(run: Callable[[], Covered]) -> Covered:
    """Run in a copy of this process, which leaves this one as it is."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(run(), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    covered: Covered = pickle.loads(data)  # noqa: S301
    return covered
