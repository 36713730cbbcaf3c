"""The ring schedule, run by simulated members in one process."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fthsdp.ftar.schedule import Schedule, Transfer, chunk_elements, make_schedule

COUNTS = st.tuples(st.integers(1, 16), st.integers(0, 120), st.integers(1, 40))


class SimulatedMember:
    """Follows one schedule; its right neighbour's inbox is the only thing it reaches."""

    def __init__(self, schedule: Schedule, source: np.ndarray, wire: type) -> None:
        self.schedule = schedule
        self.wire = wire
        self.source = source
        self.out = np.full_like(source, np.nan)
        if not schedule.receives and not schedule.sends:
            self.out[:] = source
        self.inbox: deque[tuple[Transfer, np.ndarray]] = deque()
        self.sent = self.received = 0

    def step(self, right: SimulatedMember, *, receive: bool) -> bool:
        return self._receive() if receive else self._send(right)

    def _send(self, right: SimulatedMember) -> bool:
        if self.sent == len(self.schedule.sends) or not self.schedule.may_send(self.sent, received=self.received):
            return False
        transfer = self.schedule.sends[self.sent]
        data = self.source if self.sent < self.schedule.lead else self.out
        right.inbox.append((transfer, data[transfer.start : transfer.stop].astype(self.wire)))
        self.sent += 1
        return True

    def _receive(self) -> bool:
        if not self.inbox:
            return False
        transfer, data = self.inbox.popleft()
        assert transfer == self.schedule.receives[self.received]
        own = self.source[transfer.start : transfer.stop]
        left = own + data.astype(np.float32) if transfer.adds else data
        self.out[transfer.start : transfer.stop] = left.astype(self.wire) if transfer.final else left
        self.received += 1
        return True


def run(
    n: int, numel: int, chunk: int, seed: int, wire: type = np.float32
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run all members in a random order of sends and receives; return sources and results."""
    random = np.random.default_rng(seed)
    sources = [random.standard_normal(numel).astype(np.float32) for _ in range(n)]
    members = [SimulatedMember(make_schedule(n, i, numel, chunk=chunk), sources[i], wire) for i in range(n)]
    moved = True
    while moved:
        # A pass in random order; when nobody can move in a whole pass, everything is through.
        turns = [(i, receive) for i in random.permutation(n) for receive in random.permutation([True, False])]
        moved = sum(members[i].step(members[(i + 1) % n], receive=bool(receive)) for i, receive in turns) > 0
    for member in members:
        assert member.sent == len(member.schedule.sends)
        assert member.received == len(member.schedule.receives)
    return sources, [member.out for member in members]


def sum_in_ring_order(sources: list[np.ndarray], wire: type = np.float32) -> np.ndarray:
    """What the schedule promises: segment i is summed from member i on, in ring order, rounded where it is sent."""
    n, numel = len(sources), len(sources[0])
    total = np.empty_like(sources[0])
    for segment in range(n):
        part = slice(segment * numel // n, (segment + 1) * numel // n)
        value = sources[segment][part]
        for other in range(1, n):
            value = sources[(segment + other) % n][part] + value.astype(wire).astype(np.float32)
        total[part] = value.astype(wire) if n > 1 else value
    return total


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.integers(0, 2**32 - 1))
def test_every_member_ends_with_the_sum_in_ring_order_bit_for_bit(counts: tuple[int, int, int], seed: int) -> None:
    n, numel, chunk = counts
    sources, results = run(n, numel, chunk, seed)
    expected = sum_in_ring_order(sources)
    for result in results:
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("n", range(1, 17))
def test_all_ring_sizes_work_with_a_size_that_nothing_divides(n: int) -> None:
    sources, results = run(n, 1009, 17, seed=n)
    assert {r.tobytes() for r in results} == {sum_in_ring_order(sources).tobytes()}


@pytest.mark.parametrize("n", range(1, 17))
def test_rounded_for_the_wire_all_members_still_end_with_the_same_bits(n: int) -> None:
    # float16 stands for both narrow types: what matters is who rounds when.
    sources, results = run(n, 1009, 17, seed=n, wire=np.float16)
    assert {r.tobytes() for r in results} == {sum_in_ring_order(sources, np.float16).tobytes()}


@settings(deadline=None, max_examples=60)
@given(COUNTS)
def test_what_a_member_sends_is_what_its_right_neighbour_expects(counts: tuple[int, int, int]) -> None:
    n, numel, chunk = counts
    schedules = [make_schedule(n, i, numel, chunk=chunk) for i in range(n)]
    for i, schedule in enumerate(schedules):
        assert schedule.sends == schedules[(i + 1) % n].receives


@settings(deadline=None, max_examples=60)
@given(COUNTS)
def test_no_chunk_is_empty_or_larger_than_allowed(counts: tuple[int, int, int]) -> None:
    n, numel, chunk = counts
    for i in range(n):
        for transfer in make_schedule(n, i, numel, chunk=chunk).receives:
            assert 0 < transfer.stop - transfer.start <= chunk


@settings(deadline=None, max_examples=60)
@given(COUNTS)
def test_nobody_sends_more_than_a_ring_has_to(counts: tuple[int, int, int]) -> None:
    n, numel, chunk = counts
    for i in range(n):
        sent = sum(t.stop - t.start for t in make_schedule(n, i, numel, chunk=chunk).sends)
        assert sent <= 2 * (n - 1) * -(-numel // n)


@settings(deadline=None, max_examples=60)
@given(COUNTS)
def test_a_send_carries_what_the_receive_before_it_left_behind(counts: tuple[int, int, int]) -> None:
    n, numel, chunk = counts
    for i in range(n):
        schedule = make_schedule(n, i, numel, chunk=chunk)
        for sent, received in zip(schedule.sends[schedule.lead :], schedule.receives, strict=False):
            assert (sent.start, sent.stop, sent.chunk, sent.round) == (
                received.start,
                received.stop,
                received.chunk,
                received.round + 1,
            )


@given(st.integers(1, 16), st.integers(0, 1 << 30), st.integers(1, 1 << 28))
def test_the_chunk_is_the_same_for_all_and_within_its_limit(n: int, numel: int, limit: int) -> None:
    assert 1 <= chunk_elements(n, numel, limit=limit) <= limit


@pytest.mark.parametrize(
    ("n", "index", "numel", "chunk"), [(0, 0, 1, 1), (2, 2, 1, 1), (2, -1, 1, 1), (2, 0, -1, 1), (2, 0, 1, 0)]
)
def test_arguments_out_of_range_are_refused(n: int, index: int, numel: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="no schedule for member"):
        make_schedule(n, index, numel, chunk=chunk)
