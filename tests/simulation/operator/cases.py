"""Runs by the hundred: random jobs with random faults, each a function of its number."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.simulation.operator.checks import Violation
from tests.simulation.operator.faults import CHANGES, MACHINES, Fault, faults_of, random_faults
from tests.simulation.operator.world import World

__all__ = ["Case", "Covered", "cover", "in_place_case", "random_case", "rolling_case", "simplest"]


MESHED, BUDGETED = 0x6D657368, 0x62756467
"""Mixed into a number to decide about proxies and disruption budgets: by chance, and without a part in any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run, as data."""

    number: int
    """Seed of the job and of everything that is left to chance."""
    faults: tuple[Fault, ...]
    share_of_stills: float = 0.25
    shape: Callable[[dict[str, Any]], dict[str, Any]] = lambda spec: spec
    """What is not left to chance in the job's spec."""

    def run(self) -> World:
        """Run it to its end; raises Violation."""
        random = Random(self.number)
        spec = self.shape(_random_spec(random))
        if Random(self.number ^ BUDGETED).random() < 0.25:
            spec["nodePolicy"]["disruptionBudget"] = "MinReplicas"
        world = World(
            self.number,
            spec=spec,
            steps=random.choice([20, 100, 300]),
            poll=random.choice([5.0, 15.0, 40.0]),
            share_of_stills=self.share_of_stills,
            meshed=Random(self.number ^ MESHED).random() < 0.25,
        )
        world.run([(fault.at, fault) for fault in self.faults])
        return world

    def __str__(self) -> str:
        told = "".join(f"\n  {fault}" for fault in self.faults) or " no faults"
        return f"job {self.number} with{told}"


def _random_spec(random: Random) -> dict[str, Any]:
    replicas = random.choice([1, 2, 2, 3, 3])
    budget = {"limit": random.choice([0, 1, 3, 5, 5, 20]), "windowSeconds": random.choice([60, 600, 3600])}
    backoff = {"initialSeconds": random.choice([0, 5, 30]), "maxSeconds": random.choice([30, 120])}
    force = random.choice([False, False, True])
    kept: dict[str, Any] = random.choice([{}, {"checkpoint": {"path": "/checkpoints", "everySteps": 10}}])
    return {
        "replicas": replicas,
        "minReplicas": random.randint(1, replicas),
        "spares": random.choice([0, 0, 0, 1]),
        "podsPerReplica": random.choice([1, 2, 2, 3]),
        "updatePolicy": {
            "type": random.choice(["Rolling", "Rolling", "OnRestart", "Recreate" if kept else "Rolling"]),
            "maxUnavailable": random.choice([1, 1, 2]),
            "minReadySteps": random.choice([0, 3, 3, 20]),
        },
        "success": {"policy": random.choice(["First", "First", "All"])},
        **kept,
        "template": {"spec": {"containers": [{"name": "main", "image": "x", "command": ["train"]}]}},
        "failurePolicy": {
            "perReplica": budget,
            "backoff": backoff,
            "onExhausted": random.choice(["AbandonReplica", "FailJob"]),
            "simultaneousFraction": random.choice([0, 0.5, 1, 1]),
            **random.choice([{}, {"inPlace": {}}]),
            **random.choice([{}, {}, {"job": {"limit": random.choice([0, 3, 10]), "windowSeconds": 600}}]),
        },
        **random.choice([{}, {}, {"ttlSecondsAfterFinished": random.choice([0, 100])}]),
        "nodePolicy": {
            "unreachableSeconds": random.choice([1, 20, 60]),
            "forceDelete": force,
            "onCordon": random.choice(["Ignore", "Migrate"]),
            "avoid": {
                "mode": random.choice(["None", "Preferred", "Preferred"]),
                "threshold": random.choice([1, 2]),
                "ttlSeconds": random.choice([60, 3600]),
                "maxNodes": random.choice([1, 2, 16]),
            },
        },
        "deadlines": {
            "startSeconds": random.choice([60, 300, 1800]),
            **random.choice([{}, {"scheduleSeconds": random.choice([10, 60])}]),
            **random.choice([{}, {}, {}, {"activeSeconds": random.choice([50, 400])}]),
            **({"terminationSeconds": random.choice([1, 60])} if force and random.random() < 0.5 else {}),
        },
    }


def random_case(number: int) -> Case:
    """Return a random job with random faults."""
    random = Random(~number & 0xFFFFFFFF)
    most, until = random.choice([1, 4, 8, 16, 24]), random.choice([20.0, 60.0, 150.0])
    return Case(number=number, faults=tuple(random_faults(random, most=most, until=until)))


def _restarted_in_place(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a job of many pods that trains for long, is restarted in place, and lets nobody move."""
    spec |= {"replicas": 3, "minReplicas": 3, "spares": 0, "podsPerReplica": 2}
    spec["failurePolicy"] |= {"inPlace": {}, "perReplica": {"limit": 20, "windowSeconds": 600}}
    spec["nodePolicy"] |= {"onCordon": "Migrate", "unreachableSeconds": 60}
    return spec


def in_place_case(number: int) -> Case:
    """Return a job that is restarted in place, with crashes and whatever can happen to machines."""
    random = Random(~number & 0xFFFFFFFF)
    return Case(
        number=number, faults=tuple(faults_of(MACHINES, random, most=12, until=90.0)), shape=_restarted_in_place
    )


def _rolled(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a job that could spare two replicas, and is to spare one at a time."""
    spec |= {"replicas": 4, "minReplicas": 2, "spares": 0, "podsPerReplica": 1}
    spec["updatePolicy"] |= {"type": "Rolling", "maxUnavailable": 1}
    return spec


def rolling_case(number: int) -> Case:
    """Return a job whose user changes his mind again and again."""
    random = Random(~number & 0xFFFFFFFF)
    return Case(number=number, faults=tuple(faults_of(CHANGES, random, most=8, until=90.0)), shape=_rolled)


@dataclass(slots=True)
class Covered:
    """How much was run."""

    runs: int = 0
    plans: int = 0
    stills: int = 0
    """Plans after which time stood still to see where they lead."""
    seconds: float = 0.0
    """Simulated."""
    happened: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    failed: Case | None = None

    def add(self, world: World) -> None:
        """Count a run."""
        self.runs += 1
        self.plans += world.checks.plans
        self.stills += world.checks.stills
        self.seconds += world.loop.time()
        self.happened.update(world.happened)
        self.ends.update(world.ends)

    def __str__(self) -> str:
        ends = ", ".join(f"{number:,} {name}" for name, number in self.ends.most_common())
        return (
            f"{self.runs:,} jobs over {self.seconds / 3600:,.1f} hours, {sum(self.happened.values()):,} faults"
            f" of {len(self.happened)} kinds, {self.plans:,} plans, {self.stills:,} cut short at every point ({ends})"
        )


def cover(cases: Iterable[Case]) -> Covered:
    """Run these, until one fails."""
    covered = Covered()
    for case in cases:
        try:
            covered.add(case.run())
        except Violation as violation:
            covered.failed, covered.failure = case, f"{case}\n{violation}"
            break
        except Exception:
            covered.failed, covered.failure = case, f"{case}\n{traceback.format_exc()}"
            break
    return covered


def simplest(case: Case) -> Case:
    """Leave out of a case that fails what it fails without; the counterexample is easier to read then."""
    smaller = next((fewer for fewer in _with_one_fault_less(case) if cover([fewer]).failed), None)
    return case if smaller is None else simplest(smaller)


def _with_one_fault_less(case: Case) -> Iterator[Case]:
    for left_out in range(len(case.faults)):
        yield replace(case, faults=(*case.faults[:left_out], *case.faults[left_out + 1 :]))
