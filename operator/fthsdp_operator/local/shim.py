"""Stands between ``fthsdp run`` and one pod's process, as a container runtime's shim does. Standard library only.

It is started as a script of its own (never imported by the control plane) so that three things hold without root, and
without running Python code between fork and exec in a program with threads:

- **Nothing outlives the launcher.** The launcher holds the other end of standard input. When it ends, however it ends,
  the kernel closes that end and the shim kills the pod. Were the shim itself killed, the kernel kills the pod's first
  process (``PR_SET_PDEATHSIG``).
- **Nothing outlives the pod's first process**, as in a container. The shim adopts orphans
  (``PR_SET_CHILD_SUBREAPER``), kills what is left when the first process ends, and only then reports the exit.
- **A signal never meets a process number that was given away**: the shim is the parent, so it knows who is alive.

Standard input: one line of JSON (``argv``, ``env``, ``cwd``), then lines with a signal's number each.
Standard output: a JSON line ``{"pid": …}`` or ``{"error": …}``, then ``{"exit": …}`` with 128 + n for signal n.
The pod writes to the shim's standard error, which is the pod's log.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
WHOLE_POD = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT})
"""Signals that a container runtime gives to every process of a container; all others go to the first one only."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc.prctl(option, value, 0, 0, 0)


_libc = ctypes.CDLL(None, use_errno=True)


def children(pid: int) -> list[int]:
    """Return the process numbers of the direct children of ``pid``; empty where /proc does not tell."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, listing.read_text().split())
        except OSError:  # that thread has just ended
            continue
    return found


def descendants(pid: int) -> list[int]:
    """Return the process numbers of everything below ``pid``, parents first."""
    found: list[int] = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


class Pod:
    """The pod's processes."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: str) -> None:
        shim = os.getpid()

        def before_exec() -> None:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != shim:  # the shim died before the kernel knew what to do then
                os._exit(1)

        self._first = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            start_new_session=True,
            preexec_fn=before_exec,
        )
        self.pid = self._first.pid

    def signal(self, number: int) -> None:
        """Deliver a signal as a container runtime would."""
        targets = descendants(os.getpid()) if number in WHOLE_POD else []
        for pid in {self.pid, *targets}:
            _kill(pid, number)

    def poll(self) -> int | None:
        """Return the exit code (128 + n for signal n) once the first process has ended, else None."""
        code = self._first.poll()
        return code if code is None or code >= 0 else 128 - code

    def bury(self) -> None:
        """Kill whatever the pod has left behind and wait until it is gone."""
        _kill(self.pid, signal.SIGKILL)
        self._first.wait()
        try:
            while True:
                for pid in descendants(os.getpid()):
                    _kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _tell(**message: Any) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:  # the launcher is gone; standard input says so as well
        return


class _Commands:
    """Lines from standard input, read without blocking beyond what is there."""

    def __init__(self) -> None:
        self._buffer = b""
        self.open = True

    def read(self) -> list[bytes]:
        """Return the complete lines that are there; blocks only while nothing is."""
        data = os.read(0, 1 << 16)
        self.open = bool(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines


def _watch_for_exits() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _reap_orphans(pod: Pod) -> None:
    """Take the exit codes of adopted orphans; the first process's own is for ``Popen``."""
    for pid in children(os.getpid()):
        if pid != pod.pid:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _supervise(pod: Pod, commands: _Commands, exits: int, pending: list[bytes]) -> int | None:
    """Pass signals on until the first process ends (returns its exit code) or the launcher does (returns None)."""
    while True:
        for line in pending:
            pod.signal(int(line))
        code = pod.poll()
        if code is not None:
            return code
        readable, _, _ = select.select([0, exits], [], [])
        if exits in readable:
            os.read(exits, 4096)
            _reap_orphans(pod)
        pending = commands.read() if 0 in readable else []
        if not commands.open:
            return None


def main() -> None:
    """Run one pod as standard input says."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    exits = _watch_for_exits()
    commands = _Commands()
    lines: list[bytes] = []
    while not lines:
        lines = commands.read()
        if not commands.open:
            return
    try:
        pod = Pod(**json.loads(lines[0]))
    except OSError as error:
        _tell(error=f"{error.filename or 'the command'}: {error.strerror}")
        _tell(exit=128)
        return
    _tell(pid=pod.pid)
    code = _supervise(pod, commands, exits, lines[1:])
    pod.bury()
    if code is not None:
        _tell(exit=code)


if __name__ == "__main__":
    main()
