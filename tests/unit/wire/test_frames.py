"""Frames: exactly one JSON object each, no larger than allowed."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fthsdp.errors import ConnectionLost, WireError
from fthsdp.wire import LARGEST_FRAME, encode_frame, parse_address, read_frame, receive_frame, send_frame

Pair = tuple[socket.socket, socket.socket]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        yield ours, theirs


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_what_goes_in_comes_out(message: dict[str, object]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, message)
        assert receive_frame(theirs) == message


def test_a_frame_in_small_pieces_is_put_together(pair: Pair) -> None:
    data = encode_frame({"a": "b" * 10})
    for i in range(len(data) - 1):
        pair[0].sendall(data[i : i + 1])
    pair[0].sendall(data[-1:])
    assert receive_frame(pair[1]) == {"a": "b" * 10}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[1]", "a frame holds a list, not an object"),
        (b"3", "a frame holds a int, not an object"),
        (b"{", "a frame holds no JSON"),
        (b"", "a frame holds no JSON"),
        (b"\xff\xfe\x00", "a frame holds no JSON"),
        (b'{"a": \x80}', "a frame holds no JSON"),
        (b"[" * 60_000, "a frame holds no JSON"),
    ],
)
def test_nonsense_is_one_clear_error_blocking_and_async(pair: Pair, body: bytes, message: str) -> None:
    data = struct.pack("!I", len(body)) + body
    pair[0].sendall(data)
    with pytest.raises(WireError, match=message):
        receive_frame(pair[1])

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        await read_frame(reader)

    with pytest.raises(WireError, match=message):
        asyncio.run(read())


@pytest.mark.parametrize("length", [LARGEST_FRAME + 1, 0xFFFFFFFF])
def test_an_oversized_frame_is_refused_before_it_is_read(pair: Pair, length: int) -> None:
    pair[0].sendall(struct.pack("!I", length))
    with pytest.raises(WireError, match=f"a frame of {length} bytes was announced; at most {LARGEST_FRAME}"):
        receive_frame(pair[1])


def test_an_oversized_message_is_not_sent() -> None:
    with pytest.raises(WireError, match="is larger than a frame may be"):
        encode_frame({"a": "b" * LARGEST_FRAME})


@pytest.mark.parametrize("cut", [0, 2, 4, 6])
def test_a_peer_that_closes_inside_a_frame_is_lost(pair: Pair, cut: int) -> None:
    data = encode_frame({"a": 1})
    pair[0].sendall(data[:cut])
    pair[0].close()
    with pytest.raises(ConnectionLost, match="the peer closed the connection"):
        receive_frame(pair[1])

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data[:cut])
        reader.feed_eof()
        await read_frame(reader)

    with pytest.raises(ConnectionLost, match="the peer closed the connection"):
        asyncio.run(read())


def test_sending_to_a_closed_peer_says_so(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(ConnectionLost, match="sending failed"):
        send_frame(pair[0], {"a": "b" * 100_000})


@pytest.mark.parametrize(
    ("address", "parsed"),
    [("host:1", ("host", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:80", ("::1", 80))],
)
def test_addresses(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:x", "host:1 ", "host:²"]
)
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(WireError, match="is not host:port"):
        parse_address(address)
