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
    """Seconds from the beginning of the first step until this one was applied."""
    loss: float | None
    """Mean over all samples of the step."""
    active: int
    """Replicas that contributed."""


def history_of_records(records: Iterable[Json]) -> list[Point]:
    """Fold the lines of steps.jsonl, one for each step and replica, into points in the order of the steps."""
    by_step: dict[int, list[Json]] = {}
    for record in records:
        by_step.setdefault(record["step"], []).append(record)
    start = min((r["began"] for records in by_step.values() for r in records), default=0.0)
    return [_point(step, by_step[step], start) for step in sorted(by_step)]


def _point(step: int, records: list[Json], start: float) -> Point:
    # A replayed step is applied long after it was final; one of an earlier life of the run does not count.
    live = [r for r in records if r["outcome"] != "replayed"] or records
    newest = max(r["epoch"] for r in live)
    live = [r for r in live if r["epoch"] == newest]
    return Point(
        step=step,
        time=min(r["ended"] for r in live) - start,
        loss=next((r["loss"] for r in live if r["loss"] is not None), None),
        active=len(live[0]["contributors"]),
    )


def history_of_log(lines: Iterable[tuple[float, Json]]) -> list[Point]:
    """Fold the coordinator's log, Unix time and line, into points; a step said twice counts as it was said last."""
    said = {line["step"]: (time, line) for time, line in lines}
    start = min((time - line["seconds"] for time, line in said.values()), default=0.0)
    return [
        Point(step=step, time=said[step][0] - start, loss=said[step][1]["loss"], active=said[step][1]["active"])
        for step in sorted(said)
    ]
