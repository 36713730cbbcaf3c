"""Which member of a ring sends which elements when: a pure function of counts.

An all-reduce over n members is a reduce-scatter and an all-gather, n-1 rounds each (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009). The elements are cut into n segments, a segment into
chunks. In every round each member sends one segment to its right neighbour and receives another one from its left.
What it receives in round r is exactly what it sends in round r+1, chunk for chunk, so a chunk can travel on as soon as
it has been added, without waiting for its round to end.

The sum of a segment is built in ring order, starting at the member whose index is the segment's. Only its last adder
has the total, and all others receive those bits: every member ends with the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Schedule", "Transfer", "chunk_elements", "make_schedule"]

CHUNKS_PER_SEGMENT = 4
"""Aim where segments are small: with fewer, a round waits too long for the one before."""
SMALLEST_CHUNK = 64 << 10
"""Elements (256 KiB of fp32). Below that the fixed cost of a chunk is larger than what overlapping wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One chunk on its way between two neighbours: elements ``start`` … ``stop`` of the tensor."""

    round: int
    chunk: int
    start: int
    stop: int
    adds: bool
    """True in the reduce-scatter: the receiver adds its own elements. False: it keeps what arrives."""
    final: bool
    """What the receiver has then are totals: in the last round of the reduce-scatter and in the all-gather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What one member sends and receives, both in this order."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    lead: int
    """The first ``lead`` sends carry the member's own elements; send number ``lead + i`` carries what receive number
    ``i`` left behind."""

    def may_send(self, position: int, *, received: int) -> bool:
        """Whether send number ``position`` is ready after ``received`` complete receives."""
        return position < self.lead + received


def chunk_elements(members: int, numel: int, *, limit: int) -> int:
    """Return the elements of a chunk: as large as ``limit`` allows, but several to a segment where they stay large."""
    segment = -(-numel // members)
    return min(limit, max(SMALLEST_CHUNK, -(-segment // CHUNKS_PER_SEGMENT)))


@lru_cache(maxsize=128)
def make_schedule(members: int, index: int, numel: int, *, chunk: int) -> Schedule:
    """Return the transfers of the member at ``index`` for ``numel`` elements in chunks of at most ``chunk`` elements.

    Empty segments are not sent. Kept for the next call: a job reduces the same few buckets in every step. Raises
    ValueError when an argument is out of range.
    """
    if members < 1 or not 0 <= index < members or numel < 0 or chunk < 1:
        raise ValueError(f"no schedule for member {index} of {members} with {numel} elements in chunks of {chunk}")
    own = _cut(members, index, numel, chunk=chunk, number=0) if members > 1 else ()
    receives: list[Transfer] = []
    for number in range(2 * (members - 1)):
        # Reduce-scatter goes backwards from the left neighbour's own segment; the all-gather starts at that
        # neighbour's finished one, which is ours by index, and goes on backwards.
        segment = index - number - 1 if number < members - 1 else index - (number - (members - 1))
        receives += _cut(members, segment % members, numel, chunk=chunk, number=number)
    passed_on = [_at(members, t.round + 1, t.chunk, t.start, t.stop) for t in receives if t.round + 1 < 2 * members - 2]
    return Schedule(sends=(*own, *passed_on), receives=tuple(receives), lead=len(own))


def _cut(members: int, segment: int, numel: int, *, chunk: int, number: int) -> tuple[Transfer, ...]:
    first, end = segment * numel // members, (segment + 1) * numel // members
    return tuple(
        _at(members, number, position, start, min(start + chunk, end))
        for position, start in enumerate(range(first, end, chunk))
    )


def _at(members: int, number: int, chunk: int, start: int, stop: int) -> Transfer:
    adds, final = number < members - 1, number >= members - 2
    return Transfer(round=number, chunk=chunk, start=start, stop=stop, adds=adds, final=final)
