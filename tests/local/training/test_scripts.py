"""What happens when the training script itself is not the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, running

pytestmark = pytest.mark.local


class WithAnOddBatchSize(Job):
    """Replica 1 was started with other arguments than the rest."""

    def start_replica(self, replica: int, attempt: int = 0) -> None:
        usual = self.arguments
        if replica == 1:
            self.arguments = (*usual, "--batch-size", "4")
        super().start_replica(replica, attempt)
        self.arguments = usual


def test_a_replica_with_another_batch_size_ends_with_a_sentence_and_no_sample_is_trained_twice(tmp_path: Path) -> None:
    arguments = ("--steps", "6", "--emulate-compute", "0.02")
    with running(WithAnOddBatchSize(tmp_path, ranks=1, arguments=arguments)) as job:
        assert job.exit_code(1) == 2
        assert "batch_size=4 is not that of the other replicas" in job.log("r1-a0-0")
        report = job.finish()
        assert_sound(report, steps=6)
        assert [f["replica"] for f in report["failures"]] == [1]
