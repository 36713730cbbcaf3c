"""Tensors are checked before they are used, and what is added is added exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fthsdp.ftar.reduce import PIECE_BYTES, AddingSink, Scratch, bytes_of, check_pair, elements_of


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(4), "source is a 2-D"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), "out is a 1-D torch.bfloat16"),
        (torch.zeros(8)[::2], torch.zeros(4), "source is not contiguous"),
        (torch.zeros(4), torch.zeros(5), "source has 4 elements and out 5"),
        (torch.zeros(4, device="meta"), torch.zeros(4), "on meta"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(source: torch.Tensor, out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_pair(source, out)


def test_source_and_out_must_not_overlap() -> None:
    memory = torch.zeros(10)
    with pytest.raises(ValueError, match="overlap"):
        check_pair(memory[:6], memory[4:])
    check_pair(memory[:5], memory[5:])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, PIECE_BYTES), min_size=1, max_size=20), st.integers(1, 3 * PIECE_BYTES // 4))
def test_a_chunk_is_added_however_its_bytes_arrive(counts: list[int], elements: int) -> None:
    source, out = np.ones(elements + 2, np.float32), np.zeros(elements + 2, np.float32)
    incoming = memoryview(np.arange(elements, dtype=np.float32).tobytes())
    sink, turn = AddingSink(Scratch(), source, out, 1, elements + 1), 0
    while room := sink.room():
        count = min(len(room), counts[turn % len(counts)])
        room[:count], incoming = incoming[:count], incoming[count:]
        sink.filled(count)
        turn += 1
    assert not incoming
    assert np.array_equal(out[1:-1], np.arange(1, elements + 1, dtype=np.float32))
    assert out[0] == out[-1] == 0


def test_views_share_the_memory_of_the_tensor() -> None:
    tensor = torch.nn.Parameter(torch.zeros(3))
    bytes_of(elements_of(tensor))[:4] = np.float32(7).tobytes()
    assert tensor[0].item() == 7
    assert len(bytes_of(elements_of(torch.empty(0)))) == 0
