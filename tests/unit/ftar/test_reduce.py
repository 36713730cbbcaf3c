"""Tensors are checked before they are used, and what is added is added exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fthsdp.ftar.reduce import (
    PIECE_BYTES,
    AddingSink,
    ConvertingSink,
    Sink,
    WireBuffer,
    bytes_of,
    check_pair,
    elements_of,
)
from fthsdp.ftar.settings import WireDtype


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


def feed(sink: Sink, data: bytes, counts: list[int]) -> None:
    """Put ``data`` into a sink, as many bytes at a time as ``counts`` say in turn."""
    turn = 0
    while room := sink.room():
        count = min(len(room), counts[turn % len(counts)])
        room[:count], data = data[:count], data[count:]
        sink.filled(count)
        turn += 1
    assert not data


COUNTS = st.lists(st.integers(1, PIECE_BYTES), min_size=1, max_size=20)


@settings(deadline=None, max_examples=40)
@given(COUNTS, st.integers(1, 3 * PIECE_BYTES // 4))
def test_a_chunk_is_added_however_its_bytes_arrive(counts: list[int], elements: int) -> None:
    source, out = np.ones(elements + 2, np.float32), np.zeros(elements + 2, np.float32)
    feed(AddingSink(source[1:-1], out[1:-1]), np.arange(elements, dtype=np.float32).tobytes(), counts)
    assert np.array_equal(out[1:-1], np.arange(1, elements + 1, dtype=np.float32))
    assert out[0] == out[-1] == 0


NARROW = st.sampled_from([WireDtype.BFLOAT16, WireDtype.FLOAT16])
WILD = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 1e30, 1e-30, -0.0, 1 / 3])


@settings(deadline=None, max_examples=40)
@given(COUNTS, st.integers(1, 40_000), NARROW, st.booleans(), st.booleans())
def test_a_narrow_chunk_is_converted_however_its_bytes_arrive(
    counts: list[int], elements: int, dtype: WireDtype, adds: bool, final: bool
) -> None:
    sent = torch.arange(elements).float().sin()
    wire = bytes(WireBuffer(dtype, 2 * elements).put(sent))
    source, out = torch.full((elements,), 0.3), torch.empty(elements)
    feed(
        ConvertingSink(WireBuffer(dtype, 2 * elements), out, source=source if adds else None, final=final), wire, counts
    )
    narrow = getattr(torch, dtype)
    expected = sent.to(narrow).float()
    if adds:
        expected += source
        if final:
            expected = expected.to(narrow).float()
    assert torch.equal(out, expected)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40_000), NARROW, st.integers(1, len(WILD)))
def test_what_is_sent_on_again_has_the_same_bits(elements: int, dtype: WireDtype, period: int) -> None:
    # NaNs too: a member with other bits would be taken for diverged.
    values, received = WILD[torch.arange(elements) % period], torch.zeros(elements)
    total = torch.empty(elements)
    first = bytes(WireBuffer(dtype, 2 * elements).put(values))
    feed(ConvertingSink(WireBuffer(dtype, 2 * elements), total, source=received, final=True), first, [1 << 20])
    kept, bits = total, b""
    for _ in range(3):
        bits = bytes(WireBuffer(dtype, 2 * elements).put(kept))
        kept = torch.empty(elements)
        feed(ConvertingSink(WireBuffer(dtype, 2 * elements), kept, source=None, final=True), bits, [1 << 20])
        assert kept.numpy().tobytes() == total.numpy().tobytes()


def test_views_share_the_memory_of_the_tensor() -> None:
    tensor = torch.nn.Parameter(torch.zeros(3))
    bytes_of(elements_of(tensor))[:4] = np.float32(7).tobytes()
    assert tensor[0].item() == 7
    assert len(bytes_of(elements_of(torch.empty(0)))) == 0
