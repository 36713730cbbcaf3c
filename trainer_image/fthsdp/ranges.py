"""Sets of whole numbers as sorted, disjoint, half-open ranges: sample numbers, bytes of a download."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Range", "count", "subtract", "take", "union"]

Range = tuple[int, int]
"""From the first number to one past the last; ``first < last``."""


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return all numbers that are in any of ``ranges``; these may overlap and come in any order."""
    merged: list[Range] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def subtract(ranges: Iterable[Range], removed: Iterable[Range]) -> tuple[Range, ...]:
    """Return the numbers of ``ranges`` that are in none of ``removed``."""
    left = union(ranges)
    for start, stop in union(removed):
        left = tuple(part for a, b in left for part in ((a, min(b, start)), (max(a, stop), b)) if part[0] < part[1])
    return left


def take(stock: list[Range], number: int) -> tuple[Range, ...]:
    """Remove the first ``number`` numbers, or as many as there are, from ``stock``, and return them."""
    taken: list[Range] = []
    while number and stock:
        start, stop = stock.pop(0)
        middle = min(stop, start + number)
        taken.append((start, middle))
        number -= middle - start
        if middle < stop:
            stock.insert(0, (middle, stop))
    return tuple(taken)


def count(ranges: Iterable[Range]) -> int:
    """Return how many numbers disjoint ``ranges`` hold."""
    return sum(stop - start for start, stop in ranges)
