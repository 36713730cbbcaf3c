"""The one port of a rank: who gets through to a handler, and that nothing is left behind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fthsdp import endpoint as module
from fthsdp.endpoint import Endpoint
from fthsdp.errors import ConfigError, NotReady, Refused
from fthsdp.wire import Json, open_blocking, parse_address, receive_frame, send_frame

pytestmark = pytest.mark.local

KEY = b"a key that only tests use"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    threads = set(threading.enumerate())
    made = Endpoint(host="127.0.0.1", key=KEY, job="test")
    yield made
    made.close()
    made.close()
    assert set(threading.enumerate()) <= threads


def dial(endpoint: Endpoint, purpose: str = "echo", **details: object) -> socket.socket:
    return open_blocking(endpoint.address, KEY, job="test", purpose=purpose, details=details, timeout=10.0)


def echo(sock: socket.socket, hello: Json) -> None:
    with sock:
        send_frame(sock, {"got": receive_frame(sock), "from": hello["name"]})


def test_a_purpose_reaches_its_handler_with_the_proven_hello(endpoint: Endpoint) -> None:
    endpoint.serve("echo", echo)
    for name in ("a", "b"):
        with dial(endpoint, name=name) as sock:
            send_frame(sock, {"x": 1})
            assert receive_frame(sock) == {"got": {"x": 1}, "from": name}


def test_the_judge_of_a_purpose_turns_away_by_name(endpoint: Endpoint) -> None:
    def judge(hello: Json) -> None:
        raise Refused(f"no {hello['name']} today")

    endpoint.serve("echo", echo, judge=judge)
    with pytest.raises(Refused, match="no bob today"):
        dial(endpoint, name="bob")


def test_a_purpose_nobody_serves_is_refused_by_name(endpoint: Endpoint) -> None:
    with pytest.raises(Refused, match=r"127\.0\.0\.1:\d+ does not serve 'echo'"):
        dial(endpoint)


def test_closing_cuts_handlers_that_still_wait_and_unfinished_handshakes(endpoint: Endpoint) -> None:
    begun, ended = threading.Event(), threading.Event()

    def wait(sock: socket.socket, hello: Json) -> None:
        begun.set()
        with sock:
            assert sock.recv(1) == b""
        ended.set()

    endpoint.serve("wait", wait)
    with dial(endpoint, "wait"), socket.create_connection(parse_address(endpoint.address)):
        assert begun.wait(10)  # else it is closed before its handler has it
        endpoint.close()
        assert ended.is_set()
    with pytest.raises(NotReady, match="is closed"):
        endpoint.serve("echo", echo)


def test_a_handshake_that_dawdles_is_cut(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT", 0.3)
    with socket.create_connection(parse_address(endpoint.address), timeout=20) as sock:
        assert sock.recv(1) == b""


def test_unproven_connections_are_bounded_and_the_newest_gets_in(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_UNPROVEN", 4)
    endpoint.serve("echo", echo)
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(parse_address(endpoint.address), 20)) for _ in range(5)]
        assert idle[0].recv(1) == b""
        with dial(endpoint, name="real") as sock:
            send_frame(sock, {})
            assert receive_frame(sock)["from"] == "real"


def test_a_host_that_is_not_ours_is_advertised_all_the_same() -> None:
    # 192.0.2.0/24 is for documentation: no interface has it, like the outer address of a translated pod.
    endpoint = Endpoint(host="192.0.2.7", key=KEY, job="test")
    try:
        assert endpoint.address.startswith("192.0.2.7:")
        with socket.create_connection(("127.0.0.1", parse_address(endpoint.address)[1]), 20):
            pass
    finally:
        endpoint.close()


def test_a_host_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'256\.1\.1\.1\.1' is not an address"):
        Endpoint(host="256.1.1.1.1", key=KEY, job="test")
