"""The operator's real rules in a simulated cluster: nothing that must hold is ever broken, whatever breaks."""

from __future__ import annotations

from itertools import count, islice

import pytest
from tests.simulation.operator.cases import cover, in_place_case, random_case
from tests.simulation.operator.faults import Kind

JOBS = 100


def test_random_jobs_with_random_faults(capsys: pytest.CaptureFixture[str]) -> None:
    covered = cover(islice(map(random_case, count()), JOBS))
    with capsys.disabled():
        print(f"\n  {covered}")
    assert covered.failed is None, covered.failure
    assert len(covered.happened) > 0.9 * len(Kind)
    assert covered.ends.keys() >= {"Complete", "Failed", "gone"}


def test_jobs_that_are_restarted_in_place_while_machines_fail(capsys: pytest.CaptureFixture[str]) -> None:
    covered = cover(islice(map(in_place_case, count()), JOBS // 4))
    with capsys.disabled():
        print(f"\n  {covered}")
    assert covered.failed is None, covered.failure


def test_a_run_is_replayed_from_its_number() -> None:
    first, second = (random_case(8).run() for _ in range(2))
    assert first.history == second.history
