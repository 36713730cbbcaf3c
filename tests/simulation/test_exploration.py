"""The protocol's real code in simulated time: nothing that must hold is ever broken, whatever breaks."""

from __future__ import annotations

from itertools import count, islice

import pytest
from tests.simulation.exhaustive import pairs, singles
from tests.simulation.scenarios import Covered, explore, leaving_case, random_case, skirmish_case, small_case

SEED = 1


def expect_nothing(covered: Covered, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n  {covered}")
    assert not covered.failures, covered.failures[0]


def test_random_jobs_with_random_faults(capsys: pytest.CaptureFixture[str]) -> None:
    covered = explore(map(random_case, count()), events=150_000)
    expect_nothing(covered, capsys)
    assert covered.endings.keys() >= {"normal", "retried", "rolled-forward", "joined"}


def test_faults_close_upon_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    expect_nothing(explore(map(skirmish_case, count()), events=100_000), capsys)


def test_replicas_leave_close_upon_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    expect_nothing(explore(map(leaving_case, count()), events=40_000), capsys)


def test_every_fault_at_every_point_of_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    expect_nothing(explore(small_case(SEED, faults) for faults in singles(SEED)), capsys)


def test_two_faults_at_points_spread_over_all_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """All pairs take hours (``make soak`` goes on with them): every test run tries one in some thousands."""
    chosen = islice(pairs(SEED, stride=97), 0, None, 53)
    expect_nothing(explore((small_case(SEED, faults) for faults in chosen), events=60_000), capsys)


def test_a_run_is_replayed_from_its_number() -> None:
    first, second = (random_case(7).run() for _ in range(2))
    assert first.checks.history == second.checks.history
    assert first.clock.now == second.clock.now
