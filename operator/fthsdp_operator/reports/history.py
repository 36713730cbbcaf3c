"""The course of a run: one point for each final step. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Point", "history_of_log", "history_of_records"]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One final step."""

    step: int
    time: float
    """Seconds on the run's clock, which is 0 when the first epoch begins, at which it was applied."""
    loss: float | None
    """Mean over all samples of the step."""
    active: int
    """Replicas that contributed."""


def history_of_records(records: Iterable[Json], *, started: float) -> list[Point]:
    """Fold the lines of steps.jsonl, one for each step and replica, into points in the order of the steps.

    ``started`` is the Unix time at which the first epoch began.
    """
    by_step: dict[int, list[Json]] = {}
    for record in records:
        by_step.setdefault(record["step"], []).append(record)
    return [_point(step, by_step[step], started) for step in sorted(by_step)]


def _point(step: int, records: list[Json], started: float) -> Point:
    # A step of an earlier life of the run does not count.
    newest = max(r["epoch"] for r in records)
    live = [r for r in records if r["epoch"] == newest]
    return Point(
        step=step,
        time=min(r["ended"] for r in live) - started,
        loss=next((r["loss"] for r in live if r["loss"] is not None), None),
        active=len(live[0]["contributors"]),
    )


def history_of_log(lines: Iterable[tuple[float, Json]], *, started: float) -> list[Point]:
    """Fold the coordinator's log, Unix time and line, into points; a step said twice counts as it was said last."""
    said = {line["step"]: (time, line) for time, line in lines}
    return [
        Point(step=step, time=said[step][0] - started, loss=said[step][1]["loss"], active=said[step][1]["active"])
        for step in sorted(said)
    ]
