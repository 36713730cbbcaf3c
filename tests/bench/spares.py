"""What a death costs in capacity while a hot spare stands by."""

from __future__ import annotations

import time

from tests.bench.faults import await_commits, commits, warm_up
from tests.bench.figures import Figure, at_most
from tests.bench.jobs import FthsdpJob
from tests.bench.plan import Plan
from tests.bench.processes import BenchmarkFailed
from tests.bench.workload import Workload

__all__ = ["one_spare"]

WORKLOAD = Workload(parameters=2, compute=0.25)
NAME = "capacity with one spare: steps below full width after the decision"
WATCHED = 6
"""Steps after the decision that are looked at."""


def one_spare(plan: Plan) -> list[Figure]:
    """Kill an active replica while a spare has caught up, and count the steps that begin with fewer replicas."""
    narrow: list[float] = []
    for _ in range(plan.repetitions):
        with FthsdpJob(2, WORKLOAD, spares=1) as job:
            spare = _the_spare(job)
            standby = job.replicas.pop(spare)
            warm_up(job)
            await_commits(job.replicas.values(), 10, after=time.monotonic())  # it has caught up long before
            survivor, victim = job.replicas
            killed = job.kill(victim)
            job.replicas[spare] = standby
            await_commits([job.replicas[survivor]], WATCHED + 3, after=killed)
            narrow.append(_narrow_steps(job))
        plan.say(f"{narrow[-1]:.0f} steps below full width after the decision")
    return [Figure(name=NAME, unit="steps", values=tuple(narrow), must=at_most(0), aim=at_most(0))]


def _the_spare(job: FthsdpJob) -> int:
    """Wait until all others train; who came last is the spare, whatever its index."""
    for child in job.replicas.values():
        child.wait_for("ready")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        idle = [replica for replica, child in job.replicas.items() if not commits(child)]
        if len(idle) == job.spares:
            return idle[0]
        time.sleep(0.1)
    raise BenchmarkFailed("the job with a spare did not begin to train")


def _narrow_steps(job: FthsdpJob) -> int:
    """Count the steps that began after the decision and had fewer contributors than the job wants."""
    decided = max(event["step"] for event in job.written("events.jsonl") if event["kind"] == "decided")
    first = decided + 2  # the one after the last that counts was in flight
    end = time.monotonic() + 30
    while time.monotonic() < end:
        wide = {line["step"]: len(line["contributors"]) for line in job.written("steps.jsonl")}
        if max(wide, default=0) >= first + WATCHED - 1:
            return sum(width < job.count for step, width in wide.items() if step >= first)
        time.sleep(0.1)
    raise BenchmarkFailed("the record of the run ends at the decision")
