"""A rank's port and the ring under TLS: what works as without it, and who is turned away with which words."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.local.certificates import Authority

from fthsdp import endpoint as endpoint_module
from fthsdp.endpoint import Endpoint
from fthsdp.errors import ConnectionLost, Refused, Untrusted
from fthsdp.ftar import FtarSettings
from fthsdp.ftar import engine as engine_module
from fthsdp.tls import Tls, TlsSocket
from fthsdp.wire import Json, open_blocking, parse_address, receive_frame, send_frame

pytestmark = pytest.mark.local

SMALL = FtarSettings(chunk_bytes=40_000, window=8, streams=2, silence_timeout=60, connect_timeout=20)
"""Chunks that no record of TLS ends with."""


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> Tls:
    return Tls(authority.issue(tmp_path / "tls"))


@pytest.fixture
def endpoint(tls: Tls, key: bytes) -> Iterator[Endpoint]:
    threads = set(threading.enumerate())
    made = Endpoint(host="127.0.0.1", key=key, job="test", tls=tls)
    made.serve("echo", echo)
    yield made
    made.close()
    assert set(threading.enumerate()) <= threads


def echo(sock: socket.socket, hello: Json) -> None:
    """Send back what comes, until the other side is done."""
    with sock:
        while data := sock.recv(100_000):
            sock.sendall(data)


def dial(where: str, key: bytes, tls: Tls | None) -> socket.socket:
    return open_blocking(where, key, job="test", purpose="echo", timeout=10.0, tls=tls)


def works(endpoint: Endpoint, key: bytes, tls: Tls | None) -> bool:
    with dial(endpoint.address, key, tls) as sock:
        send_frame(sock, {"x": 1})
        return receive_frame(sock) == {"x": 1}


# --- a ring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [FtarSettings(silence_timeout=60), SMALL], ids=["default", "small chunks"])
def test_a_ring_computes_the_same_sums_under_tls(make_ring: Any, tls: Tls, settings: FtarSettings) -> None:
    generator = torch.Generator().manual_seed(7)
    with make_ring(3, settings=settings, tls=tls) as ring:
        for step, numel in enumerate((0, 1, 1_003, 400_009, 1_500_000)):
            sources = [torch.randn(numel, generator=generator) for _ in ring]
            outs = [torch.empty(numel) for _ in ring]
            works = [
                member.engine.all_reduce(step=step, bucket=0, source=source, out=out)
                for member, source, out in zip(ring, sources, outs, strict=True)
            ]
            works += [member.engine.all_gather(step=step, payload=b"%d" % member.replica) for member in ring]
            assert [work.wait(20) for work in works] == [None] * 3 + [[b"0", b"1", b"2"]] * 3
            assert len({out.numpy().tobytes() for out in outs}) == 1
            torch.testing.assert_close(outs[0].double(), sum(s.double() for s in sources), atol=1e-5, rtol=1e-5)


def test_what_came_along_with_something_else_is_not_left_lying(
    make_ring: Any, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One piece for each time that the kernel says so: the others of a record, or of one fetch, it does not know of.
    monkeypatch.setattr(engine_module, "_READS", 1)
    settings = FtarSettings(keepalive_interval=30, silence_timeout=90, connect_timeout=20)
    with make_ring(2, settings=settings, tls=tls) as ring:
        for _ in range(5):
            works = [m.engine.all_gather(step=s, payload=b"%d" % s) for m in ring for s in range(40)]
            assert [work.wait(10) for work in works] == [[b"%d" % s] * 2 for s in range(40)] * 2


def test_a_goodbye_under_tls_breaks_nobodys_ring_and_the_next_epoch_is_entered(make_ring: Any, tls: Tls) -> None:
    with make_ring(3, tls=tls) as ring:
        works = [m.engine.all_gather(step=1, payload=b"x" * 50_000) for m in ring]
        ring.enter(2)
        for work in works:
            work.wait(20)
        enders = [threading.Thread(target=member.close, kwargs={"linger": 20}) for member in ring]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        assert [member.broken for member in ring] == [[], [], []]


def test_a_neighbour_that_is_gone_breaks_the_ring_under_tls(make_ring: Any, tls: Tls) -> None:
    with make_ring(3, tls=tls) as ring:
        ring[1].close()
        for replica in (0, 2):
            assert ring[replica].await_broken(1).suspect is not None


def test_keepalives_under_tls_keep_a_quiet_ring(make_ring: Any, quick: FtarSettings, tls: Tls) -> None:
    with make_ring(2, settings=quick, tls=tls) as ring:
        assert not threading.Event().wait(2 * quick.silence_timeout)
        assert [member.broken for member in ring] == [[], []]


def test_a_neighbour_of_another_authority_breaks_the_ring_with_the_reason(
    make_member: Any, tls: Tls, stranger: Authority, tmp_path: Path
) -> None:
    a, b = make_member(0, tls=tls), make_member(1, tls=Tls(stranger.issue(tmp_path / "other")))
    a.engine.connect(1, [a.place, b.place])
    error = a.await_broken(1)
    assert error.suspect == 1
    assert f"replica 1: cannot be reached: {b.endpoint.address}: its certificate is not accepted here" in str(error)


# --- who gets in ----------------------------------------------------------------------------------------------------


def test_one_thread_receives_while_others_send(endpoint: Endpoint, key: bytes, tls: Tls) -> None:
    pieces = [bytes([number]) * 150_000 for number in range(40)]
    with dial(endpoint.address, key, tls) as sock:
        senders = [
            threading.Thread(target=lambda mine=pieces[number::2]: [sock.sendall(p) for p in mine])  # type: ignore[misc]
            for number in range(2)
        ]
        for sender in senders:
            sender.start()
        received = bytearray()
        while len(received) < 40 * 150_000:
            data = sock.recv(1 << 20)
            assert data
            received += data
        for sender in senders:
            sender.join()
    assert bytes(sorted(received)) == b"".join(pieces)


def test_a_certificate_of_another_authority_is_refused_by_both_sides(
    endpoint: Endpoint, key: bytes, tls: Tls, stranger: Authority, authority: Authority, tmp_path: Path
) -> None:
    folder = stranger.issue(tmp_path / "other")
    with pytest.raises(Untrusted, match=f"{endpoint.address}: its certificate is not accepted here: self-signed"):
        dial(endpoint.address, key, Tls(folder))
    (folder / "ca.crt").write_bytes(authority.certificate.read_bytes())
    with pytest.raises(Untrusted, match=f"{endpoint.address} does not accept our certificate: .*unknown ca"):
        dial(endpoint.address, key, Tls(folder))
    assert works(endpoint, key, tls)


def test_a_certificate_that_has_run_out_is_refused_by_both_sides(
    key: bytes, tls: Tls, endpoint: Endpoint, authority: Authority, tmp_path: Path
) -> None:
    old = Tls(authority.issue(tmp_path / "old", days=-1))
    with pytest.raises(Untrusted, match=f"{endpoint.address} does not accept our certificate: .*certificate expired"):
        dial(endpoint.address, key, old)
    late = Endpoint(host="127.0.0.1", key=key, job="test", tls=old)
    try:
        with pytest.raises(Untrusted, match=f"{late.address}: its certificate is not .* certificate has expired"):
            dial(late.address, key, tls)
    finally:
        late.close()


def test_whoever_speaks_plain_is_told_that_tls_is_on(endpoint: Endpoint, key: bytes, tls: Tls) -> None:
    with pytest.raises(Refused, match="TLS is on here, and the hello came without it: set FTHSDP_TLS_DIR in all"):
        dial(endpoint.address, key, None)
    assert works(endpoint, key, tls)


def test_whoever_speaks_tls_is_told_that_it_is_off(key: bytes, tls: Tls) -> None:
    plain = Endpoint(host="127.0.0.1", key=key, job="test")
    plain.serve("echo", echo)
    try:
        with pytest.raises(Refused, match=f"{plain.address}: TLS is on here, and not on the other side: set"):
            dial(plain.address, key, tls)
        assert works(plain, key, None)
    finally:
        plain.close()


def test_the_job_key_is_asked_for_under_tls_too(endpoint: Endpoint, tls: Tls) -> None:
    with pytest.raises(Refused, match="does not hold this job's key"):
        dial(endpoint.address, b"another key, of another job", tls)


@pytest.mark.parametrize(
    "hello",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05nonse", b"\xff" * 1000, b"\x80\x2e\x01\x00\x02"],
    ids=["http", "no hello", "noise", "SSL 2"],
)
def test_garbage_in_place_of_a_tls_hello_is_dropped(endpoint: Endpoint, key: bytes, tls: Tls, hello: bytes) -> None:
    with socket.create_connection(parse_address(endpoint.address), timeout=20) as sock:
        sock.sendall(hello)
        sock.shutdown(socket.SHUT_WR)
        try:
            while sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert works(endpoint, key, tls)


def test_whoever_never_finishes_the_tls_handshake_is_cut(
    endpoint: Endpoint, key: bytes, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_TIMEOUT", 0.3)
    with ExitStack() as stack:
        for begun in (b"", b"\x16\x03\x01\x02\x00\x01"):
            sock = stack.enter_context(socket.create_connection(parse_address(endpoint.address), timeout=20))
            sock.sendall(begun)
            assert sock.recv(1) == b""
    monkeypatch.undo()
    assert works(endpoint, key, tls)


def test_a_server_that_never_answers_a_tls_hello_is_given_up_by_name(key: bytes, tls: Tls) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=f"{where}: timed out"):
            open_blocking(where, key, job="test", purpose="echo", timeout=0.3, tls=tls)


def test_a_handshake_is_worth_nothing_when_somebody_with_a_certificate_of_the_same_authority_passes_it_on(
    endpoint: Endpoint, key: bytes, tls: Tls, authority: Authority, tmp_path: Path
) -> None:
    other = Tls(authority.issue(tmp_path / "other"))

    def pass_on(listener: socket.socket) -> None:
        with TlsSocket(listener.accept()[0], other, server_side=True) as client:
            client.begin()
            dialled = socket.create_connection(parse_address(endpoint.address), timeout=20)
            with TlsSocket(dialled, other, server_side=False) as server:
                server.begin()
                send_frame(server, receive_frame(client))
                send_frame(client, receive_frame(server))
                assert client.recv(1) == b""

    with socket.create_server(("127.0.0.1", 0)) as listener:
        middle = threading.Thread(target=pass_on, args=(listener,))
        middle.start()
        with pytest.raises(Refused, match="does not hold this job's key"):
            dial(f"127.0.0.1:{listener.getsockname()[1]}", key, tls)
        middle.join(20)
        assert not middle.is_alive()


def test_a_renewed_certificate_counts_for_new_connections_and_open_ones_stay(
    endpoint: Endpoint, key: bytes, stranger: Authority, authority: Authority, tmp_path: Path
) -> None:
    old = Tls(authority.issue(tmp_path / "old"))
    with dial(endpoint.address, key, old) as before:
        stranger.issue(tmp_path / "tls")
        assert works(endpoint, key, Tls(tmp_path / "tls"))
        with pytest.raises(Untrusted, match="its certificate is not accepted here"):
            dial(endpoint.address, key, old)
        send_frame(before, {"still": "here"})
        assert receive_frame(before) == {"still": "here"}
