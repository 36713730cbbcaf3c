"""Which attempt is to run in this pod, and what that changes in its environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fthsdp.environment import ATTEMPT, MASTER_PORT

__all__ = ["environment_of", "read_attempt"]

_LONGEST = 9
"""Digits of a number that is believed."""
_PORTS = (MASTER_PORT, "PET_MASTER_PORT")


def read_attempt(file: Path) -> int | None:
    """Return the number in the file; None where there is no file, or no number in it."""
    try:
        text = file.read_bytes()[: _LONGEST + 2].strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and len(text) <= _LONGEST else None


def environment_of(env: Mapping[str, str], attempt: int, *, born: int) -> dict[str, str]:
    """Return the environment of an attempt, given that of the container, which was made for the attempt ``born``.

    The ports of torch's rendezvous take turns: a process of the new attempt that is faster than the end of the old
    leader would join the store of that one, and now finds nobody there, and asks until the new leader is up.
    """
    turn = (attempt - born) % 2
    ports = {name: str(_next_to(int(env[name]), turn)) for name in _PORTS if env.get(name, "").isdecimal()}
    return {**env, ATTEMPT: str(attempt), **ports}


def _next_to(port: int, turn: int) -> int:
    return port + turn if port < 65535 else port - turn
