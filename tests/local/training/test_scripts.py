"""What happens when the training script itself is not the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, brief, running

pytestmark = pytest.mark.local


class WithOddReplicas(Job):
    """Two replicas were started with other arguments than the rest."""

    def start_replica(self, replica: int, attempt: int = 0) -> None:
        usual = self.arguments
        self.arguments = (*usual, *ODD.get(replica, ()))
        super().start_replica(replica, attempt)
        self.arguments = usual


ODD = {
    1: ("--batch-size", "4"),
    # It thinks that the run is shorter, so that its learning rates are others from the second step on.
    2: ("--steps", "3"),
}
ENDS = [
    (1, 2, "or until is not that of the other replicas at step 1"),
    (2, 75, "the state after step 2 is not that of the other replicas"),
]


def test_replicas_with_other_arguments_end_with_a_sentence_and_the_others_finish(tmp_path: Path) -> None:
    with running(WithOddReplicas(tmp_path, replicas=4, ranks=1, arguments=brief(steps=6, compute=0.02))) as job:
        for replica, code, sentence in ENDS:
            assert job.exit_code(replica) == code
            assert sentence in job.log(f"r{replica}-a0-0")
        report = job.finish()
        assert_sound(report, steps=6)
        assert [f["replica"] for f in report["failures"]] == [1, 2]
