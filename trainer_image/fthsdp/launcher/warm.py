"""The interpreter that waits (``template``), as the launcher sees it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fthsdp.launcher.command import Program
from fthsdp.launcher.processes import spawn

__all__ = ["Waiting"]

_TEMPLATE = Path(__file__).with_name("template.py")
FORK_TIMEOUT = 5.0
"""Seconds in which it has to have forked; one that has not is frozen, or swapped out, and a cold start is faster."""


class Waiting:
    """One interpreter that waits; ``ready`` says whether it can be used, ``why`` why not."""

    def __init__(self, program: Program, preload: Sequence[str], env: Mapping[str, str], *, stderr: int) -> None:
        self.ready = False
        self.why = ""
        """Why it will never be ready again; empty while it may."""
        self.channel, theirs = socket.socketpair()
        self._buffer = b""
        given = {
            "launcher": os.getpid(),
            "preload": list(preload),
            "kind": program.kind,
            "name": program.name,
            "arguments": program.arguments,
        }
        command = [*program.interpreter, str(_TEMPLATE), str(theirs.fileno()), json.dumps(given)]
        with theirs:
            self.pid = spawn(command, env, stderr=stderr, keep=[theirs.fileno()])

    def hear(self) -> None:
        """Take in what it has said, without waiting beyond what is there."""
        said = self._line()
        if said is None:
            self._give_up("it has ended")
        elif said.get("ready"):
            self.ready = True
        elif said:
            self._give_up(str(said.get("cold", "it does not say why")))

    def fork(self, env: Mapping[str, str]) -> int | None:
        """Let it make a process; returns its number, or None when that did not work: then it is of no use any more."""
        self.channel.settimeout(FORK_TIMEOUT)
        try:
            self.channel.sendall(json.dumps({"env": dict(env)}).encode() + b"\n")
            said: dict[str, object] | None = {}
            while said is not None and "pid" not in said:
                said = self._line()
            if said is not None:
                return int(str(said["pid"]))
            self._give_up("it has ended")
        except OSError as error:
            self._give_up(f"it does not fork: {error}")
        return None

    def _give_up(self, why: str) -> None:
        self.ready, self.why = False, why

    def _line(self) -> dict[str, object] | None:
        """Return the next message, {} for a part of one, None at the end."""
        if b"\n" not in self._buffer:
            data = b""
            with suppress(ConnectionError):
                data = self.channel.recv(1 << 16)
            if not data:
                return None
            self._buffer += data
        line, found, rest = self._buffer.partition(b"\n")
        if not found:
            return {}
        self._buffer = rest
        said: dict[str, object] = json.loads(line)
        return said
