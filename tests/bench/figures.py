"""What was measured, beside what it must be and what we aim at. Pure: numbers in, verdicts and text out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Bound", "Figure", "Of", "at_least", "at_most", "table"]


class Of(StrEnum):
    """What a bound is about."""

    VALUE = "value"
    """The median of our own values."""
    RATIO = "ratio"
    """Our median over the peer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A limit that a figure has to keep."""

    limit: float
    upper: bool
    """The limit is the largest that is right; else the smallest."""
    of: Of

    def met(self, value: float) -> bool:
        """Whether a value keeps the limit."""
        return value <= self.limit if self.upper else value >= self.limit

    def text(self, unit: str) -> str:
        """Return the limit in a few characters."""
        sign = "≤" if self.upper else "≥"
        return f"{sign} {self.limit:g} x" if self.of is Of.RATIO else f"{sign} {number(self.limit, unit)}"


def at_most(limit: float, of: Of = Of.VALUE) -> Bound:
    """The figure is to be this or less."""
    return Bound(limit=limit, upper=True, of=of)


def at_least(limit: float, of: Of = Of.VALUE) -> Bound:
    """The figure is to be this or more."""
    return Bound(limit=limit, upper=False, of=of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row: our values, one for each repetition, and where there is a peer its values, measured in turns."""

    name: str
    unit: str = "s"
    """s; %: values are shares of 1; anything else is printed as it stands."""
    values: tuple[float, ...] = ()
    peer: str = ""
    peer_values: tuple[float, ...] = ()
    must: Bound | None = None
    aim: Bound | None = None
    note: str = ""
    """What else a reader needs to know; or, of a row without values, why there are none."""

    @property
    def ratio(self) -> float | None:
        """Our median over the peer's; of paired repetitions the median of their ratios."""
        if not self.values or not self.peer_values or not statistics.median(self.peer_values):
            return None
        if len(self.values) == len(self.peer_values) and all(self.peer_values) and self.unit == PAIRED:
            return statistics.median(a / b for a, b in zip(self.values, self.peer_values, strict=True))
        return statistics.median(self.values) / statistics.median(self.peer_values)

    def keeps(self, bound: Bound) -> bool:
        """Whether this figure keeps a bound; what was not measured keeps none."""
        value = self.ratio if bound.of is Of.RATIO else statistics.median(self.values) if self.values else None
        return value is not None and bound.met(value)

    @property
    def missed(self) -> bool:
        """Whether it is not what it must be."""
        return self.must is not None and not self.keeps(self.must)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": spread(self.values),
            "peer": self.peer,
            "peers": spread(self.peer_values),
            "ratio": self.ratio,
            "must": self._bound(self.must),
            "aim": self._bound(self.aim),
            "note": self.note,
        }

    def _bound(self, bound: Bound | None) -> dict[str, Any] | None:
        return None if bound is None else {"of": str(bound.of), "is": bound.text(self.unit), "met": self.keeps(bound)}


PAIRED = "s, paired"
"""Unit of seconds whose repetitions belong together one by one: the median of ratios counts."""


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Return median, extremes and all values; None where there are none."""
    if not values:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "values": list(values)}


def number(value: float, unit: str) -> str:
    """Return a value with its unit."""
    if unit == "%":
        return f"{value:.1%}"
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{text} s" if unit == PAIRED else f"{text} {unit}".rstrip()


def _values(values: Sequence[float], unit: str) -> str:
    if not values:
        return "-"
    median = number(statistics.median(values), unit)
    bare = "%" if unit == "%" else ""
    return median if len(values) < 2 else f"{median} ({number(min(values), bare)}…{number(max(values), bare)})"


HEADINGS = ("", "what", "fthsdp", "peer", "ratio", "must", "aim")


def _cells(figure: Figure) -> tuple[str, ...]:
    peer = _values(figure.peer_values, figure.unit)
    must = figure.must.text(figure.unit) if figure.must else "-"
    aim = f"{figure.aim.text(figure.unit)} {'✓' if figure.keeps(figure.aim) else '✗'}" if figure.aim else "-"
    return (
        "MISSED" if figure.missed else "ok" if figure.must else "",
        figure.name,
        _values(figure.values, figure.unit),
        f"{figure.peer} {peer}" if figure.peer_values else "-",
        "-" if figure.ratio is None else f"{figure.ratio:.2f}",
        must,
        aim,
    )


def table(figures: Sequence[Figure]) -> str:
    """Return all figures as text, a row each, and the notes below."""
    rows = [HEADINGS, *map(_cells, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"{figure.name}: {figure.note}" for figure in figures if figure.note]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", *notes]).rstrip()
