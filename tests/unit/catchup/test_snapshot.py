import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fthsdp.catchup.snapshot import Snapshot, StripeAssembler, copy_stripe, stripe_range
from fthsdp.errors import NotReady, WireError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def snapshot(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(0, 2, shape, generator=generator).to(DTYPES[n % len(DTYPES)]) for n, shape in enumerate(shapes)
    ]
    return Snapshot.of({"answer": 42}, tensors)


def fill(assembler, stripe):
    part, data = stripe
    assembler.window(part)[:] = data
    assembler.filled(part)


SHAPES = [(3, 5), (), (7,), (0,), (2, 1, 3), (11,), (1,)]


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=12),
    donors=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_stripes_of_any_number_of_donors_make_the_whole_in_any_order(shapes, donors, seed):
    whole = snapshot(shapes, seed)
    stripes = [copy_stripe(whole, index, donors) for index in range(donors)]
    random.Random(seed).shuffle(stripes)
    assembler = StripeAssembler(json.loads(json.dumps(whole.meta)))
    for stripe in stripes:
        fill(assembler, stripe)
    back = assembler.snapshot()
    assert back.meta == whole.meta
    assert [(t.dtype, t.shape, bits(t)) for t in back.tensors] == [(t.dtype, t.shape, bits(t)) for t in whole.tensors]


@given(total=st.integers(0, 1000), donors=st.integers(1, 20))
def test_stripes_cover_every_byte_once_and_are_of_one_size(total, donors):
    parts = [stripe_range(total, index, donors) for index in range(donors)]
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert max(b - a for a, b in parts) - min(b - a for a, b in parts) <= 1


def test_a_stripe_is_a_copy_so_that_training_goes_on():
    tensor = torch.ones(8)
    part, data = copy_stripe(Snapshot.of({}, [tensor]), 0, 1)
    tensor.zero_()
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).equal(torch.ones(8))
    assert part == (0, 32)


def test_transposed_tensors_travel_in_their_logical_order():
    tensor = torch.arange(6.0).view(2, 3).t()
    assembler = StripeAssembler(Snapshot.of({}, [tensor]).meta)
    fill(assembler, copy_stripe(Snapshot.of({}, [tensor]), 0, 1))
    assert assembler.snapshot().tensors[0].equal(tensor)


def test_stripes_are_filled_from_several_threads_at_once():
    whole = Snapshot.of({}, [torch.randn(100_000)])
    assembler = StripeAssembler(whole.meta)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: fill(assembler, copy_stripe(whole, index, 32)), range(32)))
    assert assembler.snapshot().tensors[0].equal(whole.tensors[0])


def test_bytes_count_once_they_are_there():
    whole = snapshot(SHAPES)
    assembler = StripeAssembler(whole.meta)
    part, data = copy_stripe(whole, 0, 1)
    assembler.window(part)[:] = data
    assert not assembler.complete
    assembler.filled(part)
    assert assembler.complete


def test_an_incomplete_snapshot_is_not_ready_and_says_how_much_is_missing():
    whole = snapshot(SHAPES)
    assembler = StripeAssembler(whole.meta)
    fill(assembler, copy_stripe(whole, 1, 3))
    total = assembler.total_bytes
    start, stop = stripe_range(total, 1, 3)
    assert assembler.missing == ((0, start), (stop, total))
    with pytest.raises(NotReady, match=f"{total - (stop - start)} of the {total} bytes"):
        assembler.snapshot()


def test_the_same_bytes_twice_do_not_hide_missing_ones():
    whole = snapshot(SHAPES)
    assembler = StripeAssembler(whole.meta)
    for _ in range(3):
        fill(assembler, copy_stripe(whole, 0, 2))
    assert not assembler.complete


def test_a_snapshot_without_tensors_is_complete_at_once():
    assert StripeAssembler(Snapshot.of({"a": 1}, []).meta).snapshot().meta["content"] == {"a": 1}


@pytest.mark.parametrize("part", [(-1, 3), (0, 10**6), (5, 2)])
def test_bytes_outside_the_snapshot_are_refused(part):
    with pytest.raises(WireError, match="of a snapshot that has"):
        StripeAssembler(snapshot(SHAPES).meta).window(part)


def test_donors_that_describe_different_states_are_found_out():
    ours, theirs = Snapshot.of({"lr": 0.1}, []), Snapshot.of({"lr": 0.2}, [])
    with pytest.raises(WireError, match="cannot be combined"):
        StripeAssembler(ours.meta).check(theirs.meta)


def test_a_description_with_a_nan_is_equal_to_itself():
    meta = Snapshot.of({"best": math.nan}, []).meta
    StripeAssembler(meta).check(json.loads(json.dumps(meta)))


@pytest.mark.parametrize(
    "meta",
    [
        None,
        [],
        {},
        {"tensors": 3},
        {"tensors": [["float32"]]},
        {"tensors": [["float31", [1]]]},
        {"tensors": [["float32", [-1]]]},
        {"tensors": [["float32", [1.5]]]},
        {"tensors": [["float32", "ab"]]},
        {"tensors": [[["float32"], [1]]]},
        {"tensors": [["float32", [1 << 60]]]},
    ],
)
def test_nonsense_describes_no_snapshot(meta):
    with pytest.raises(WireError, match="does not describe the tensors"):
        StripeAssembler(meta)
