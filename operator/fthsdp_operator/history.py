"""The course of a run, from its step records: one point for each final step. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Point", "history"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One final step."""

    step: int
    time: float
    """Unix time in seconds at which the first replica that trained in it had applied the update."""
    loss: float | None
    """Mean over all samples of the step."""
    active: int
    """Replicas that contributed."""


def history(records: Iterable[dict[str, Any]]) -> list[Point]:
    """Fold the lines of steps.jsonl (one for each step and replica) into points in the order of the steps."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_step.setdefault(record["step"], []).append(record)
    return [_point(step, by_step[step]) for step in sorted(by_step)]


def _point(step: int, records: list[dict[str, Any]]) -> Point:
    # A replayed step is applied long after it was final.
    live = [r for r in records if r["outcome"] != "replayed"] or records
    return Point(
        step=step,
        time=min(r["ended"] for r in live),
        loss=next((r["loss"] for r in records if r["loss"] is not None), None),
        active=len(records[0]["contributors"]),
    )
