"""The record of a run of months is no larger than that of a day, and says the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.coordinator.test_record import START, Run, decided, removed, step

from fthsdp.coordinator import record
from fthsdp.coordinator.events import Started
from fthsdp.coordinator.messages import JoinRecord, Records

KEPT = 10


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep ten steps one by one."""
    monkeypatch.setattr(record, "FEWEST_KEPT", KEPT)
    monkeypatch.setattr(record, "KEPT_LAPS", 0)


def a_run_with_failures(steps: int) -> Run:
    """Replica 2 dies in every twentieth step, which takes the others 1.5 s, and is back five steps later."""
    run, at = Run(), 0.0
    for number in range(1, steps + 1):
        here = number % 20
        if here == 0:
            run.happens(removed(2, at + 0.5), at + 0.5)
            run.happens(decided(number, number - 1), at + 0.6)
        seconds = 1.5 if here == 0 else 1.0
        away = here == 0 or (here < 5 and number > 20)
        who = (0, 1) if away else (0, 1, 2)
        run.steps(*(step(replica, number, at, at + seconds, attempt=number // 20) for replica in who))
        at += seconds
        if here == 5 and number > 20:
            join = JoinRecord(
                replica=2, attempt=number // 20, started=START + at - 4, active=START + at, first_step=number, bytes=9,
                replayed_steps=2,
            )  # fmt: skip
            run.record.add(Records(joins=(join,)))
    return run


def without_figures(report: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is of the newest steps only."""
    return {key: value for key, value in report.items() if key not in ("effective_training_time", "step_seconds")}


def test_it_says_the_same_as_one_that_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = a_run_with_failures(300).report
    monkeypatch.setattr(record, "FEWEST_KEPT", 60)
    monkeypatch.setattr(record, "KEPT_LAPS", 0)
    report = a_run_with_failures(300).report
    assert len(report["failures"]) == 15
    assert without_figures(report) == without_figures(whole)
    assert report["effective_training_time"] == pytest.approx(whole["effective_training_time"], abs=0.002)


@pytest.mark.usefixtures("forgetful")
def test_steps_that_are_kept_one_by_one_do_not_grow_in_number() -> None:
    run = Run()
    run.quiet(1, 500, 0, 1, 2)
    assert len(run.record._steps) <= 2 * KEPT
    assert sum(map(len, run.record._laps.values())) <= 3 * 2 * KEPT
    assert run.report["steps_final"] == 500
    assert run.report["samples"] == {"trained": 6000, "duplicated": 0, "missing": 0, "pending": 0}
    assert run.report["digests"] == {"compared": 1000, "mismatched": 0}
    assert run.report["effective_training_time"] == 1.0


@pytest.mark.usefixtures("forgetful")
def test_a_record_that_a_late_coordinator_began_misses_nothing_from_before() -> None:
    run = Run()
    run.quiet(1000, 1100, 0, 1, 2)
    assert run.report["samples"] == {"trained": 12 * 101, "duplicated": 0, "missing": 0, "pending": 0}


@pytest.mark.usefixtures("forgetful")
def test_a_sample_that_was_trained_in_an_old_step_and_again_is_a_duplicate() -> None:
    run = Run()
    run.quiet(1, 100, 0, 1, 2)
    run.steps(step(0, 101, 100, 101, trained=((0, 12),)))
    assert run.report["samples"] == {"trained": 1200, "duplicated": 12, "missing": 0, "pending": 0}


@pytest.mark.usefixtures("forgetful")
def test_samples_that_an_old_step_left_out_are_missing() -> None:
    run = Run()
    run.quiet(1, 4, 0, 1, 2)
    run.quiet(6, 100, 0, 1, 2, began=5.0)
    assert run.report["samples"] == {"trained": 99 * 12, "duplicated": 0, "missing": 12, "pending": 0}


@pytest.mark.usefixtures("forgetful")
def test_samples_that_the_first_step_left_out_are_missing() -> None:
    run = Run()
    run.steps(step(0, 1, 0, 1, trained=((0, 4), (8, 12)), total_samples=8))
    run.quiet(2, 100, 0, 1, 2, began=1.0)
    assert run.report["samples"] == {"trained": 8 + 99 * 12, "duplicated": 0, "missing": 4, "pending": 0}


def started(epoch: int, at_step: int) -> Started:
    return Started(epoch=epoch, step=at_step, replicas=(0, 1, 2), replaced=())


@pytest.mark.usefixtures("forgetful")
def test_a_run_that_goes_back_to_a_step_that_is_kept_counts_its_samples_once() -> None:
    run = Run()
    run.quiet(1, 100, 0, 1, 2)
    run.happens(started(2, 95), 100.0)
    run.steps(*(step(r, n, n + 5, n + 6, attempt=1) for n in range(96, 99) for r in range(3)))
    assert run.report["steps_final"] == 98
    assert run.report["samples"] == {"trained": 98 * 12, "duplicated": 0, "missing": 0, "pending": 0}


@pytest.mark.usefixtures("forgetful")
def test_a_run_that_goes_back_further_than_that_counts_them_anew() -> None:
    run = Run()
    run.quiet(1, 100, 0, 1, 2)
    run.happens(started(2, 50), 100.0)
    assert run.report["steps_final"] == 50
    run.steps(*(step(r, n, n + 50, n + 51, attempt=1) for n in range(51, 61) for r in range(3)))
    assert run.report["steps_final"] == 60
    assert run.report["samples"] == {"trained": 120, "duplicated": 0, "missing": 0, "pending": 0}
    assert run.report["effective_training_time"] == pytest.approx(60 / 111, abs=0.01)


@pytest.mark.usefixtures("forgetful")
def test_a_step_of_which_nobody_told_holds_back_no_other_line_for_ever() -> None:
    run = Run()
    run.quiet(1, 4, 0, 1, 2)
    run.quiet(6, 60, 0, 1, 2, began=5.0)
    numbers = [line["step"] for line in run.record.take_lines()]
    run.quiet(61, 70, 0, 1, 2, began=60.0)
    numbers += [line["step"] for line in run.record.take_lines()]
    assert numbers == [1, 2, 3, 4, *range(6, 71)]


def test_only_the_newest_events_are_told_and_all_of_them_counted() -> None:
    run = Run()
    for number in range(250):
        run.happens(replace(removed(2, number, member=False), attempt=number), number)
    assert [f["attempt"] for f in run.report["failures"]] == list(range(250 - record.KEPT_EVENTS, 250))
    assert run.report["totals"]["failures"] == 250
