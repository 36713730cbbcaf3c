"""Deal samples of streams that cannot be indexed: a fixed number of lanes, each read in order from where it was left.

A sample's number says its lane and its position in it, so that ranges of numbers are runs of a lane and all that is
known of ranges holds here too. As long as the members stay the same, so do the lanes that a rank reads, and nobody
seeks. Pure; the positions are part of the sampler's state and move only when a step commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fthsdp.ranges import Range, count, take, union

__all__ = ["MAX_LANES", "POSITIONS", "behind", "below_first", "below_last", "deal", "heads_after", "lane_of"]

POSITIONS = 1 << 40
"""Sample numbers of each lane: the first of lane 2 is ``2 * POSITIONS``."""
MAX_LANES = 1 << 13
"""So that all numbers are below 2**53, which every reader of JSON takes as they are."""


def lane_of(number: int) -> tuple[int, int]:
    """Return lane and position of a sample."""
    return divmod(number, POSITIONS)


def behind(heads: Sequence[int]) -> list[Range]:
    """Return the numbers of all samples up to which the lanes were dealt."""
    return [(lane * POSITIONS, lane * POSITIONS + head) for lane, head in enumerate(heads)]


def below_last(numbers: Iterable[Range]) -> list[Range]:
    """Return all numbers of each lane up to the last in ``numbers``; those of an indexed dataset are of lane 0."""
    ends = {start // POSITIONS: stop for start, stop in union(numbers)}
    return [(lane * POSITIONS, end) for lane, end in ends.items()]


def below_first(numbers: Iterable[Range]) -> list[Range]:
    """Return all numbers of each lane before the first in ``numbers``."""
    ends = {start // POSITIONS: start for start, _ in reversed(union(numbers))}
    return [(lane * POSITIONS, end) for lane, end in sorted(ends.items())]


def deal(
    heads: Sequence[int], returned: Iterable[Range], shares: Mapping[int, int], unit: int
) -> dict[int, tuple[Range, ...]]:
    """Deal that many samples to each of ``shares``: returned ones first, then each rank's own lanes.

    ``heads`` are the positions up to which the lanes were dealt. A share is made of ``unit`` equal parts, one for each
    rank of the replica. A rank reads its part in one run, from that of its lanes which is furthest behind. When there
    are more ranks than lanes, some read one after the other from the same.
    """
    front, stock = list(heads), list(returned)
    seats = len(shares) * unit
    dealt: dict[int, tuple[Range, ...]] = {}
    for place, (replica, share) in enumerate(shares.items()):
        assert share % unit == 0
        parts: list[Range] = []
        for seat in range(place * unit, place * unit + unit):
            again = take(stock, share // unit)
            parts += [*again, *_run(front, seat % len(front), seats, share // unit - count(again))]
        dealt[replica] = tuple(parts)
    return dealt


def _run(front: list[int], first: int, seats: int, length: int) -> Iterable[Range]:
    """Take a run of new samples from the furthest behind of the lanes ``first``, ``first + seats``, …"""
    if length == 0:
        return
    lane = min(range(first, len(front), seats), key=lambda one: front[one])
    start = lane * POSITIONS + front[lane]
    front[lane] += length
    assert front[lane] <= POSITIONS
    yield start, start + length


def heads_after(heads: Sequence[int], dealt: Iterable[Range]) -> tuple[int, ...]:
    """Return the positions up to which the lanes were dealt, after a step in which ``dealt`` was."""
    after = list(heads)
    for start, stop in union(dealt) if heads else ():
        lane, position = lane_of(start)
        after[lane] = max(after[lane], position + stop - start)
    return tuple(after)
