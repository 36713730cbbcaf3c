"""Random jobs with random faults, each a function of its number."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from random import Random

from tests.simulation.faults import Fault, random_faults, run
from tests.simulation.world import World

from fthsdp.data.policies import BatchPolicy, LrPolicy, Policies

__all__ = ["Covered", "explore", "scenario"]


@dataclass(slots=True)
class Covered:
    """How much was run."""

    runs: int = 0
    events: int = 0
    steps: int = 0
    """Committed, all ranks together."""
    endings: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Covered) -> None:
        """Count what another one covered as well."""
        self.runs += other.runs
        self.events += other.events
        self.steps += other.steps
        self.endings.update(other.endings)
        self.failures += other.failures

    def count(self, world: World) -> None:
        """Count one run."""
        self.runs += 1
        self.events += world.clock.events
        self.steps += world.checks.steps
        self.endings.update(world.checks.endings)

    def __str__(self) -> str:
        endings = ", ".join(f"{number:,} {name}" for name, number in self.endings.most_common())
        return f"{self.runs:,} runs, {self.events:,} events, {self.steps:,} steps committed ({endings})"


def scenario(number: int) -> tuple[World, list[Fault], float]:
    """Return a job, its faults and how long what lasts among them lasts."""
    random = Random(number)  # noqa: S311
    replicas, ranks = random.choice([1, 2, 3, 3, 3, 4, 5]), random.choice([1, 2, 2, 3])
    spares = random.choice([0, 0, 0, 1, 2])
    world = World(
        number,
        replicas=replicas,
        spares=spares,
        ranks=ranks,
        steps=random.randint(1, 8),
        min_replicas=random.randint(1, replicas),
        policies=random.choice(
            [Policies(), Policies(lr=LrPolicy.LINEAR), Policies(batch=BatchPolicy.CONSTANT)],
        ),
        weights=random.choice([(), (), (1, 2), (3, 1, 1)]),
        unruly=random.choice([0.0, 0.05, 0.3]),
        download_seconds=random.choice([0.0, 0.2, 2.0]),
    )
    most, events = random.choice([0, 1, 2, 4, 8]), random.choice([200, 500, 1500])
    faults = random_faults(random, most=most, replicas=replicas + spares, ranks=ranks, events=events)
    return world, faults, random.choice([0.0, 2.0, 20.0])


def _cover(numbers: Iterable[int]) -> Covered:
    covered = Covered()
    for number in numbers:
        world, faults, lasting = scenario(number)
        try:
            run(world, faults, lasting=lasting)
        except Exception:
            told = ", ".join(map(str, faults))
            covered.failures.append(f"scenario {number} with faults {told or 'none'}:\n{traceback.format_exc()}")
        covered.count(world)
    return covered


def explore(numbers: Iterator[int], *, events: int, batch: int = 25) -> Covered:
    """Run scenarios on all processors until so many events have happened, or one fails."""
    covered = Covered()
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        take = partial(_take, numbers, batch)
        running = [pool.submit(_cover, take()) for _ in range(2 * workers)]
        while running:
            covered.add(running.pop(0).result())
            if covered.events < events and not covered.failures:
                running.append(pool.submit(_cover, take()))
    return covered


def _take(numbers: Iterator[int], batch: int) -> list[int]:
    return [next(numbers) for _ in range(batch)]
