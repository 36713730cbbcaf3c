"""A rank that is alive and does not go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_computed_once, assert_sound, brief, running
from tests.local.training.points import Hang

pytestmark = pytest.mark.local

TIMES = ("--answer-timeout", "2", "--stall-timeout", "8")
RING = {"FTHSDP_SILENCE_TIMEOUT": "3", "FTHSDP_CONNECT_TIMEOUT": "4"}


def test_a_rank_that_never_joins_a_step_is_named_with_the_line_where_it_hangs_and_the_others_finish(
    tmp_path: Path,
) -> None:
    with running(
        Job(
            tmp_path,
            arguments=brief(steps=12, compute=0.02),
            silence_timeout=5.0,
            times=TIMES,
            environment=RING,
            trouble={(1, 0): Hang(step=4, rank=1)},
        )
    ) as job:
        report = job.finish()
        assert_sound(report, steps=12)
        assert_computed_once(job, (0, 2), steps=12)
        (failure,) = report["failures"]
        assert (failure["replica"], failure["cause"]) == (1, "Hung")
        assert failure["reason"].startswith("replica 1 rank 1 never joined the collective of step 4")
        assert "in the body" in failure["reason"]
        assert "in wait_for_ever / time.sleep(3600)" in failure["reason"]
        assert [stall["step"] for stall in report["stalls"]] == [4]
