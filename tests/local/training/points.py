"""What goes wrong inside a rank, at an exact point of its work: it kills itself there, or stays there for ever.

The product has no hooks for this. A forked rank wraps one function of its own process before training begins; when that
is called in the step that was asked for, it leaves a marker, and is hit by a SIGKILL that is as real as any.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import fthsdp.gradients
import fthsdp.rank
from fthsdp.catchup.download import Download
from fthsdp.ftar import collective
from fthsdp.group import ReplicaGroup, Step
from fthsdp.protocol.catchup import CatchUp
from fthsdp.recipes import llama, tiny_llama
from fthsdp.state import TrainState

__all__ = ["BEFORE_TRAINING", "POINTS", "Hang", "Kill", "Linger", "Mistake", "OtherWeights", "count_passes"]

BEFORE_TRAINING = 0
"""The step of a rank that has begun none: what comes before is its catch-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A call of ``name`` in ``owner`` (a class or module) for whose arguments ``when`` holds."""

    owner: Any
    name: str
    when: Callable[..., bool] = lambda *args, **names: True


def _adds(sums: bool) -> Callable[..., bool]:
    """Whether the next chunk of an all-reduce is added to ours, or is a finished sum."""

    def when(reduce: collective.AllReduce, position: int, *args: Any, **names: Any) -> bool:
        return reduce._schedule.receives[position].adds is sums

    return when


POINTS = {
    "forward": Point(owner=llama._FeedForward, name="forward"),
    "backward": Point(owner=fthsdp.gradients.Buckets, name="_accumulated"),
    "reduce-scatter": Point(owner=collective.AllReduce, name="incoming", when=_adds(True)),
    "all-gather": Point(owner=collective.AllReduce, name="incoming", when=_adds(False)),
    "vote": Point(owner=fthsdp.rank, name="vote", when=lambda ballot, group: bool(ballot.done)),
    # The weights have moved already, the schedule not yet.
    "update": Point(owner=LambdaLR, name="step"),
    # The head of a stripe is there, its bytes are on their way.
    "download": Point(owner=Download, name="_window"),
    "replay": Point(owner=CatchUp, name="_replay_next"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL at the first call of a point in a step."""

    point: str
    step: int
    marker: Path
    rank: int

    def __call__(self, rank: int) -> None:
        """Prepare a rank that has just been forked."""
        if rank == self.rank:
            _at(POINTS[self.point], self.step, self._die)

    def _die(self) -> None:
        self.marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The body of a step does not end: behind the last thing in it for which the ranks of a replica need each other."""

    step: int
    rank: int

    def __call__(self, rank: int) -> None:
        """Prepare a rank that has just been forked."""
        if rank == self.rank:
            _at(Point(owner=TrainState, name="flush"), self.step, wait_for_ever)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """The script has a fault that shows in one step: its forward pass raises, in every replica."""

    step: int

    def __call__(self, rank: int) -> None:
        """Prepare a rank that has just been forked."""
        _at(POINTS["forward"], self.step, self._raise)

    def _raise(self) -> None:
        raise ValueError(f"no such layer in step {self.step}")


def wait_for_ever() -> None:
    """Do nothing, and do not come back."""
    while True:
        time.sleep(3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWeights:
    """The model begins with other weights than the rest of the job has."""

    def __call__(self, rank: int) -> None:
        """Prepare a rank that has just been forked."""

        def change(model: torch.nn.Module, mesh: object) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.25)

        _before(tiny_llama, "shard", change)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linger:
    """Steps after this one take longer and longer until a file is there, so that the run waits for its test."""

    after: int
    until: Path
    first: float = 0.1
    """Seconds for which the first of them waits."""
    growth: float
    """How much longer each takes than the one before."""

    def __call__(self, rank: int) -> None:
        """Prepare a rank that has just been forked."""

        def linger(group: ReplicaGroup, number: int) -> None:
            if number <= self.after:
                return
            end = time.monotonic() + self.first * self.growth ** (number - self.after - 1)
            while not self.until.exists() and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 0.02))

        _before(ReplicaGroup, "_seed", linger)


def count_passes(file: Path) -> None:
    """Write down the step of each backward pass of this process, one a line."""

    def write(step: Step, *args: Any) -> None:
        with file.open("a") as lines:
            lines.write(f"{step.number}\n")

    _before(Step, "backward", write)


def _at(point: Point, step: int, act: Callable[[], None]) -> None:
    """Act at the first call of a point in this step."""
    now = [BEFORE_TRAINING]

    def note(group: ReplicaGroup, number: int) -> None:
        now[0] = number

    def look(*args: Any, **names: Any) -> None:
        if now[0] == step and point.when(*args, **names):
            act()

    # The step loop seeds its random numbers at the beginning of each step.
    _before(ReplicaGroup, "_seed", note)
    _before(point.owner, point.name, look)


def _before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Let ``look`` see the arguments of each call first."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*args: Any, **names: Any) -> Any:
        look(*args, **names)
        return real(*args, **names)

    setattr(owner, name, wrapped)
