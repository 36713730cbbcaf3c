"""What a death costs the survivors, and how long a successor needs: 32 million parameters, next to torchft.

A stall is the time that the step in flight took a survivor, from commit to commit, less an ordinary step: what was
detected, decided, connected and done again is all in there, for us and for the peer alike.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tests.bench.figures import Figure, Of, at_most
from tests.bench.jobs import SYSTEMS, FthsdpJob, Job, TorchftJob
from tests.bench.plan import Plan
from tests.bench.processes import BenchmarkFailed, Child
from tests.bench.workload import Workload

__all__ = ["await_commits", "commits", "inside_the_collective", "kills_and_a_freeze", "warm_up"]

WORKLOAD = Workload(parameters=32, compute=0.25)
WARM = 3
"""Steps before the first one that counts."""
QUIET = 4
"""Ordinary steps that are measured before anything happens."""


# --- reading what replicas said ---------------------------------------------------------------------------------------


def commits(child: Child) -> list[float]:
    """Return when a replica committed its steps."""
    return [event.t for event in child.events if event.what == "committed" and event.fields["ok"]]


def ordinary(child: Child, *, until: float) -> float:
    """Return the median seconds between two commits of a replica before this moment, the first few left out."""
    times = [t for t in commits(child) if t <= until][WARM - 1 :]
    return statistics.median(after - before for before, after in pairwise(times))


def in_flight(victim: Child) -> int:
    """Return the step that a replica was in when it was stopped."""
    return max(event.step for event in victim.events if event.what == "begin")


def stall(child: Child, step: int, at: float) -> float:
    """Return by how many seconds this step, or the one after it, took a survivor longer than an ordinary one.

    The one after it where the victim had given everything to the step that it was in. A survivor that was left behind
    by the others, and got their state for a later step, ends its wait with that one.
    """
    ends = [(event.step, event.t) for event in child.events if event.what == "committed" and event.fields["ok"]]
    before = max(t for number, t in ends if number < step)
    first, second = [t for number, t in ends if number >= step][:2]
    return max(first - before, second - first) - ordinary(child, until=at)


def await_stall(children: Iterable[Child], step: int) -> None:
    """Wait until each of these replicas has committed this step, or later ones, and another one."""
    for child in children:
        first = child.wait_until("committed", lambda e: e.what == "committed" and e.fields["ok"] and e.step >= step)
        await_commits([child], 1, after=first.t)


def repeated(children: Iterable[Child]) -> int:
    """Return how many forward and backward passes were run for a step by a replica that had run one for it before."""
    passes = [[event.step for event in child.events if event.what == "computed"] for child in children]
    return sum(len(steps) - len(set(steps)) for steps in passes)


def await_commits(children: Iterable[Child], count: int, *, after: float) -> None:
    """Wait until each of these replicas has committed so many steps later than this moment."""
    for child in children:
        seen = after
        for _ in range(count):
            seen = child.wait_until(
                "committed", lambda e, seen=seen: e.what == "committed" and e.fields["ok"] and e.t > seen
            ).t


# --- at which moment --------------------------------------------------------------------------------------------------


def warm_up(job: Job) -> float:
    """Let a job train until its ordinary step is known, and return that."""
    await_commits(job.replicas.values(), WARM + QUIET, after=0.0)
    return statistics.median(ordinary(child, until=time.monotonic()) for child in job.replicas.values())


def wait_into_step(child: Child, seconds: float) -> None:
    """Return so many seconds after this replica begins its next step."""
    event = child.wait_for("begin", after=time.monotonic())
    time.sleep(max(event.t + seconds - time.monotonic(), 0.0))


def wait_into_collective(child: Child, seconds: float) -> None:
    """Return so many seconds after this replica has computed its gradients and begins to exchange them."""
    event = child.wait_for("computed", after=time.monotonic())
    time.sleep(max(event.t + seconds - time.monotonic(), 0.0))


# --- the rows ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    stalls: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    imports: list[float] = field(default_factory=list)
    """Seconds of the newcomer from its spawn until torch and all else is imported."""
    builds: list[float] = field(default_factory=list)
    """Seconds from there until its model and optimizer are there."""
    frozen: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    """Seconds of processor time that an ordinary step takes a replica."""


def kills_and_a_freeze(plan: Plan) -> list[Figure]:
    """A kill somewhere in a step and a rejoin, ours and torchft's in turns; after ours another replica is frozen."""
    found = {system.name: _Found() for system in SYSTEMS}
    for number in range(plan.repetitions):
        phase = (number + 0.5) / plan.repetitions
        for system in plan.in_turn(SYSTEMS, number):
            with system(3, WORKLOAD) as job:
                _kill_and_rejoin(job, phase, found[system.name])
                if isinstance(job, FthsdpJob):
                    _freeze(job, found[system.name])
                found[system.name].passes.append(repeated([*job.replicas.values(), *job.gone]))
            plan.say(f"{system.name}: stall {found[system.name].stalls[-1]:.3f} s,"
                     f" joined after {found[system.name].latencies[-1]:.2f} s")  # fmt: skip
    return _figures(found[FthsdpJob.name], found[TorchftJob.name])


def _kill_and_rejoin(job: Job, phase: float, found: _Found) -> None:
    step, work = warm_up(job), _work(job)
    victim = job.replicas[2]
    wait_into_step(victim, phase * step)
    killed = job.kill(2)
    found.steps.append(step)
    found.work.append(work)
    found.stalls.append(_stall(job, victim, killed))
    child = job.spawn(2)
    joined = job.joined(child)
    found.latencies.append(joined.t - child.spawned)
    imported, ready = child.wait_for("imported"), child.wait_for("ready")
    found.imports.append(imported.t - child.spawned)
    found.builds.append(ready.t - imported.t)
    await_commits(job.replicas.values(), 3, after=joined.t)


def _work(job: Job) -> float:
    """Return how much processor time a step takes a replica, over a few ordinary ones."""
    children = list(job.replicas.values())
    await_commits(children, 1, after=time.monotonic())
    before = sum(child.processor_seconds for child in children)
    await_commits(children, QUIET, after=time.monotonic())
    return (sum(child.processor_seconds for child in children) - before) / QUIET / len(children)


def _stall(job: Job, victim: Child, at: float) -> float:
    """Return the longest stall of the survivors, once they are through it."""
    step = in_flight(victim)
    await_stall(job.survivors, step)
    return max(stall(child, step, at) for child in job.survivors)


def _freeze(job: FthsdpJob, found: _Found) -> None:
    wait_into_step(job.replicas[1], WORKLOAD.compute / 2)
    frozen = job.replicas.pop(1)
    job.gone.append(frozen)
    try:
        at = frozen.signal(signal.SIGSTOP)
        found.frozen.append(_stall(job, frozen, at) - _silence_timeout())
    finally:
        frozen.end()


def _silence_timeout() -> float:
    from fthsdp import FtarSettings

    return FtarSettings().silence_timeout


def _figures(ours: _Found, peers: _Found) -> list[Figure]:
    size = "32 M parameters"
    return [
        Figure(
            name=f"survivors' stall after SIGKILL, 3 replicas, {size}",
            values=tuple(ours.stalls),
            peer=TorchftJob.name,
            peer_values=tuple(peers.stalls),
            must=at_most(0.5, Of.RATIO),
            aim=at_most(0.1),
            note=_steps(ours, peers),
        ),
        Figure(
            name="forward and backward passes repeated by survivors",
            unit="",
            values=tuple(ours.passes),
            peer=TorchftJob.name,
            peer_values=tuple(peers.passes),
            must=at_most(0),
            aim=at_most(0),
        ),
        Figure(
            name="frozen peer: stall beyond silence_timeout",
            values=tuple(ours.frozen),
            must=at_most(0.5),
            aim=at_most(0.2),
            note="below 0 where a keep-alive was already late when the peer was frozen",
        ),
        Figure(
            name=f"spawn to active, {size}",
            values=tuple(ours.latencies),
            peer=TorchftJob.name,
            peer_values=tuple(peers.latencies),
            must=at_most(0.5, Of.RATIO),
            note=f"ours: {_parts(ours)}; torchft: {_parts(peers)}; the aim is to be bound by the start of the process",
        ),
    ]


def _parts(found: _Found) -> str:
    imports, builds = statistics.median(found.imports), statistics.median(found.builds)
    rest = statistics.median(found.latencies) - imports - builds
    return f"imports {imports:.2f} s, model and optimizer {builds:.2f} s, from there {rest:.2f} s"


def _steps(ours: _Found, peers: _Found) -> str:
    return (
        f"an ordinary step takes {statistics.median(ours.steps):.2f} s with us,"
        f" {statistics.median(peers.steps):.2f} s with torchft, of which {WORKLOAD.compute:g} s are emulated compute;"
        f" it takes a replica {statistics.median(ours.work):.2f} s of processor time with us,"
        f" {statistics.median(peers.work):.2f} s with torchft"
    )


def inside_the_collective(plan: Plan) -> list[Figure]:
    """Five replicas; one is killed while it exchanges gradients, and two of the others are no neighbours of it."""
    stalls: dict[str, list[float]] = {system.name: [] for system in SYSTEMS}
    endings: Counter[str] = Counter()
    for number in range(plan.repetitions):
        for system in plan.in_turn(SYSTEMS, number):
            with system(5, WORKLOAD) as job:
                exchange = warm_up(job) - WORKLOAD.compute
                victim = job.replicas[2]
                wait_into_collective(victim, 0.4 * exchange)
                killed = job.kill(2)
                stalls[system.name].append(_stall(job, victim, killed))
                if isinstance(job, FthsdpJob):
                    endings[_ending(job, in_flight(victim))] += 1
            plan.say(f"{system.name}: stall {stalls[system.name][-1]:.3f} s")
    return [
        Figure(
            name="the same, 5 replicas, killed inside the collective",
            values=tuple(stalls[FthsdpJob.name]),
            peer=TorchftJob.name,
            peer_values=tuple(stalls[TorchftJob.name]),
            must=at_most(0.5),
            aim=at_most(0.15),
            note="a stall is that of the survivor who waited longest; the step in flight ended with us as: "
            + ", ".join(f"{ending} ({count} x)" for ending, count in sorted(endings.items())),
        )
    ]


def _ending(job: FthsdpJob, step: int) -> str:
    """Wait for the survivors' records of a step and return how it ended for them."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        lines = [line for line in job.written("steps.jsonl") if line["step"] == step]
        if len(lines) >= len(job.survivors):
            return "/".join(sorted({line["outcome"] for line in lines}))
        time.sleep(0.1)
    raise BenchmarkFailed(f"the record of the run has not {len(job.survivors)} lines of step {step}")
