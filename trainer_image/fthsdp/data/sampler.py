"""Deal samples to replicas so that each is trained exactly once, whatever fails, joins or leaves.

Samples are numbered 0, 1, 2, … for the whole run; ``order`` says which item of the dataset a number stands for, another
permutation in each pass. A stream that cannot be indexed has its own numbers (``lanes``). The state is the same on all
replicas and moves only when a step commits: what was dealt to a replica that then contributed nothing is returned, and
dealt again before anything new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fthsdp.data.lanes import MAX_LANES, POSITIONS, behind, deal, heads_after
from fthsdp.errors import WireError
from fthsdp.ranges import Range, count, subtract, take, union
from fthsdp.scramble import MASK, scramble

__all__ = ["Assignment", "SamplerState", "assign", "commit", "order"]

Assignment = Mapping[int, tuple[Range, ...]]
"""Replica to the half-open ranges of sample numbers that it trains in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """What was trained: every sample below ``next``, or below the head of its lane, that is not in ``returned``."""

    next: int = 0
    """First sample number that was never dealt in a committed step."""
    returned: tuple[Range, ...] = ()
    """Sorted, disjoint ranges that were dealt and not trained."""
    heads: tuple[int, ...] = ()
    """First position of each lane that was never dealt in a committed step; empty for a dataset that can be indexed."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"next": self.next, "returned": [list(part) for part in self.returned], "heads": list(self.heads)}

    @classmethod
    def from_json(cls, value: object) -> SamplerState:
        """Read what ``to_json`` wrote; raises WireError for anything else."""
        try:
            parts = tuple((start, stop) for start, stop in value["returned"])  # type: ignore[index]
            heads = tuple(value["heads"])  # type: ignore[index]
            state = cls(next=value["next"], returned=parts, heads=heads)  # type: ignore[index]
            valid = state._is_valid()
        except (TypeError, KeyError, ValueError):
            valid = False
        if not valid:
            raise WireError(f"not the state of a sampler: {value!r:.200}")
        return state

    def _is_valid(self) -> bool:
        numbers = (self.next, *self.heads, *(n for part in self.returned for n in part))
        if not all(type(n) is int and n >= 0 for n in numbers):
            return False
        if len(self.heads) > MAX_LANES or max(self.heads, default=0) > POSITIONS or (self.heads and self.next):
            return False
        dealt = behind(self.heads) if self.heads else [(0, self.next)]
        return self.returned == union(self.returned) and subtract(self.returned, dealt) == ()


def assign(
    state: SamplerState,
    replicas: Sequence[int],
    batch_size: int,
    *,
    total: int | None = None,
    survivors: Sequence[Sequence[int]] = (),
    unit: int = 1,
) -> dict[int, tuple[Range, ...]]:
    """Deal the samples of one step to ``replicas``, in their order: returned ones first, then new ones.

    Without ``total`` each gets ``batch_size``, whatever becomes of the others. With it (a constant batch) the step has
    ``total`` samples, dealt as evenly as whole ``unit``s allow; ``survivors`` says who was left after each retry, and
    what those who are gone held is dealt out among them. A share then only grows, at its end. The result names those
    who are left; a share is empty when there are more replicas than units.

    ``unit`` is the number of ranks in a replica: they train equal parts of a share, in the order in which it is dealt.
    """
    assert batch_size > 0
    assert len(set(replicas)) == len(replicas) > 0
    if total is None:
        return _first_shares(state, dict.fromkeys(replicas, batch_size), unit)
    assert total % unit == 0
    shares = _first_shares(state, _even(dict.fromkeys(replicas, 0), total, unit), unit)
    for left in survivors:
        assert left
        assert shares.keys() >= set(left)
        stock = [part for replica, parts in shares.items() if replica not in left for part in parts]
        sizes = _even({replica: count(shares[replica]) for replica in left}, total, unit)
        shares = {r: (*shares[r], *take(stock, sizes[r] - count(shares[r]))) for r in left}
    return shares


def _first_shares(state: SamplerState, sizes: Mapping[int, int], unit: int) -> dict[int, tuple[Range, ...]]:
    if state.heads:
        return deal(state.heads, state.returned, sizes, unit)
    stock = [*state.returned, (state.next, state.next + sum(sizes.values()))]
    return {replica: take(stock, size) for replica, size in sizes.items()}


def _even(held: Mapping[int, int], total: int, unit: int) -> dict[int, int]:
    """Return how much of ``total`` each should have, who now holds that much: the same, give or take one ``unit``."""
    each, extra = divmod(total // unit, len(held))
    fullest = sorted(held, key=lambda replica: -held[replica])  # they have their additional unit already
    return {replica: (each + (replica in fullest[:extra])) * unit for replica in held}


def commit(state: SamplerState, assigned: Assignment, contributors: Iterable[int]) -> SamplerState:
    """Return the state after a step to which only ``contributors`` of those in ``assigned`` contributed."""
    present = set(contributors)
    assert present <= assigned.keys()
    dealt = [part for parts in assigned.values() for part in parts]
    missed = [part for replica, parts in assigned.items() if replica not in present for part in parts]
    return SamplerState(
        next=0 if state.heads else max([state.next, *(stop for _, stop in dealt)]),
        returned=union([*subtract(state.returned, dealt), *missed]),
        heads=heads_after(state.heads, dealt),
    )


# --- the order of the dataset ---------------------------------------------------------------------------------------

_ROUNDS = 4


def order(sample: int, length: int, seed: int) -> int:
    """Return the index into a dataset of ``length`` items that ``sample`` stands for.

    Each pass over the dataset is another permutation, computed for one sample at a time without holding it: a Feistel
    network on the next even number of bits, walked until it lands inside the dataset (Black and Rogaway, 2002).
    """
    assert sample >= 0
    assert length > 0
    pass_number, index = divmod(sample, length)
    half = ((length - 1).bit_length() + 1) // 2
    key = scramble(scramble(seed & MASK) ^ (pass_number & MASK))
    while True:
        index = _feistel(index, half, key)
        if index < length:
            return index


def _feistel(value: int, half: int, key: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (scramble(key ^ (turn << 56) ^ right) & mask)
    return left << half | right
