"""The handshake: both sides hold the job's key, and nobody without it gets anywhere."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from fthsdp.errors import ConnectionLost, FthsdpError, Refused, WireError
from fthsdp.wire import (
    LARGEST_HELLO,
    PROTOCOL,
    ClientHandshake,
    ServerHandshake,
    accept_blocking,
    receive_frame,
    send_frame,
)

KEY = b"k" * 32


def client(key: bytes = KEY, job: str = "job", **details: Any) -> ClientHandshake:
    return ClientHandshake(key, job=job, purpose="rail", details=details)


def server(key: bytes = KEY, job: str = "job") -> ServerHandshake:
    return ServerHandshake(key, job=job)


def test_both_sides_end_up_with_the_same_hello() -> None:
    ours, theirs = client(epoch=3), server()
    ours.finish(theirs.accept(ours.answer(theirs.challenge(ours.hello))))
    assert theirs.hello == ours.hello
    assert theirs.hello["epoch"] == 3


@pytest.mark.parametrize(
    ("change", "value"),
    [("epoch", 4), ("purpose", "leader"), ("nonce", "0" * 32), ("extra", True)],
)
def test_a_hello_that_was_changed_on_its_way_is_refused_by_both_sides(change: str, value: object) -> None:
    ours, theirs = client(epoch=3), server()
    tampered = {**ours.hello, change: value}
    challenge = theirs.challenge(tampered)
    with pytest.raises(Refused, match="does not hold this job's key"):
        ours.answer(challenge)
    honest = server().challenge(ours.hello)
    with pytest.raises(Refused, match="wrong job key"):
        theirs.accept(ours.answer(honest))


def test_a_client_with_another_key_is_refused() -> None:
    thief, theirs = client(b"x" * 32), server()
    theirs.challenge(thief.hello)
    with pytest.raises(Refused, match="wrong job key"):
        theirs.accept({"proof": "0" * 64})


def test_a_server_with_another_key_gets_no_proof() -> None:
    ours = client()
    with pytest.raises(Refused, match="the server does not hold this job's key"):
        ours.answer(server(b"x" * 32).challenge(ours.hello))


def test_a_proof_that_was_overheard_is_worth_nothing_on_another_connection() -> None:
    ours, theirs = client(), server()
    proof = ours.answer(theirs.challenge(ours.hello))
    theirs.accept(proof)
    again = server()
    again.challenge(ours.hello)
    with pytest.raises(Refused, match="wrong job key"):
        again.accept(proof)


def test_the_servers_own_proof_does_not_serve_as_the_clients() -> None:
    ours, theirs = client(), server()
    challenge = theirs.challenge(ours.hello)
    with pytest.raises(Refused, match="wrong job key"):
        theirs.accept({"proof": challenge["proof"]})


@pytest.mark.parametrize("proof", [None, 7, "", [], {}, "ä" * 64, "\ud800"])
def test_a_proof_of_another_type_is_only_wrong(proof: object) -> None:
    theirs = server()
    theirs.challenge(client().hello)
    with pytest.raises(Refused, match="wrong job key"):
        theirs.accept({"proof": proof})


@pytest.mark.parametrize("challenge", [{}, {"nonce": 3, "proof": "x"}, {"nonce": "a"}, {"proof": "x" * 64}])
def test_a_challenge_without_its_parts_is_refused(challenge: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="does not hold this job's key"):
        client().answer(challenge)


@pytest.mark.parametrize("version", [PROTOCOL + 1, PROTOCOL - 1, None, "1"])
def test_another_protocol_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(
        Refused, match=f"protocol version {version!r} is not {PROTOCOL}: use the same fthsdp everywhere"
    ):
        server().challenge({**client().hello, "protocol": version})


def test_another_job_is_refused_by_name_before_any_proof() -> None:
    with pytest.raises(Refused, match="this is job 'other', not 'job'"):
        server(job="other").challenge(client().hello)


def test_details_cannot_pose_as_what_the_handshake_says_itself() -> None:
    forged = ClientHandshake(KEY, job="job", purpose="rail", details={"job": "other", "protocol": 9, "purpose": "x"})
    assert (forged.hello["job"], forged.hello["protocol"], forged.hello["purpose"]) == ("job", PROTOCOL, "rail")


def test_a_refusal_reaches_the_client_as_its_reason() -> None:
    ours = client()
    with pytest.raises(Refused, match="stale attempt"):
        ours.answer({"refused": "stale attempt"})
    with pytest.raises(Refused, match="stale attempt"):
        ours.finish({"refused": "stale attempt"})
    with pytest.raises(WireError, match="a handshake ended with"):
        ours.finish({"accepted": 1})


def test_the_judge_sees_only_a_proven_hello() -> None:
    seen: list[object] = []
    theirs = ServerHandshake(KEY, job="job", judge=seen.append)
    theirs.challenge(client(b"x" * 32).hello)
    with pytest.raises(Refused):
        theirs.accept({"proof": "0" * 64})
    assert seen == []


# --- on a socket ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        yield ours, theirs


def accept_in_background(sock: socket.socket, timeout: float = 10.0) -> tuple[threading.Thread, list[FthsdpError]]:
    errors: list[FthsdpError] = []

    def run() -> None:
        try:
            accept_blocking(sock, KEY, job="job", timeout=timeout)
        except FthsdpError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_a_client_that_says_nothing_is_given_up(pair: tuple[socket.socket, socket.socket]) -> None:
    thread, errors = accept_in_background(pair[1], timeout=0.1)
    thread.join(10)
    assert [type(e) for e in errors] == [ConnectionLost]


def test_a_client_that_closes_half_way_is_given_up(pair: tuple[socket.socket, socket.socket]) -> None:
    thread, errors = accept_in_background(pair[1])
    send_frame(pair[0], client().hello)
    receive_frame(pair[0])
    pair[0].close()
    thread.join(10)
    assert [type(e) for e in errors] == [ConnectionLost]


def test_a_stranger_cannot_make_us_hold_more_than_a_hello(pair: tuple[socket.socket, socket.socket]) -> None:
    thread, errors = accept_in_background(pair[1])
    pair[0].sendall((LARGEST_HELLO + 1).to_bytes(4, "big"))
    thread.join(10)
    assert f"a frame of {LARGEST_HELLO + 1} bytes was announced; at most {LARGEST_HELLO}" in str(errors[0])


def test_a_refused_client_is_told_why(pair: tuple[socket.socket, socket.socket]) -> None:
    thread, errors = accept_in_background(pair[1])
    send_frame(pair[0], {**client().hello, "job": "other"})
    assert receive_frame(pair[0]) == {"refused": "this is job 'job', not 'other'"}
    thread.join(10)
    assert [type(e) for e in errors] == [Refused]
