"""Ports are given out once, and never one on which somebody listens."""

import socket

from fthsdp_operator.local import ports


def test_no_port_is_given_out_twice() -> None:
    taken: set[int] = set()
    given = [ports.free_port(taken) for _ in range(50)]
    assert len(set(given)) == 50 == len(taken)


def test_a_port_on_which_somebody_listens_is_passed_over() -> None:
    taken: set[int] = set()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", ports.free_port(taken)))
        sock.listen()
        assert not ports._can_bind(sock.getsockname()[1])
