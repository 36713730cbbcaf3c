"""The operator's real rules in a simulated cluster: nothing that must hold is ever broken, whatever breaks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice

import pytest
from tests.simulation.operator.cases import Case, cover, in_place_case, random_case, rolling_case
from tests.simulation.operator.faults import Kind

JOBS = 100


def test_random_jobs_with_random_faults(capsys: pytest.CaptureFixture[str]) -> None:
    covered = cover(islice(map(random_case, count()), JOBS))
    with capsys.disabled():
        print(f"\n  {covered}")
    assert covered.failed is None, covered.failure
    assert len(covered.happened) > 0.9 * len(Kind)
    assert covered.ends.keys() >= {"Complete", "Failed", "gone"}


@pytest.mark.parametrize("kind", [in_place_case, rolling_case])
def test_jobs_about_which_most_others_say_little(
    kind: Callable[[int], Case], capsys: pytest.CaptureFixture[str]
) -> None:
    covered = cover(islice(map(kind, count()), JOBS // 4))
    with capsys.disabled():
        print(f"\n  {covered}")
    assert covered.failed is None, covered.failure


def test_a_run_is_replayed_from_its_number() -> None:
    first, second = (random_case(8).run() for _ in range(2))
    assert first.history == second.history
