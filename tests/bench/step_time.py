"""A healthy step with everything on, beside the same training with plain HSDP over gloo."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from tests.bench.figures import PAIRED, Figure, Of, at_most
from tests.bench.jobs import FthsdpJob, Job
from tests.bench.plan import Plan
from tests.bench.processes import Child, Event
from tests.bench.recipe import RANKS, REPLICAS
from tests.bench.workload import Workload
from tests.ports import free_port

__all__ = ["healthy_steps"]

STEPS = 3
"""Steps of a block."""


class PlainHsdp(Job):
    """The ranks of one ordinary job; ``replicas`` holds each of them by its rank."""

    name = "plain HSDP"

    def start(self) -> None:
        self._port = str(free_port())
        for rank in range(self.count):
            self.spawn(rank)

    def spawn(self, replica: int, *, download: float = 0.0) -> Child:
        child = self.replicas[replica] = self._start(
            f"rank-{replica}",
            [sys.executable, "-m", "tests.bench.worker_hsdp"],
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=self._port,
            RANK=str(replica),
            WORLD_SIZE=str(self.count),
        )
        return child

    def joined(self, child: Child) -> Event:
        return child.wait_for("ready")


def healthy_steps(plan: Plan) -> list[Figure]:
    """Let two jobs take turns, a block of steps each, and compare the blocks one by one."""
    with (
        FthsdpJob(REPLICAS, Workload(), ranks=RANKS, module="tests.bench.worker_recipe") as ours,
        PlainHsdp(REPLICAS * RANKS, Workload()) as plain,
    ):
        teams = (list(ours.ranks), list(plain.replicas.values()))
        for team in teams:
            _block(team)
        seconds: tuple[list[float], list[float]] = ([], [])
        busy: tuple[list[float], list[float]] = ([], [])
        for number in range(plan.blocks):
            for which in plan.in_turn((0, 1), number):
                block = _block(teams[which])
                seconds[which].append(block[0])
                busy[which].append(block[1])
            plan.say(f"step {seconds[0][-1]:.3f} s, plain HSDP {seconds[1][-1]:.3f} s")
    return [
        Figure(
            name="step time, everything on",
            unit=PAIRED,
            values=tuple(seconds[0]),
            peer=plain.name,
            peer_values=tuple(seconds[1]),
            must=at_most(1.02, Of.RATIO),
            aim=at_most(1.0, Of.RATIO),
            note=f"the recipe's small model, {REPLICAS} replicas of {RANKS} ranks, blocks of {STEPS} steps in turns;"
            " the ratio is the median of block by block; processor time of a step, all ranks together:"
            f" {statistics.median(busy[0]):.2f} s with us, {statistics.median(busy[1]):.2f} s with plain HSDP",
        )
    ]


def _block(team: Sequence[Child]) -> tuple[float, float]:
    """Let a job do one block; return a step's seconds, first rank's start to last one's end, and processor seconds."""
    seen = [sum(event.what == "block" for event in child.events) for child in team]
    for child in team:
        child.tell(str(STEPS))
    ends = [child.wait_count("block", count + 1) for child, count in zip(team, seen, strict=True)]
    seconds = max(end.t for end in ends) - min(float(end.fields["began"]) for end in ends)
    return seconds / STEPS, sum(float(end.fields["busy"]) for end in ends) / STEPS
