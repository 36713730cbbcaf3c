"""The course of a run, from its step records or from the coordinator's log."""

from typing import Any

from fthsdp_operator.reports.history import Point, history_of_log, history_of_records


def record(step: int, replica: int, ended: float, **changes: Any) -> dict[str, Any]:
    whole = {
        "step": step, "replica": replica, "began": ended - 0.5, "ended": ended, "loss": 2.0, "contributors": [0, 1],
        "epoch": 1,
    }  # fmt: skip
    return whole | changes


def test_steps_come_in_their_order_on_the_clock_of_the_run() -> None:
    points = history_of_records(
        [record(2, 0, 101.1), record(1, 1, 100.6), record(1, 0, 100.5), record(2, 1, 101.2)], started=100.0
    )
    assert [(p.step, round(p.time, 3), p.active) for p in points] == [(1, 0.5, 2), (2, 1.1, 2)]


def test_a_step_of_an_earlier_life_of_the_run_does_not_count() -> None:
    (point,) = history_of_records([record(1, 0, 100.5), record(1, 0, 130.5, epoch=2, loss=1.0)], started=100.0)
    assert (point.time, point.loss) == (30.5, 1.0)


def test_a_loss_that_one_replica_does_not_know_is_taken_from_another() -> None:
    (point,) = history_of_records([record(1, 0, 100.5, loss=None), record(1, 1, 100.5)], started=100.0)
    assert point.loss == 2.0


def test_the_log_gives_the_same_course() -> None:
    line = {"loss": 2.0, "active": 3, "seconds": 0.5}
    log = [(100.5, {"step": 1, **line}), (101.0, {"step": 2, **line}), (101.25, {"step": 2, **line})]
    assert history_of_log(log, started=100.0) == [
        Point(step=1, time=0.5, loss=2.0, active=3),
        Point(step=2, time=1.25, loss=2.0, active=3),
    ]


def test_a_run_without_steps_has_no_course() -> None:
    assert history_of_records([], started=0.0) == history_of_log([], started=0.0) == []
