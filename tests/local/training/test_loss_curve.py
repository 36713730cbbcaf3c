"""A death and a rejoin leave no trace in what is learnt."""

from __future__ import annotations

import statistics
from itertools import accumulate
from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, running

pytestmark = pytest.mark.local
STEPS = 40
WINDOW = 10
"""Steps at the end over which the loss is averaged."""


def curve(job: Job) -> list[tuple[int, float]]:
    """Return samples trained so far and loss, for each final step."""
    steps = sorted((s for s in job.steps() if s["replica"] == 0), key=lambda s: s["step"])
    return list(zip(accumulate(s["total_samples"] for s in steps), (s["loss"] for s in steps), strict=True))


def test_a_loss_curve_with_a_failure_ends_within_the_noise_of_one_without(tmp_path: Path) -> None:
    arguments = ("--steps", str(STEPS), "--emulate-compute", "0.02")
    with running(Job(tmp_path / "smooth", ranks=1, arguments=arguments)) as job:
        assert_sound(job.finish(), steps=STEPS)
        smooth = curve(job)
    with running(
        Job(tmp_path / "broken", ranks=1, arguments=arguments, lingers_after=STEPS - 15 - WINDOW, growth=1.5)
    ) as job:
        job.wait_for_step(8)
        job.replace(2)
        report = job.finish()
        assert_sound(report, steps=STEPS)
        assert len(report["failures"]) == len(report["joins"]) == 1
        broken = curve(job)
    samples = broken[-1][0]
    assert samples < smooth[-1][0]
    ours = [loss for _, loss in broken[-WINDOW:]]
    same = [loss for trained, loss in smooth if trained <= samples][-WINDOW:]
    noise = statistics.stdev(same) * (2 / WINDOW) ** 0.5
    assert abs(statistics.mean(ours) - statistics.mean(same)) < 4 * noise
    assert statistics.mean(ours) < broken[0][1] / 1.5
