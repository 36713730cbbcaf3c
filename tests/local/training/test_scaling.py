"""A job whose numbers are changed while it trains: its coordinator is started again with the new ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_computed_once, assert_sound, brief, running, wait_for

pytestmark = pytest.mark.local
STEPS = 38


def restart_coordinator(job: Job, *, replicas: int, spares: int) -> None:
    job.replicas, job.spares = replicas, spares
    job.kill_coordinator()
    job.start_coordinator()


def wait_for_contributors(job: Job, replicas: list[int]) -> None:
    wait_for(
        f"a step of the replicas {replicas}",
        lambda: bool(job.steps()) and max(job.steps(), key=lambda s: s["step"])["contributors"] == replicas,
    )


def test_a_replica_that_is_a_spare_by_the_new_numbers_comes_back_without_a_restart_and_takes_the_place_of_a_dead_one(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, arguments=brief(steps=STEPS, compute=0.02), lingers_after=3)
    with running(job):
        job.wait_for_step(2)
        restart_coordinator(job, replicas=2, spares=1)
        wait_for_contributors(job, [0, 1])
        restart_coordinator(job, replicas=3, spares=0)
        wait_for_contributors(job, [0, 1, 2])
        restart_coordinator(job, replicas=2, spares=1)
        wait_for_contributors(job, [0, 1])
        job.kill(0)
        wait_for_contributors(job, [1, 2])
        report = job.finish()
        assert_sound(report, steps=STEPS)
        assert_computed_once(job, (1,), steps=STEPS)
        assert ([(f["replica"], f["attempt"]) for f in report["failures"]], len(report["starts"])) == ([(0, 0)], 1)
        passes = job.passes(2)
        assert passes == sorted(set(passes))
        assert 0 < len(passes) < STEPS
