"""What the survivors notice of a newcomer that downloads the state, over a wire that takes one or ten steps for it."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

from tests.bench.faults import await_commits, warm_up
from tests.bench.figures import Figure, at_most
from tests.bench.jobs import FthsdpJob
from tests.bench.plan import Plan
from tests.bench.processes import BenchmarkFailed, Child
from tests.bench.workload import Workload

__all__ = ["downloads"]

WORKLOAD = Workload(parameters=4, compute=0.25)
FACTORS = (1, 10)
"""How many steps a download takes."""
QUIET = 6
"""Ordinary steps that are measured before and after."""


def downloads(plan: Plan) -> list[Figure]:
    """Kill a replica and start it again behind a slow wire; compare the survivors' steps with their ordinary ones."""
    slower: dict[int, list[float]] = {factor: [] for factor in FACTORS}
    for _ in range(plan.repetitions):
        for factor in FACTORS:
            with FthsdpJob(3, WORKLOAD) as job:
                slower[factor].append(_join(job, factor))
            plan.say(f"download of {factor} steps: survivors slower by {slower[factor][-1]:.1%}")
    return [
        Figure(
            name=f"survivors' slowdown while a joiner downloads for {factor} x a step's time",
            unit="%",
            values=tuple(values),
            must=at_most(0.05),
            aim=at_most(0.02),
            note="mean step from where the joiner enters until it is active, against the median with all active",
        )
        for factor, values in slower.items()
    ]


def _join(job: FthsdpJob, factor: int) -> float:
    step = warm_up(job)
    await_commits(job.survivors, QUIET, after=time.monotonic())
    killed = job.kill(2)
    await_commits(job.survivors, 2, after=killed)
    child = job.spawn(2, download=factor * step)
    joined = job.joined(child)
    await_commits(job.replicas.values(), QUIET, after=joined.t)
    join = _written(job, joined.step)
    during = _steps_with_joiner(job, killed_before=join["first_step"])
    if len(during) < factor:
        raise BenchmarkFailed(f"the download was to take {factor} steps and was over after {len(during)}: not slowed")
    return statistics.median(_slowdown(child, during, killed, joined.t) for child in job.survivors)


def _written(job: FthsdpJob, step: int) -> dict[str, Any]:
    """Wait until the record of the run holds the join and the steps up to it; return the join."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        steps = [line for line in job.written("steps.jsonl") if line["step"] >= step]
        joins = job.written("joins.jsonl")
        if steps and joins:
            return joins[-1]
        time.sleep(0.1)
    raise BenchmarkFailed("the record of the run has no join")


def _steps_with_joiner(job: FthsdpJob, *, killed_before: int) -> set[int]:
    """Return the steps from the boundary at which the joiner came in as a shadow up to the one where it is active."""
    decided = max(event["epoch"] for event in job.written("events.jsonl") if event["kind"] == "decided")
    lines = [line for line in job.written("steps.jsonl") if line["replica"] == 0]
    return {line["step"] for line in lines if line["epoch"] > decided and line["step"] < killed_before}


def _slowdown(child: Child, during: set[int], killed: float, joined: float) -> float:
    begins = [(event.step, event.t) for event in child.events if event.what == "begin"]
    laps = {step: (t, after - t) for (step, t), (_, after) in pairwise(begins)}
    quiet = [lap for step, (t, lap) in laps.items() if step > 3 and (t + lap < killed or t > joined)]
    return statistics.mean(laps[step][1] for step in during) / statistics.median(quiet) - 1
