import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fthsdp.data.sampler import SamplerState, assign, commit, order
from fthsdp.errors import WireError
from fthsdp.ranges import count, union


def numbers(parts):
    return [n for start, stop in parts for n in range(start, stop)]


def test_new_samples_are_dealt_in_the_order_of_the_replicas():
    assert assign(SamplerState(), (2, 0), 3) == {2: ((0, 3),), 0: ((3, 6),)}


def test_what_was_returned_is_dealt_before_anything_new():
    state = SamplerState(next=20, returned=((3, 5), (9, 10)))
    assert assign(state, (0, 1), 2) == {0: ((3, 5),), 1: ((9, 10), (20, 21))}


def test_slices_of_replicas_that_did_not_contribute_are_returned():
    dealt = assign(SamplerState(), (0, 1, 2), 4)
    assert commit(SamplerState(), dealt, (0, 2)) == SamplerState(next=12, returned=((4, 8),))


def test_a_returned_sample_that_is_lost_again_is_returned_again():
    state = SamplerState(next=12, returned=((4, 8),))
    dealt = assign(state, (0, 1), 3)
    assert commit(state, dealt, (0,)) == SamplerState(next=14, returned=((7, 8), (12, 14)))


def test_a_step_without_contributors_returns_everything():
    assert commit(SamplerState(), assign(SamplerState(), (0, 1), 4), ()) == SamplerState(next=8, returned=((0, 8),))


STEP = st.tuples(
    st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True),  # members: any joins and leaves in between
    st.sets(st.integers(0, 15)),  # those who die on the way
    st.integers(1, 5),  # the batch size may change with a restart
)


@given(st.lists(STEP, max_size=30))
@settings(max_examples=200, deadline=None)
def test_each_sample_is_trained_exactly_once_whatever_fails_or_joins(steps):
    state, trained = SamplerState(), []
    for members, dead, batch_size in steps:
        dealt = assign(state, members, batch_size)
        assert all(count(parts) == batch_size for parts in dealt.values())
        contributors = [member for member in members if member not in dead]
        trained += [n for member in contributors for n in numbers(dealt[member])]
        state = commit(state, dealt, contributors)
        state = SamplerState.from_json(json.loads(json.dumps(state.to_json())))
    assert sorted(trained + numbers(state.returned)) == list(range(state.next))


# --- a constant batch -------------------------------------------------------------------------------------------------


def shares(state, replicas, total, **options):
    return assign(state, replicas, 1, total=total, **options)


def test_a_constant_batch_is_dealt_evenly_and_contiguously():
    assert shares(SamplerState(), (2, 0, 1), 8) == {2: ((0, 3),), 0: ((3, 6),), 1: ((6, 8),)}


def test_a_constant_batch_is_dealt_in_whole_units_so_that_the_ranks_of_a_replica_have_the_same():
    assert shares(SamplerState(), (0, 1), 12, unit=4) == {0: ((0, 8),), 1: ((8, 12),)}


def test_the_share_of_those_who_are_gone_is_dealt_out_among_those_left():
    left = shares(SamplerState(), (0, 1, 2), 12, survivors=[(0, 2)])
    assert left == {0: ((0, 4), (4, 6)), 2: ((8, 12), (6, 8))}


def test_whoever_had_more_before_gets_less_of_what_is_dealt_out():
    left = shares(SamplerState(), (0, 1, 2), 7, survivors=[(0, 2)])
    assert {replica: count(parts) for replica, parts in left.items()} == {0: 4, 2: 3}


def test_more_replicas_than_units_leave_some_with_nothing():
    assert shares(SamplerState(), (0, 1, 2), 4, unit=2) == {0: ((0, 2),), 1: ((2, 4),), 2: ()}


def test_who_survives_makes_no_difference_when_the_batch_shrinks():
    assert assign(SamplerState(), (0, 1), 3, survivors=[(1,)]) == assign(SamplerState(), (0, 1), 3)


RETRIES = st.lists(st.sets(st.integers(0, 15), min_size=1), max_size=4)
CONSTANT_STEP = st.tuples(
    st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True),  # members when the step begins
    RETRIES,  # who dies before each retry
    st.booleans(),  # the last of them dies after it was counted: the step rolls forward
    st.integers(1, 12),  # units in the step: as many as wanted replicas bring
)


def survivors_of(members, deaths):
    """Return who is left after each retry; the last of the members never dies."""
    lists, left = [], members
    for dead in deaths:
        remaining = [member for member in left if member not in dead or member == members[-1]]
        if remaining != left:
            lists.append(tuple(remaining))
        left = remaining
    return lists


@given(st.lists(CONSTANT_STEP, max_size=20), st.sampled_from([1, 2, 4]))
@settings(max_examples=200, deadline=None)
def test_a_constant_batch_stays_whole_and_each_sample_is_trained_once(steps, unit):
    state, trained = SamplerState(), []
    for members, deaths, counted, units in steps:
        lists = survivors_of(members, deaths)
        earlier = shares(state, members, units * unit, unit=unit)
        for end in range(len(lists) + 1):
            dealt = shares(state, members, units * unit, survivors=lists[:end], unit=unit)
            assert list(dealt) == list(lists[end - 1] if end else members)
            assert sum(map(count, dealt.values())) == units * unit
            sizes = sorted(map(count, dealt.values()))
            assert sizes[-1] - sizes[0] <= unit
            assert all(size % unit == 0 for size in sizes)
            for replica, parts in dealt.items():
                assert numbers(parts)[: count(earlier[replica])] == numbers(earlier[replica])
            earlier = dealt
        contributors = list(dealt) if counted or len(dealt) == 1 else list(dealt)[1:]  # a step without its first
        trained += [n for member in contributors for n in numbers(dealt[member])]
        state = commit(state, dealt, contributors)
    assert sorted(trained + numbers(state.returned)) == list(range(state.next))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"next": 3},
        {"next": -1, "returned": [], "heads": []},
        {"next": True, "returned": [], "heads": []},
        {"next": 3, "returned": [[1]], "heads": []},
        {"next": 3, "returned": [[1, 4]], "heads": []},
        {"next": 9, "returned": [[4, 5], [1, 2]], "heads": []},
        {"next": 9, "returned": [[2, 2]], "heads": []},
        {"next": 9, "returned": [["a", "b"]], "heads": []},
        {"next": 9, "returned": 7, "heads": []},
        {"next": 9, "returned": []},
        {"next": 9, "returned": [], "heads": None},
        {"next": 9, "returned": [], "heads": [3]},
        {"next": 0, "returned": [], "heads": [-1]},
        {"next": 0, "returned": [], "heads": [True]},
        {"next": 0, "returned": [], "heads": [2**40 + 1]},
        {"next": 0, "returned": [], "heads": [0] * 8193},
        {"next": 0, "returned": [[3, 4]], "heads": [3, 9]},
    ],
)
def test_nonsense_is_no_sampler_state(value):
    with pytest.raises(WireError, match="not the state of a sampler"):
        SamplerState.from_json(value)


@given(length=st.integers(1, 400), seed=st.integers(-5, 2**70), which=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_each_pass_visits_each_item_once(length, seed, which):
    visited = [order(n, length, seed) for n in range(which * length, (which + 1) * length)]
    assert sorted(visited) == list(range(length))


def test_passes_and_seeds_are_different_permutations():
    def one(which, seed):
        return tuple(order(n, 100, seed) for n in range(which * 100, which * 100 + 100))

    assert len({one(0, 0), one(1, 0), one(2, 0), one(0, 1), one(1, 1)}) == 5


def test_the_order_spreads_neighbours_over_the_dataset():
    length = 100_003
    halves = [order(n, length, 7) < length // 2 for n in range(1000)]
    assert 400 < sum(halves) < 600


def test_the_order_never_changes_between_versions():
    assert [order(n, 1000, 0) for n in range(5)] == [224, 716, 363, 868, 540]


def test_union_of_ranges_is_sorted_and_disjoint():
    assert union([(5, 7), (1, 3), (2, 5), (9, 9)]) == ((1, 7),)
