"""Streams that cannot be indexed: each sample of each lane in exactly one step, and few seeks."""

import json
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from fthsdp.data.lanes import MAX_LANES, POSITIONS, below_first, below_last, lane_of
from fthsdp.data.sampler import SamplerState, assign, commit
from fthsdp.ranges import count


def start(lanes):
    return SamplerState(heads=(0,) * lanes)


def runs(parts):
    """Lane, first position and length of each range."""
    return [(*lane_of(first), stop - first) for first, stop in parts]


def samples(parts):
    return [lane_of(number) for first, stop in parts for number in range(first, stop)]


def test_each_rank_reads_one_run_of_a_lane_of_its_own():
    dealt = assign(start(8), (0, 2), 4, unit=2)
    assert {replica: runs(parts) for replica, parts in dealt.items()} == {
        0: [(0, 0, 2), (1, 0, 2)],
        2: [(2, 0, 2), (3, 0, 2)],
    }


def test_a_rank_goes_on_with_that_of_its_lanes_which_is_furthest_behind():
    state, read = start(5), []
    for _ in range(6):
        dealt = assign(state, (0, 1), 3)
        read.append([runs(parts)[0][:2] for parts in dealt.values()])
        state = commit(state, dealt, (0, 1))
    assert [first for first, _ in read] == [(0, 0), (2, 0), (4, 0), (0, 3), (2, 3), (4, 3)]
    assert [second for _, second in read] == [(1, 0), (3, 0), (1, 3), (3, 3), (1, 6), (3, 6)]


def test_a_returned_run_is_read_again_before_anything_new():
    dealt = assign(start(4), (0, 1), 4)
    state = commit(start(4), dealt, (0,))
    assert (state.heads, runs(state.returned)) == ((4, 4, 0, 0), [(1, 0, 4)])
    again = assign(state, (0, 1), 3)
    assert {replica: runs(parts) for replica, parts in again.items()} == {
        0: [(1, 0, 3)],
        1: [(1, 3, 1), (3, 0, 2)],
    }


def test_more_ranks_than_lanes_read_one_after_the_other_from_the_same():
    dealt = assign(start(2), (0, 1, 2), 5)
    assert [runs(parts) for parts in dealt.values()] == [[(0, 0, 5)], [(1, 0, 5)], [(0, 5, 5)]]


def test_the_ranks_of_a_survivor_keep_their_parts_and_get_more_behind_them():
    whole = assign(start(8), (0, 1, 2), 1, total=12, unit=2)
    left = assign(start(8), (0, 1, 2), 1, total=12, survivors=[(0, 2)], unit=2)
    assert left[0] == (*whole[0], whole[1][0])
    assert left[2] == (*whole[2], whole[1][1])


def test_what_is_below_some_samples_is_known_for_each_lane():
    assert below_last([(3, 5), (1, 2)]) == [(0, 5)]
    assert below_first([(3, 5), (1, 2)]) == [(0, 1)]
    both = [(POSITIONS + 7, POSITIONS + 9), (POSITIONS + 20, POSITIONS + 21), (2, 3)]
    assert below_last(both) == [(0, 3), (POSITIONS, POSITIONS + 21)]
    assert below_first(both) == [(0, 2), (POSITIONS, POSITIONS + 7)]
    assert below_last([]) == below_first([]) == []


def test_numbers_of_all_lanes_fit_into_json():
    assert MAX_LANES * POSITIONS <= 2**53


STEP = st.tuples(
    st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True),
    st.sets(st.integers(0, 7)),  # those who die on the way
    st.booleans(),  # whether the batch stays constant, and those left take over
    st.integers(1, 3),  # samples of a rank
)


@given(st.lists(STEP, max_size=25), st.integers(1, 12), st.sampled_from([1, 2]))
@settings(max_examples=200, deadline=None)
def test_each_sample_of_each_lane_is_trained_exactly_once(steps, lanes, unit):
    state, trained = start(lanes), []
    for members, dead, constant, each in steps:
        left = tuple(member for member in members if member not in dead)
        size = each * unit
        if constant:
            survivors = [left] if left and left != tuple(members) else []
            dealt = assign(state, members, size, total=4 * size, survivors=survivors, unit=unit)
            assert sum(map(count, dealt.values())) == 4 * size
        else:
            dealt = assign(state, members, size, unit=unit)
            assert all(count(parts) == size for parts in dealt.values())
        contributors = [member for member in dealt if member in left]
        trained += [sample for member in contributors for sample in samples(dealt[member])]
        state = commit(state, dealt, contributors)
        state = SamplerState.from_json(json.loads(json.dumps(state.to_json())))
    by_lane = defaultdict(list)
    for lane, position in [*trained, *samples(state.returned)]:
        by_lane[lane].append(position)
    assert {lane: sorted(positions) for lane, positions in by_lane.items()} == {
        lane: list(range(head)) for lane, head in enumerate(state.heads) if head
    }


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_while_nobody_comes_or_goes_each_lane_is_read_by_one_rank_only(lanes, replicas, ranks):
    state, readers = start(lanes), defaultdict(set)
    for _ in range(12):
        dealt = assign(state, range(replicas), 2 * ranks, unit=ranks)
        for replica, parts in dealt.items():
            for rank, part in enumerate(parts):
                readers[lane_of(part[0])[0]].add((replica, rank))
        state = commit(state, dealt, range(replicas))
    assert all(len(who) == max(1, -(-(replicas * ranks - lane) // lanes)) for lane, who in readers.items())
