"""The header of a frame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fthsdp.errors import WireError
from fthsdp.ftar.frames import HEADER_BYTES, Header, Kind

HEADERS = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    epoch=st.integers(0, 2**32 - 1),
    number=st.integers(0, 2**64 - 1),
    bucket=st.integers(0, 2**32 - 1),
    round=st.integers(0, 2**16 - 1),
    chunk=st.integers(0, 2**32 - 1),
    length=st.integers(0, 2**32 - 1),
)


@given(HEADERS)
def test_a_header_survives_the_wire(header: Header) -> None:
    data = header.encode()
    assert len(data) == HEADER_BYTES
    assert Header.decode(data) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES).filter(lambda data: data[:4] != b"FTAR"))
def test_bytes_without_the_mark_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="does not start a frame"):
        Header.decode(data)


def test_an_unknown_kind_is_refused() -> None:
    data = bytearray(Header(kind=Kind.ALIVE, epoch=1).encode())
    data[4] = 99
    with pytest.raises(WireError, match="does not start a frame"):
        Header.decode(data)


def test_a_header_says_in_words_what_it_is() -> None:
    header = Header(kind=Kind.REDUCE, epoch=3, number=7, bucket=1, round=2, chunk=4, length=80)
    assert str(header) == "reduce of step 7, bucket 1, round 2, chunk 4, 80 bytes, epoch 3"
    assert str(Header(kind=Kind.ALIVE, epoch=3)) == "alive in epoch 3"
