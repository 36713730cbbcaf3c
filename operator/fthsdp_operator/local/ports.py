"""Ports for processes that listen on this machine."""

from __future__ import annotations

import random
import socket

from fthsdp.errors import ConfigError

__all__ = ["LOCALHOST", "free_pair", "free_port"]

LOCALHOST = "127.0.0.1"
_FIRST, _LAST = 20_000, 32_000
"""Below the range from which kernels take the ports of outgoing connections (32768 and up on Linux, 49152 elsewhere),
so that between the choice and its use nobody gets the port by accident."""
_TRIES = 200


def free_port(taken: set[int]) -> int:
    """Return a port on which nobody listens and that is not in ``taken``; add it there."""
    for port in random.sample(range(_FIRST, _LAST), _TRIES):
        if port not in taken and _can_bind(port):
            taken.add(port)
            return port
    raise _nothing_free()


def free_pair(taken: set[int]) -> int:
    """Return a port such that neither it nor the next one is used or ``taken``; add both there."""
    for port in random.sample(range(_FIRST, _LAST), _TRIES):
        pair = (port, port + 1)
        if taken.isdisjoint(pair) and all(map(_can_bind, pair)):
            taken.update(pair)
            return port
    raise _nothing_free()


def _nothing_free() -> ConfigError:
    return ConfigError(f"no free port of {_FIRST}…{_LAST} on {LOCALHOST}: too much is running on this machine")


def _can_bind(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((LOCALHOST, port))
        except OSError:
            return False
    return True
