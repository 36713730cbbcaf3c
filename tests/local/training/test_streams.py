"""A stream that cannot be indexed, trained through a death: each sample of each lane in exactly one step."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, brief, running

from fthsdp.data.lanes import POSITIONS

pytestmark = pytest.mark.local


def test_each_sample_of_each_lane_is_trained_once_though_a_replica_dies_and_comes_back(tmp_path: Path) -> None:
    """At first it comes back with another number of lanes, which ends it."""
    arguments = (*brief(steps=36, compute=0.02), "--lanes", "16")
    with running(Job(tmp_path, ranks=1, arguments=arguments, lingers_after=5)) as job:
        job.wait_for_step(3)
        job.kill(2)
        job.arguments = (*arguments[:-1], "8")
        job.start_replica(2, attempt=1)
        assert job.exit_code(2, attempt=1) == 2
        assert "the dataset has 8 lanes and this run 16 lanes: they have to be the same" in job.log("r2-a1-0")
        job.arguments = arguments
        job.replace(2, attempt=1)
        report = job.finish()
        assert_sound(report, steps=36)
        assert {f["replica"] for f in report["failures"]} == {2}
        parts = {tuple(part) for step in job.steps() for part in step["trained"]}
    assert {start // POSITIONS for start, _ in parts} == set(range(16))
    for lane in range(16):
        numbers = [n % POSITIONS for start, stop in parts for n in range(start, stop) if n // POSITIONS == lane]
        assert sorted(numbers) == list(range(len(numbers)))
