"""Runs by the thousand: random jobs with random faults, each a function of its number, and small ones exhaustively."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from multiprocessing import get_context
from random import Random

from tests.simulation.exhaustive import small_job
from tests.simulation.faults import Fault, Kind, random_faults, run
from tests.simulation.world import World

from fthsdp.data.policies import BatchPolicy, LrPolicy, Policies

__all__ = ["Case", "Covered", "cover", "explore", "leaving_case", "random_case", "skirmish_case", "small_case"]


class Job(StrEnum):
    """What kind of job a case has."""

    RANDOM = "random"
    SMALL = "small"
    SKIRMISH = "skirmish"
    """Shadows that catch up for as long as the job lasts, and faults close upon each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run, as data."""

    number: int
    """The job's seed."""
    faults: tuple[Fault, ...]
    job: Job = Job.RANDOM
    lasting: float = 0.0
    """Seconds before what lasts among the faults is healed."""

    def run(self) -> World:
        """Run it to its end; raises Violation."""
        return run(self.world(), self.faults, lasting=self.lasting)

    def world(self) -> World:
        """Return the job before its first event."""
        return _JOBS[self.job](self.number)

    def __str__(self) -> str:
        told = ", ".join(map(str, self.faults)) or "no faults"
        return f"{self.job} job {self.number} with {told}"


def _random_job(number: int) -> World:
    random = Random(number)
    replicas, ranks = random.choice([1, 2, 3, 3, 3, 4, 5]), random.choice([1, 2, 2, 3])
    return World(
        number,
        replicas=replicas,
        spares=random.choice([0, 0, 0, 1, 2]),
        ranks=ranks,
        steps=random.randint(1, 8),
        min_replicas=random.randint(1, replicas),
        policies=random.choice([Policies(), Policies(lr=LrPolicy.LINEAR), Policies(batch=BatchPolicy.CONSTANT)]),
        weights=random.choice([(), (), (1, 2), (3, 1, 1)]),
        unruly=random.choice([0.0, 0.05, 0.3]),
        download_seconds=random.choice([0.0, 0.2, 2.0]),
        checkpoint_every=random.choice([0, 1, 2, 3]),
    )


def _skirmish_job(number: int) -> World:
    random = Random(number)
    return World(
        number,
        replicas=random.choice([2, 3]),
        spares=random.choice([0, 1]),
        ranks=random.choice([1, 2]),
        steps=5,
        weights=random.choice([(), (1, 2), (3, 1, 1)]),
        unruly=random.choice([0.3, 0.6]),
        download_seconds=random.choice([0.02, 0.3, 1.0]),
    )


_JOBS: dict[Job, Callable[[int], World]] = {
    Job.RANDOM: _random_job,
    Job.SMALL: small_job,
    Job.SKIRMISH: _skirmish_job,
}


def skirmish_case(number: int) -> Case:
    """Return a job in which a few things break within a step or two."""
    world, random = _skirmish_job(number), Random(~number & 0xFFFFFFFF)
    begin, width = random.randrange(400), random.choice([5, 20, 60])
    kinds = [Kind.CUT_RING] * 6 + [Kind.KILL, Kind.CUT_LINK, Kind.CRASH_COORDINATOR]
    faults = [
        Fault(
            at=begin + random.randrange(width),
            kind=random.choice(kinds),
            replica=random.randrange(len(world.replicas)),
            rank=random.randrange(world.ranks),
        )
        for _ in range(random.randint(1, 3))
    ]
    faults.sort(key=lambda fault: fault.at)
    return Case(number=number, faults=tuple(faults), job=Job.SKIRMISH, lasting=random.choice([0.0, 7.0]))


def leaving_case(number: int) -> Case:
    """Return a job that starts from one replica's weights, and some of whose replicas are told to leave."""
    world, random = _skirmish_job(number), Random(~number & 0xFFFFFFFF)
    faults = [
        Fault(at=random.randrange(150), kind=Kind.LEAVE, replica=random.randrange(len(world.replicas)))
        for _ in range(random.randint(1, 2))
    ]
    faults.sort(key=lambda fault: fault.at)
    return Case(number=number, faults=tuple(faults), job=Job.SKIRMISH)


def random_case(number: int) -> Case:
    """Return a random job with random faults."""
    world, random = _random_job(number), Random(~number & 0xFFFFFFFF)
    most, events = random.choice([0, 1, 2, 4, 8]), random.choice([200, 500, 1500])
    faults = random_faults(random, most=most, replicas=len(world.replicas), ranks=world.ranks, events=events)
    return Case(number=number, faults=tuple(faults), lasting=random.choice([0.0, 2.0, 20.0]))


def small_case(seed: int, faults: Sequence[Fault]) -> Case:
    """Return a small job with these faults."""
    return Case(number=seed, faults=tuple(faults), job=Job.SMALL)


@dataclass(slots=True)
class Covered:
    """How much was run."""

    runs: int = 0
    events: int = 0
    steps: int = 0
    """Committed, all ranks together."""
    states: set[int] = field(default_factory=set)
    """Different situations of the whole job at the end of a step somewhere."""
    endings: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Covered) -> None:
        """Count what another one covered as well."""
        self.runs += other.runs
        self.events += other.events
        self.steps += other.steps
        self.states |= other.states
        self.endings.update(other.endings)
        self.failures += other.failures

    def __str__(self) -> str:
        endings = ", ".join(f"{number:,} {name}" for name, number in self.endings.most_common())
        return (
            f"{self.runs:,} schedules, {self.events:,} simulated steps, {len(self.states):,} different states,"
            f" {self.steps:,} training steps committed by a rank ({endings})"
        )


def cover(cases: Sequence[Case]) -> Covered:
    """Run these, until one fails."""
    covered = Covered()
    for case in cases:
        try:
            world = case.run()
        except Exception:
            covered.failures.append(f"{case}:\n{traceback.format_exc()}")
            return covered
        covered.runs += 1
        covered.events += world.clock.events
        covered.steps += world.checks.steps
        covered.states |= world.checks.states
        covered.endings.update(world.checks.endings)
    return covered


def explore(cases: Iterator[Case], *, events: int | None = None, batch: int = 20) -> Covered:
    """Run cases on all processors: all of them, or until so many events have happened; ends when one fails."""
    covered = Covered()
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        running = [pool.submit(cover, list(islice(cases, batch))) for _ in range(2 * workers)]
        while running:
            done = running.pop(0).result()
            covered.add(done)
            if covered.failures:
                pool.shutdown(cancel_futures=True)
                break
            following = list(islice(cases, batch)) if events is None or covered.events < events else []
            if following:
                running.append(pool.submit(cover, following))
    return covered
