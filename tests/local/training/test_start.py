"""How a run begins when not everybody brings the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, brief, running
from tests.local.training.points import OtherWeights

pytestmark = pytest.mark.local


def test_a_replica_with_other_initial_weights_gets_those_of_the_others_and_the_report_says_so(tmp_path: Path) -> None:
    arguments, trouble = brief(steps=36, compute=0.02), {(1, 0): OtherWeights()}
    with running(Job(tmp_path, ranks=1, arguments=arguments, trouble=trouble, lingers_after=5)) as job:
        job.wait_for_active(1, attempt=0)
        report = job.finish()
        assert_sound(report, steps=36)
        assert report["failures"] == []
        (start,) = report["starts"]
        assert (start["step"], start["replicas"], start["replaced"]) == (0, [0, 2], [1])
        assert "replicas [1] had another state, and get this one" in job.log("coordinator")
