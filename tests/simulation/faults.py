"""What can happen to a job, as data: a run is replayed from a seed and a list of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from tests.simulation.world import World

__all__ = ["LOUD", "Fault", "Kind", "apply", "random_faults", "run"]


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"
    KILL_RANK = "kill-rank"
    FREEZE = "freeze"
    FREEZE_RANK = "freeze-rank"
    THAW = "thaw"
    CUT_LINK = "cut-link"
    CUT_RING = "cut-ring"
    PARTITION = "partition"
    LEAVE = "leave"
    FLIP_BIT = "flip-bit"
    UNPLUG_COORDINATOR = "unplug-coordinator"
    DEAFEN_COORDINATOR = "deafen-coordinator"
    FREEZE_COORDINATOR = "freeze-coordinator"
    CRASH_COORDINATOR = "crash-coordinator"
    CRASH_BEFORE_PERSIST = "crash-before-persist"
    CRASH_AFTER_PERSIST = "crash-after-persist"


LOUD = [kind for kind in Kind if kind is not Kind.FLIP_BIT]
"""A flipped bit is found by comparing, which takes three; it has tests of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that happens before an event of the run."""

    at: int
    """Number of the event."""
    kind: Kind
    replica: int = 0
    rank: int = 0
    seconds: float = 8.0
    """How long a partition lasts, or what happens to the coordinator."""

    def __str__(self) -> str:
        return f"{self.kind}:replica={self.replica},rank={self.rank}@{self.at}"


def apply(world: World, fault: Fault) -> None:
    """Let it happen."""
    match fault.kind:
        case Kind.KILL:
            world.kill(fault.replica)
        case Kind.KILL_RANK:
            world.kill_rank(fault.replica, fault.rank)
        case Kind.FREEZE:
            world.freeze(fault.replica)
        case Kind.FREEZE_RANK:
            world.freeze(fault.replica, fault.rank)
        case Kind.THAW:
            world.thaw(fault.replica)
        case Kind.CUT_LINK:
            world.cut_link(fault.replica)
        case Kind.CUT_RING:
            world.cut_ring(fault.replica, fault.rank)
        case Kind.PARTITION:
            world.partition(fault.replica, fault.seconds)
        case Kind.LEAVE:
            world.leave(fault.replica)
        case Kind.FLIP_BIT:
            world.flip_bit(fault.replica, fault.rank)
        case Kind.UNPLUG_COORDINATOR:
            world.unplug_coordinator(fault.seconds, beside=fault.replica if fault.rank == 0 else None)
        case Kind.DEAFEN_COORDINATOR:
            world.deafen_coordinator(fault.seconds)
        case Kind.FREEZE_COORDINATOR:
            world.freeze_coordinator(fault.seconds)
        case Kind.CRASH_COORDINATOR:
            world.crash_coordinator()
        case Kind.CRASH_BEFORE_PERSIST:
            world.crash_coordinator_at_persist(after=False)
        case Kind.CRASH_AFTER_PERSIST:
            world.crash_coordinator_at_persist(after=True)


def random_faults(random: Random, *, most: int, replicas: int, ranks: int, events: int) -> list[Fault]:
    """Return up to ``most`` faults within the first so many events."""
    faults = [
        Fault(
            at=random.randrange(events),
            kind=random.choice(LOUD),
            replica=random.randrange(replicas),
            rank=random.randrange(ranks),
            seconds=random.choice([0.5, 4.0, 12.0, 50.0]),
        )
        for _ in range(random.randint(0, most))
    ]
    return sorted(faults, key=lambda fault: fault.at)


def run(world: World, faults: Sequence[Fault], *, lasting: float = 0.0) -> World:
    """Run a job to its end with these faults; what lasts is healed after ``lasting`` more seconds."""
    for fault in faults:
        while world.clock.events < fault.at and not world.finished:
            world.next()
        if not world.finished:
            apply(world, fault)
    end = world.clock.now + lasting
    while world.clock.now < end and not world.finished:
        world.next()
    world.finish()
    return world
