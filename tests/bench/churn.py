"""Training under steady failures: four replicas, one of them killed every 15 s on average, next to torchft.

Both systems get the same failures at the same times, and whoever dies is started again at once, as an operator would.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from tests.bench.faults import WORKLOAD, await_commits, commits
from tests.bench.figures import Figure, Of, at_least, at_most
from tests.bench.jobs import SYSTEMS, FthsdpJob, Job, TorchftJob
from tests.bench.plan import Plan
from tests.bench.processes import Child

__all__ = ["steady_failures"]

REPLICAS = 4
MEAN = 15.0
"""Seconds between two failures."""


@dataclass(slots=True)
class _Found:
    rates: list[float] = field(default_factory=list)
    discarded: list[float] = field(default_factory=list)
    steps: int = 0
    failures: int = 0


def steady_failures(plan: Plan) -> list[Figure]:
    """Let both systems live through the same failures, in turns."""
    found = {system.name: _Found() for system in SYSTEMS}
    for number in range(plan.repetitions):
        failures = schedule(seed=number, seconds=plan.churn)
        for system in plan.in_turn(SYSTEMS, number):
            with system(REPLICAS, WORKLOAD) as job:
                _live_through(job, failures, plan.churn, found[system.name])
            plan.say(f"{system.name}: {found[system.name].rates[-1]:.2f} samples/s,"
                     f" {found[system.name].discarded[-1]:.0%} of passes discarded")  # fmt: skip
    return _figures(found[FthsdpJob.name], found[TorchftJob.name])


def schedule(*, seed: int, seconds: float) -> list[tuple[float, int]]:
    """Return when somebody dies and a number that says who: as many at random times as there are on average."""
    dice = random.Random(seed)
    times = sorted(dice.uniform(0, seconds) for _ in range(max(1, round(seconds / MEAN))))
    return [(at, dice.randrange(1 << 16)) for at in times]


def _live_through(job: Job, failures: list[tuple[float, int]], seconds: float, found: _Found) -> None:
    everybody = list(job.replicas.values())
    await_commits(everybody, 3, after=0.0)
    began = time.monotonic()
    for at, who in failures:
        _wait_until(began + at, job, everybody)
        full = [replica for replica, child in job.replicas.items() if commits(child)]
        if len(full) < 2:
            continue  # the last one that holds the state: without a checkpoint nobody goes on from there
        victim = full[who % len(full)]
        job.kill(victim)
        everybody.append(job.spawn(victim))
        found.failures += 1
    _wait_until(began + seconds, job, everybody)
    samples, steps = _trained(everybody, began, began + seconds)
    found.rates.append(samples / seconds)
    found.discarded.append(sum(map(_discarded, everybody)) / sum(_passes(child) for child in everybody))
    found.steps += steps


def _wait_until(end: float, job: Job, everybody: list[Child]) -> None:
    """Wait until then; who ends by itself meanwhile is started again, too."""
    while (left := end - time.monotonic()) > 0:
        for replica in [replica for replica, child in job.replicas.items() if not child.alive]:
            job.kill(replica)
            everybody.append(job.spawn(replica))
        time.sleep(min(left, 0.1))


def _trained(children: list[Child], began: float, ended: float) -> tuple[int, int]:
    """Return the samples of the steps committed in this time, and how many steps these were.

    Where a system says how many took part in a step, that counts; else how many committed it, which leaves out who
    died in between.
    """
    width: dict[int, int] = {}
    for child in children:
        for event in child.events:
            if event.what == "committed" and event.fields["ok"] and began <= event.t <= ended:
                width[event.step] = int(event.fields.get("participants", width.get(event.step, 0) + 1))
    return sum(width.values()) * WORKLOAD.samples, len(width)


def _passes(child: Child) -> int:
    return sum(event.what == "computed" for event in child.events)


def _discarded(child: Child) -> int:
    """Count the passes of a replica after which it began another one although it had not committed a step."""
    wasted, computed = 0, False
    for event in child.events:
        if event.what == "computed":
            wasted += computed
            computed = True
        elif event.what == "committed" and event.fields["ok"]:
            computed = False
    return wasted


def _figures(ours: _Found, peers: _Found) -> list[Figure]:
    where = f"{REPLICAS} replicas, a failure each {MEAN:g} s on average"
    return [
        Figure(
            name=f"passes discarded, {where}",
            unit="%",
            values=tuple(ours.discarded),
            peer=TorchftJob.name,
            peer_values=tuple(peers.discarded),
            must=at_most(0),
            aim=at_most(0),
            note=f"{ours.failures} failures and {ours.steps} steps with us, {peers.failures} and {peers.steps} with"
            " torchft",
        ),
        Figure(
            name=f"samples trained per second, {where}",
            unit="/s",
            values=tuple(ours.rates),
            peer=TorchftJob.name,
            peer_values=tuple(peers.rates),
            must=at_least(1.5, Of.RATIO),
        ),
    ]
