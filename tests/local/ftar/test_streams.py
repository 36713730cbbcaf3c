"""Several connections to one neighbour: each of them is the ring's, and credit bounds all of them together."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import Queue
from typing import Any

import pytest
import torch

from fthsdp.endpoint import Endpoint
from fthsdp.ftar import FtarSettings, RailMember
from fthsdp.ftar.frames import HEADER_BYTES, Header, Kind
from fthsdp.wire import open_blocking

pytestmark = pytest.mark.local

STREAMS = 3
CHUNK = 64 << 10
WINDOW = 6
SETTINGS = FtarSettings(
    streams=STREAMS,
    chunk_bytes=CHUNK,
    window=WINDOW,
    keepalive_interval=0.1,
    silence_timeout=1.0,
    connect_timeout=10.0,
)


class Impostor:
    """A neighbour made of bare sockets: to the member on its right, its left and its right one at once."""

    def __init__(self, endpoint: Endpoint, key: bytes) -> None:
        self._key = key
        self.endpoint = endpoint
        self.arrived: Queue[socket.socket] = Queue()
        self.dialled_us: list[socket.socket] = []
        """The member's connections to us: it sends here."""
        self.we_dialled: list[socket.socket] = []
        """Our connections to the member: it gives credit here."""

    def join(self, member: Any, stack: ExitStack) -> None:
        line = [member.place, RailMember(replica=1, attempt=0, address=self.endpoint.address)]
        member.engine.connect(1, line)
        for stream in range(STREAMS):
            details = {"epoch": 1, "replica": 1, "attempt": 0, "rank": 0, "to": 0, "to_attempt": 0, "stream": stream}
            details |= {"chunk_bytes": CHUNK, "streams": STREAMS, "wire_dtype": "float32"}
            sock = open_blocking(
                member.endpoint.address, self._key, job="test", purpose="rail", details=details, timeout=10
            )
            self.we_dialled.append(stack.enter_context(sock))
        member.await_connected(1)
        member.engine.activate(1)
        # The member may be connected before the endpoint's thread has handed over the last of them.
        self.dialled_us += [stack.enter_context(self.arrived.get(timeout=10)) for _ in range(STREAMS)]


@contextmanager
def facing_an_impostor(make_member: Any, key: bytes) -> Iterator[tuple[Any, Impostor]]:
    """Yield a real member 0 whose only neighbour is an impostor."""
    endpoint = Endpoint(host="127.0.0.1", key=key, job="test")
    impostor = Impostor(endpoint, key)
    endpoint.serve("rail", lambda sock, hello: impostor.arrived.put(sock))
    member = make_member(0, settings=SETTINGS)
    try:
        with ExitStack() as stack:
            impostor.join(member, stack)
            yield member, impostor
    finally:
        endpoint.close()


def receive(sock: socket.socket, count: int) -> bytes:
    return sock.recv(count, socket.MSG_WAITALL)


def test_one_connection_of_several_that_is_cut_breaks_the_ring_at_once(make_member: Any, key: bytes) -> None:
    with facing_an_impostor(make_member, key) as (member, impostor):
        work = member.engine.all_gather(step=1, payload=b"")
        began = time.monotonic()
        impostor.dialled_us[1].close()
        error = member.await_broken(1)
        assert time.monotonic() - began < SETTINGS.silence_timeout / 2
        assert error.suspect == 1
        assert work.done()
        for sock in (*impostor.we_dialled, impostor.dialled_us[0], impostor.dialled_us[2]):
            ended(sock)


def ended(sock: socket.socket) -> None:
    """Read until the other side has closed; fails when it has not after a while."""
    sock.settimeout(10)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass


def test_nonsense_on_one_connection_of_several_breaks_the_ring_at_once(make_member: Any, key: bytes) -> None:
    with facing_an_impostor(make_member, key) as (member, impostor):
        began = time.monotonic()
        impostor.we_dialled[2].sendall(bytes(64))
        error = member.await_broken(1)
        assert time.monotonic() - began < SETTINGS.silence_timeout / 2
        assert "replica 1: " in str(error)
        assert "does not start a frame" in str(error)


def test_a_frame_on_the_wrong_connection_breaks_the_ring(make_member: Any, key: bytes) -> None:
    with facing_an_impostor(make_member, key) as (member, impostor):
        work = member.engine.all_gather(step=1, payload=b"")
        # The first frame belongs to the first connection, and only there it has credit.
        impostor.we_dialled[1].sendall(Header(kind=Kind.GATHER, epoch=1, number=1).encode())
        assert "without credit" in str(member.await_broken(1))
        assert work.done()


def test_silence_on_one_connection_of_several_breaks_the_ring(make_member: Any, key: bytes) -> None:
    with facing_an_impostor(make_member, key) as (member, impostor):
        alive = Header(kind=Kind.ALIVE, epoch=1).encode()
        speaking = [*impostor.we_dialled, *impostor.dialled_us[:-1]]
        began = time.monotonic()
        while not member.broken and time.monotonic() - began < 10:
            for sock in speaking:
                sock.sendall(alive)
            select.select([], [], [], SETTINGS.keepalive_interval)
        assert "replica 1: silent for" in str(member.await_broken(1))
        assert time.monotonic() - began > SETTINGS.silence_timeout * 0.9


def test_a_neighbour_that_does_not_drain_is_sent_no_more_than_its_window(make_member: Any, key: bytes) -> None:
    allowed = 2
    with facing_an_impostor(make_member, key) as (member, impostor):
        numel = 64 * CHUNK
        source, out = torch.ones(numel), torch.empty(numel)
        work = member.engine.all_reduce(step=1, bucket=0, source=source, out=out)
        # Without credit nothing but keep-alives comes.
        for sock in impostor.dialled_us:
            assert Header.decode(receive(sock, HEADER_BYTES)).kind is Kind.ALIVE
            sock.sendall(Header(kind=Kind.CREDIT, epoch=1, number=allowed).encode())
        for sock in impostor.dialled_us:
            sock.settimeout(10)
            for _ in range(allowed):
                header = next_data(sock)
                assert header.length == CHUNK
                receive(sock, header.length)
        for sock in impostor.dialled_us:
            assert Header.decode(receive(sock, HEADER_BYTES)).kind is Kind.ALIVE
        assert not work.done()


def next_data(sock: socket.socket) -> Header:
    """Read past keep-alives."""
    while (header := Header.decode(receive(sock, HEADER_BYTES))).kind is Kind.ALIVE:
        pass
    return header


def test_a_receiver_gives_credit_for_no_more_than_its_window(make_member: Any, key: bytes) -> None:
    with facing_an_impostor(make_member, key) as (member, impostor):
        numel = 64 * CHUNK
        for bucket in range(3):
            member.engine.all_reduce(step=1, bucket=bucket, source=torch.ones(numel), out=torch.empty(numel))
        given = 0
        for sock in impostor.we_dialled:
            sock.settimeout(10)
            given += next_data(sock).number
            # And no more follows while nothing is sent.
            assert Header.decode(receive(sock, HEADER_BYTES)).kind is Kind.ALIVE
        assert given * CHUNK == WINDOW * CHUNK
