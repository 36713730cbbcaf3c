"""Whatever comes to the coordinator's port: it is refused or dropped, and the others do not notice."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from fthsdp import wire
from fthsdp.coordinator.client import OperatorClient
from fthsdp.coordinator.messages import Hello, MemberState, State
from fthsdp.coordinator.server import HANDSHAKE_TIMEOUT
from fthsdp.errors import ConnectionLost, Refused
from fthsdp.wire import ClientHandshake, open_blocking, receive_frame, send_frame

pytestmark = pytest.mark.local
Make = Callable[..., Any]
KEY = b"k" * 32
READY = MemberState(origin="0123456789abcdef")


@pytest.fixture
def process(coordinator: Make) -> Any:
    return coordinator(replicas=2)


def dial(process: Any) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", process.port), timeout=30)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Read until the other side closes; raises TimeoutError when it does not."""
    with sock:
        try:
            while sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
    return True


def open_leader(process: Any, replica: int, attempt: int) -> socket.socket:
    details = {"replica": replica, "attempt": attempt}
    sock = open_blocking(process.address, KEY, job="job", purpose="leader", details=details, timeout=30)
    sock.settimeout(30)
    return sock


def test_a_leader_of_another_job_is_refused_for_good(process: Any, leaders: list[Any], leader: Make) -> None:
    thief, stranger = leader(process.address, 1, 1, key=b"x" * 32), leader(process.address, 1, 1, job="other")
    assert thief.refusal() == "the server does not hold this job's key"
    assert stranger.refusal() == "this is job 'job', not 'other'"
    process.ends_undisturbed(leaders)


def test_another_protocol_version_is_refused_for_good(
    process: Any, leaders: list[Any], leader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = wire.PROTOCOL
    monkeypatch.setattr(wire, "PROTOCOL", ours - 1)
    reason = f"protocol version {ours - 1} is not {ours}: use the same fthsdp everywhere"
    assert reason in leader(process.address, 1, 1).refusal()
    monkeypatch.undo()
    process.ends_undisturbed(leaders)


def test_a_key_thief_without_the_key_gets_no_further_than_its_proof(process: Any, leaders: list[Any]) -> None:
    with dial(process) as sock:
        send_frame(sock, ClientHandshake(b"x" * 32, job="job", purpose="leader").hello)
        receive_frame(sock)
        send_frame(sock, {"proof": "0" * 64})
        assert receive_frame(sock) == {"refused": "wrong job key"}
        assert is_closed(sock)
    process.ends_undisturbed(leaders)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "no object": b"\x00\x00\x00\x02[]",
    "no json": b"\x00\x00\x00\x05nonse",
    "nested": b"\x00\x00\xea\x60" + b"[" * 60_000,
    "huge": b"\xff\xff\xff\xff",
    "larger than a hello": struct.pack("!I", 70_000),
}


def test_garbage_is_dropped(process: Any, leaders: list[Any]) -> None:
    for what, data in GARBAGE.items():
        sock = dial(process)
        sock.sendall(data)
        assert is_closed(sock), what
    process.ends_undisturbed(leaders)


SENSELESS = [
    ({}, "rail", "a coordinator talks to leaders and operators, not to 'rail'"),
    ({}, "leader", "a leader's hello needs the numbers of its replica and its attempt"),
    ({"replica": "0", "attempt": True}, "leader", "a leader's hello needs the numbers"),
]


def test_a_hello_that_makes_no_sense_is_refused(process: Any, leaders: list[Any]) -> None:
    for details, purpose, reason in SENSELESS:
        with pytest.raises(Refused, match=reason):
            open_blocking(process.address, KEY, job="job", purpose=purpose, details=details, timeout=30)
    process.ends_undisturbed(leaders)


NO_HELLO: dict[str, dict[str, Any]] = {
    "somebody else's hello": {"kind": "hello", "replica": 0, "attempt": 0, "addresses": ["h:1"]},
    "no hello": {"kind": "state", "state": {}},
    "an operator's question": {"kind": "status-request"},
    "unknown kind": {"kind": "nonsense"},
    "empty": {},
}


def test_a_leader_that_does_not_begin_with_its_own_hello_is_dropped(process: Any, leaders: list[Any]) -> None:
    for what, frame in NO_HELLO.items():
        sock = open_leader(process, 1, 7)
        send_frame(sock, frame)
        assert is_closed(sock), what
    process.ends_undisturbed(leaders)


NONSENSE: list[dict[str, Any]] = [
    {"kind": "state", "state": {"epoch": "many"}},
    {"kind": "exited", "replica": 0},
    {"kind": "bye"},
    {"kind": 3},
]


def test_a_leader_that_talks_nonsense_later_loses_its_connection_only(process: Any, leaders: list[Any]) -> None:
    hello = Hello(replica=1, attempt=0, addresses=("h1.0:1",), state=leaders[1].state)
    for frame in NONSENSE:
        sock = open_leader(process, 1, 0)
        send_frame(sock, hello.model_dump(mode="json"))
        send_frame(sock, frame)
        assert is_closed(sock), frame
    # The real leader, whose place these connections had taken, comes back by itself.
    process.ends_undisturbed(leaders)


def test_an_operator_that_talks_nonsense_is_dropped(process: Any, leaders: list[Any]) -> None:
    sock = open_blocking(process.address, KEY, job="job", purpose="operator", timeout=30)
    sock.settimeout(30)
    send_frame(sock, {"kind": "exited", "replica": "all"})
    assert is_closed(sock)
    process.ends_undisturbed(leaders)


def test_half_open_connections_keep_nobody_out(process: Any, leaders: list[Any], leader: Make) -> None:
    strangers = [dial(process) for _ in range(300)]
    for sock in strangers[:100]:
        sock.sendall(b"\x00\x00")
    strangers[-1].settimeout(HANDSHAKE_TIMEOUT / 2)
    assert is_closed(strangers[-1]), "more than the allowed number of strangers are closed at once"
    for sock in strangers:
        sock.close()
    assert "does not exist" in leader(process.address, 7).refusal()
    process.ends_undisturbed(leaders)


def test_a_leader_that_never_reads_is_no_hindrance(coordinator: Make, leader: Make) -> None:
    process = coordinator("--silence-timeout", "2", replicas=2)
    deaf = open_leader(process, 1, 0)
    send_frame(deaf, Hello(replica=1, attempt=0, addresses=("h1.0:1",), state=READY).model_dump(mode="json"))
    other = leader(process.address, 0)
    assert other.wait_for_epoch(1).active == (0, 1)
    process.wait_for_log(r"replica 1 attempt 0 is out \(Silent\)")
    assert other.wait_for_epoch(2).active == (0,)
    assert is_closed(deaf)


def test_a_frozen_leader_is_refused_when_it_wakes_up(coordinator: Make, leader: Make) -> None:
    process = coordinator("--silence-timeout", "2", replicas=2)
    awake, frozen = leader(process.address, 0), open_leader(process, 1, 0)
    hello = Hello(replica=1, attempt=0, addresses=("h1.0:1",), state=READY)
    send_frame(frozen, hello.model_dump(mode="json"))
    awake.wait_for_epoch(2)
    kinds = []
    with frozen:
        while True:
            try:
                kinds.append(receive_frame(frozen)["kind"])
            except ConnectionLost:
                break
    assert kinds == ["welcome", "install", "refused-member"]
    with open_leader(process, 1, 0) as again:
        state = MemberState(epoch=1, step=0, serves=True)
        send_frame(again, hello.model_copy(update={"state": state}).model_dump(mode="json"))
        assert "was taken out or replaced" in receive_frame(again)["reason"]


def test_a_second_process_with_the_same_attempt_is_refused_and_the_first_one_stays(
    process: Any, leaders: list[Any]
) -> None:
    with open_leader(process, 1, 0) as sock:
        send_frame(sock, Hello(replica=1, attempt=0, addresses=("elsewhere:1",)).model_dump(mode="json"))
        assert "in use by another process" in receive_frame(sock)["reason"]
        assert is_closed(sock)
    process.ends_undisturbed(leaders)


def test_the_operator_is_told_that_nobody_is_there_or_that_it_was_refused(process: Any, leaders: list[Any]) -> None:
    async def ask(address: str, key: bytes, timeout: float = 30) -> Any:
        client = OperatorClient(address, key, job="job", timeout=timeout)
        try:
            return await client.status()
        finally:
            await client.close()

    with pytest.raises(Refused, match="does not hold this job's key"):
        asyncio.run(ask(process.address, b"x" * 32))
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConnectionLost):
        asyncio.run(ask(f"127.0.0.1:{silent.getsockname()[1]}", KEY, timeout=1))
    process.ends_undisturbed(leaders)
    with pytest.raises(ConnectionLost):
        asyncio.run(ask(process.address, KEY))


def test_state_messages_have_no_effect_before_the_hello(process: Any, leaders: list[Any]) -> None:
    sock = open_leader(process, 0, 1)
    send_frame(sock, State(state=MemberState(finished=99)).model_dump(mode="json"))
    assert is_closed(sock)
    process.ends_undisturbed(leaders)
