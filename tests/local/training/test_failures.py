"""What happens to a training job of real processes when one of them dies, freezes or leaves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, brief, running

pytestmark = pytest.mark.local


def test_a_run_without_failures(tmp_path: Path) -> None:
    with running(Job(tmp_path, arguments=brief(steps=6, compute=0.02))) as job:
        report = job.finish()
        assert_sound(report, steps=6)
        assert report["failures"] == []
        assert report["outcome"] == "complete"
        assert [job.exit_code(r, rank=w) for r in range(3) for w in range(2)] == [0] * 6


def test_a_frozen_replica_is_taken_out_and_refused_when_it_thaws(tmp_path: Path) -> None:
    arguments = brief(steps=40, compute=0.02)
    with running(Job(tmp_path, silence_timeout=5.0, arguments=arguments, lingers_after=9)) as job:
        job.wait_for_step(5)
        before = max(s["step"] for s in job.steps())
        job.signal(2, signal.SIGSTOP)
        job.wait_for_step(before + 5)
        job.signal(2, signal.SIGCONT)
        assert job.exit_code(2) == 77
        report = job.finish()
        assert_sound(report, steps=40)
        assert [f["replica"] for f in report["failures"]] == [2]


def test_a_zombie_that_thaws_while_its_next_attempt_trains_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    """As when a node comes back whose pods were given up, or removed by force."""
    arguments = brief(steps=48, compute=0.02)
    with running(Job(tmp_path, silence_timeout=5.0, arguments=arguments, lingers_after=17)) as job:
        job.wait_for_step(3)
        job.signal(2, signal.SIGSTOP)
        job.start_replica(2, attempt=1)
        job.wait_for_active(2, attempt=1)
        before = max(s["step"] for s in job.steps())
        job.signal(2, signal.SIGCONT)
        assert job.exit_code(2) == 77
        job.wait_for_step(before + 3, replica=2)
        report = job.finish()
        assert_sound(report, steps=48)
        assert [(j["replica"], j["attempt"]) for j in report["joins"]] == [(2, 1)]
        late = [s for s in job.steps() if s["replica"] == 2 and s["step"] > before]
        assert {s["attempt"] for s in late} == {1}


def test_training_goes_on_without_the_coordinator_and_changes_wait_for_it(tmp_path: Path) -> None:
    with running(Job(tmp_path, arguments=brief(steps=42, compute=0.02), lingers_after=11)) as job:
        job.wait_for_step(5)
        job.kill_coordinator()
        job.start_coordinator()
        job.wait_for_step(10)
        job.replace(0)
        report = job.finish()
        assert_sound(report, steps=42)


def test_below_min_replicas_the_job_pauses_and_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments = brief(steps=36, compute=0.02)
    with running(Job(tmp_path, replicas=2, min_replicas=2, arguments=arguments, lingers_after=5)) as job:
        job.wait_for_step(3)
        job.replace(1)
        report = job.finish()
        assert_sound(report, steps=36)
        assert {len(s["contributors"]) for s in job.steps()} <= {1, 2}


def test_one_replica_of_one_rank_is_a_job_too(tmp_path: Path) -> None:
    with running(Job(tmp_path, replicas=1, ranks=1, arguments=brief(steps=5, compute=0.01))) as job:
        report = job.finish()
        assert report["steps_final"] == 5
        assert report["samples"]["missing"] == 0
