"""What becomes of batch and learning rate while a replica of real processes is away."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, brief, running

pytestmark = pytest.mark.local


def test_a_constant_batch_stays_whole_from_the_step_in_which_a_replica_dies(tmp_path: Path) -> None:
    arguments = (*brief(steps=36, compute=0.02), "--batch-size", "4", "--micro-batch-size", "1")
    environment = {"FTHSDP_BATCH_POLICY": "Constant"}
    with running(Job(tmp_path, ranks=1, arguments=arguments, environment=environment, lingers_after=5)) as job:
        job.wait_for_step(3)
        job.replace(1)
        report = job.finish()
        assert_sound(report, steps=36)
        steps = job.steps()
    assert {step["total_samples"] for step in steps} == {12}
    assert (0, 2) in {tuple(step["contributors"]) for step in steps}
    assert report["samples"] == {"trained": 36 * 12, "duplicated": 0, "missing": 0, "pending": 0}


def test_who_catches_up_replays_the_learning_rates_of_the_steps_that_were_smaller(tmp_path: Path) -> None:
    arguments, environment = brief(steps=36, compute=0.02), {"FTHSDP_LR_POLICY": "Sqrt"}
    with running(Job(tmp_path, ranks=1, arguments=arguments, environment=environment, lingers_after=5)) as job:
        job.wait_for_step(3)
        job.replace(1)
        report = job.finish()
        assert_sound(report, steps=36)
    assert [(join["replica"], join["attempt"]) for join in report["joins"]] == [(1, 1)]
    assert report["joins"][0]["replayed_steps"] >= 1


def test_policies_that_do_not_go_together_end_a_rank_with_one_sentence(tmp_path: Path) -> None:
    environment = {"FTHSDP_LR_POLICY": "Sqrt", "FTHSDP_BATCH_POLICY": "Constant"}
    with running(Job(tmp_path, replicas=1, ranks=1, environment=environment)) as job:
        assert job.exit_code(0) == 2
        assert "lrPolicy Sqrt follows a batch that shrinks, and batchPolicy Constant keeps it whole" in job.log(
            "r0-a0-0"
        )
