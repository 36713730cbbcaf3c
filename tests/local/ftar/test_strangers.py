"""Who is refused, and what happens to a ring whose neighbour speaks nonsense."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Any

import pytest

from fthsdp.errors import ConnectionLost, Refused
from fthsdp.ftar import FtarSettings
from fthsdp.ftar.frames import Header, Kind
from fthsdp.wire import open_blocking, parse_address

pytestmark = pytest.mark.local


def dial(member: Any, key: bytes, *, job: str = "test", purpose: str = "rail", **wrong: Any) -> socket.socket:
    """Dial a member as replica 1 of epoch 1 would."""
    details: dict[str, Any] = {"epoch": 1, "replica": 1, "attempt": 0, "rank": 0, "to": 0, "to_attempt": 0, "stream": 0}
    details |= {"chunk_bytes": 2 << 20, "streams": 1, "wire_dtype": "float32"}
    return open_blocking(
        member.endpoint.address, key, job=job, purpose=purpose, details={**details, **wrong}, timeout=5.0
    )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rank": 3}, "rank 3 dialled rail 0"),
        ({"to": 2}, "this is replica 0 attempt 0, not replica 2 attempt 0"),
        ({"to_attempt": 7}, "this is replica 0 attempt 0, not replica 0 attempt 7"),
        ({"epoch": 2}, "epoch 2 was cancelled: everything up to 4 is"),
        ({"epoch": 5, "replica": 2}, "replica 1 attempt 0 comes before this one in the ring, not replica 2"),
        ({"epoch": 5, "attempt": 1}, "replica 1 attempt 0 comes before this one in the ring, not replica 1 attempt 1"),
        ({"epoch": "5"}, r"not the hello of a rail: \('epoch',\)"),
        ({"chunk_bytes": 4}, "chunk_bytes is 2097152 here, not 4"),
        ({"streams": 2}, "streams is 1 here, not 2: use one value in the whole job"),
        ({"wire_dtype": "bfloat16"}, "wire_dtype is float32 here, not bfloat16"),
        ({"stream": 1}, "stream 1 is none of 0 to 0"),
        ({"purpose": "tea"}, "does not serve 'tea'"),
        ({"job": "other"}, "this is job 'test', not 'other'"),
    ],
)
def test_whoever_does_not_belong_is_refused_by_name(
    make_member: Any, key: bytes, wrong: dict[str, Any], reason: str
) -> None:
    member, other = make_member(0), make_member(1)
    member.engine.cancel(4)
    member.engine.connect(5, [member.place, other.place])
    with pytest.raises(Refused, match=reason):
        dial(member, key, **wrong)


def test_without_the_key_nobody_gets_in(make_member: Any) -> None:
    with pytest.raises(Refused, match="does not hold this job's key"):
        dial(make_member(0), b"another key, of another job")


def test_a_neighbour_that_is_refused_breaks_the_ring_with_the_reason(make_member: Any) -> None:
    a, b = make_member(0), make_member(1, rank=1)
    a.engine.connect(1, [a.place, b.place])
    error = a.await_broken(1)
    assert error.suspect == 1
    assert "replica 1: cannot be reached: rank 0 dialled rail 1" in str(error)


def test_a_neighbour_with_another_attempt_than_announced_is_found_when_the_epoch_comes(
    make_member: Any, key: bytes, quick: FtarSettings
) -> None:
    a, b = make_member(0, settings=quick), make_member(1, settings=quick)
    early = dial(a, key, attempt=3)
    a.engine.connect(1, [a.place, b.place])
    with early:
        early.settimeout(10)
        while early.recv(100):
            pass
    b.engine.connect(1, [a.place, b.place])
    a.await_connected(1)


def test_nobody_there_breaks_the_ring_after_the_connect_timeout(make_member: Any, quick: FtarSettings) -> None:
    a, b = make_member(0, settings=quick), make_member(1, settings=quick)
    line = [a.place, b.place]
    b.close()
    a.engine.connect(1, line)
    error = a.await_broken(1)
    assert error.suspect == 1
    assert "epoch 1: replica 1: " in str(error)


def test_a_left_neighbour_that_never_dials_is_named(make_member: Any, quick: FtarSettings) -> None:
    a, b = make_member(0, settings=quick), make_member(1, settings=quick)
    a.engine.connect(1, [a.place, b.place])
    # b is reached by a, but never hears of the epoch itself.
    error = a.await_broken(1)
    assert str(error) == "epoch 1: replica 1: not connected after 3.0 s"


def test_dialling_into_a_black_hole_can_be_called_off(make_member: Any) -> None:
    a = make_member(0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hole = type(a.place)(replica=1, attempt=0, address=f"127.0.0.1:{silent.getsockname()[1]}")
        a.engine.connect(1, [a.place, hole])
        taken, _ = silent.accept()
        with taken:
            a.engine.cancel(1)
            a.close()  # waits for the dialling thread
    assert not a.broken


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: here.example\r\n\r\n", "does not start a frame of a rail"),
        (bytes(64), "does not start a frame of a rail"),
        (Header(kind=Kind.ALIVE, epoch=2).encode(), "sent 'alive in epoch 2' on a connection of epoch 1"),
        (Header(kind=Kind.REDUCE, epoch=1, number=1, length=8).encode(), "without credit"),
        (Header(kind=Kind.GATHER, epoch=1, number=1, length=1 << 31).encode(), "without credit"),
        (Header(kind=Kind.CREDIT, epoch=1, number=1).encode(), "gave credit against the stream"),
        (Header(kind=Kind.ALIVE, epoch=1, length=8).encode(), "with 8 bytes of payload"),
    ],
)
def test_nonsense_from_a_neighbour_breaks_the_ring_by_name(
    make_member: Any, key: bytes, sent: bytes, reason: str
) -> None:
    a, b = make_member(0), make_member(1)
    with dial(a, key) as sock:
        a.engine.connect(1, [a.place, b.place])
        a.await_connected(1)
        sock.sendall(sent)
        error = a.await_broken(1)
    assert error.suspect == 1
    assert reason in str(error)


def test_a_gather_larger_than_allowed_breaks_the_ring(make_member: Any, key: bytes) -> None:
    a, b = make_member(0), make_member(1)
    with dial(a, key) as sock:
        a.engine.connect(1, [a.place, b.place])
        a.engine.activate(1)
        work = a.engine.all_gather(step=1, payload=b"")
        # Credit comes first; then far more is announced than a payload may have.
        sock.settimeout(10)
        assert Header.decode(sock.recv(32, socket.MSG_WAITALL)).kind is Kind.CREDIT
        sock.sendall(Header(kind=Kind.GATHER, epoch=1, number=1, length=1 << 30).encode())
        assert "1073741824 bytes" in str(a.await_broken(1))
        assert work.done()


def test_early_dials_are_bounded(make_member: Any, key: bytes) -> None:
    a = make_member(0)
    early = {dial(a, key, epoch=100 + i) for i in range(65)}
    try:
        # Which of them is given up depends on whose handshake was over first.
        given_up = ended(early, wanted=1, deadline=10)
        assert len(given_up) == 1
        assert ended(early - given_up, wanted=1, deadline=2.5) == set()
    finally:
        for sock in early:
            sock.close()


def ended(socks: set[socket.socket], *, wanted: int, deadline: float) -> set[socket.socket]:
    """Read keep-alives until ``wanted`` connections have ended, or until the deadline; return those that have."""
    found: set[socket.socket] = set()
    end = time.monotonic() + deadline
    while len(found) < wanted and (left := end - time.monotonic()) > 0:
        readable, _, _ = select.select(list(socks - found), [], [], left)
        found |= {sock for sock in readable if not sock.recv(4096)}
    return found


def test_a_dial_after_close_is_refused(make_member: Any, key: bytes) -> None:
    a = make_member(0)
    a.engine.close()
    with pytest.raises(Refused, match="this engine is closed"):
        dial(a, key)
    a.endpoint.close()
    with pytest.raises(ConnectionLost):
        dial(a, key)


def test_garbage_at_the_endpoint_disturbs_nobody(make_ring: Any) -> None:
    with make_ring(2) as ring:
        for sent in (b"\xff" * 4096, b"", b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x04null"):
            address = parse_address(ring[0].endpoint.address)
            # It may be cut before we have said everything.
            with contextlib.suppress(ConnectionError), socket.create_connection(address, timeout=10) as sock:
                sock.sendall(sent)
                with contextlib.suppress(OSError):  # no longer connected
                    sock.shutdown(socket.SHUT_WR)
                while sock.recv(1000):
                    pass
        works = [m.engine.all_gather(step=1, payload=b"x") for m in ring]
        assert [work.wait(20) for work in works] == [[b"x", b"x"]] * 2
