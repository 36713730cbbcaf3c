"""What happens when the training script itself is not the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, brief, running

pytestmark = pytest.mark.local


ARGUMENTS = brief(steps=6, compute=0.02)


class WithAnOddReplica(Job):
    """Replica 1 was started with other arguments than the rest."""

    odd = ("--batch-size", "4")

    def start_replica(self, replica: int, attempt: int = 0) -> None:
        usual = self.arguments
        if replica == 1:
            self.arguments = (*usual, *self.odd)
        super().start_replica(replica, attempt)
        self.arguments = usual


class WithAnEarlyEnd(WithAnOddReplica):
    """Replica 1 thinks that the run is shorter, so that its learning rates are others from the second step on."""

    odd = ("--steps", "3")


@pytest.mark.parametrize(
    ("kind", "code", "sentence"),
    [
        (WithAnOddReplica, 2, "or until is not that of the other replicas at step 1"),
        (WithAnEarlyEnd, 75, "the state after step 2 is not that of the other replicas"),
    ],
)
def test_a_replica_with_other_arguments_ends_with_a_sentence_and_the_others_finish(
    tmp_path: Path, kind: type[Job], code: int, sentence: str
) -> None:
    with running(kind(tmp_path, ranks=1, arguments=ARGUMENTS)) as job:
        assert job.exit_code(1) == code
        assert sentence in job.log("r1-a0-0")
        report = job.finish()
        assert_sound(report, steps=6)
        assert [f["replica"] for f in report["failures"]] == [1]
