"""How much is to be measured: everything at least five times, or the same rows in five to six minutes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["FULL", "QUICK", "Plan"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Repetitions of each measurement."""

    name: str
    repetitions: int
    """Of everything that is not named below."""
    blocks: int
    """Pairs of blocks of steps, ours and plain HSDP's."""
    churn: float
    """Seconds of each repetition under steady failures."""
    bandwidth: int
    """All-reduces of each size and number of members."""

    def in_turn(self, systems: Sequence[_T], number: int) -> Sequence[_T]:
        """Return who is measured in which order in this repetition: each of them first every other time."""
        return systems if number % 2 == 0 else systems[::-1]

    def say(self, text: str) -> None:
        """Show progress."""
        print(f"  {time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


FULL = Plan(name="full", repetitions=5, blocks=20, churn=90.0, bandwidth=9)
QUICK = Plan(name="quick", repetitions=1, blocks=4, churn=20.0, bandwidth=2)
