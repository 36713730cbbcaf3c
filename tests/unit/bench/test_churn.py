"""Failures of a benchmark are the same for everybody who lives through them."""

from __future__ import annotations

from tests.bench.churn import MEAN, schedule


def test_two_systems_live_through_the_same_failures() -> None:
    assert schedule(seed=3, seconds=90) == schedule(seed=3, seconds=90)
    assert schedule(seed=3, seconds=90) != schedule(seed=4, seconds=90)


def test_there_are_as_many_failures_as_on_average() -> None:
    failures = schedule(seed=0, seconds=6 * MEAN)
    assert len(failures) == 6
    assert all(0 <= at < 6 * MEAN for at, _ in failures)
    assert failures == sorted(failures)
