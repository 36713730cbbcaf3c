"""Process trees: who is below whom, who dies with whom, what an end means as an exit code."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = [
    "NOT_EXECUTABLE",
    "NOT_FOUND",
    "Undying",
    "adopt_orphans",
    "bury",
    "code_of",
    "fork",
    "kill",
    "kill_below",
    "spawn",
]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a command that could not be started, as shells have them."""

DEATH_TIMEOUT = 10.0
"""Seconds in which a killed process has to be gone; one that is not waits inside a driver or for a file server."""

_libc = ctypes.CDLL(None, use_errno=True)


class Undying(Exception):
    """A process that was killed does not end."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc.prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of whatever our descendants leave behind, as the first process of a container is anyway."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def spawn(argv: Sequence[str], env: Mapping[str, str], *, stderr: int, keep: Collection[int] = ()) -> int:
    """Start a command that dies with us and return its process number.

    It gets ``stderr`` as its standard error, and the descriptors ``keep`` under their own numbers. A command that
    cannot be started ends with 126 or 127 after a sentence.
    """

    def become() -> int:
        try:
            os.dup2(stderr, 2)
            for descriptor in keep:
                os.set_inheritable(descriptor, True)
            os.execvpe(argv[0], list(argv), dict(env))  # noqa: S606 (the command is the job's own)
        except OSError as error:
            os.write(2, f"fthsdp: the command {argv[0]}: {error.strerror}\n".encode())
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE

    return fork(become)


def fork(work: Callable[[], int]) -> int:
    """Make a child that dies with us, does this work and ends with the code that it returns; return its number.

    We have to have no other thread. No handler of ours runs in the child: a signal for it would be taken there, and
    what it is to become would never hear of it.
    """
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    code = NOT_EXECUTABLE
    try:
        _forget_handlers()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            code = work()
    finally:
        os._exit(code)


def _forget_handlers() -> None:
    """Let signals do here what they do in a new process: also those that Python ignores, as only it does."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)


def code_of(status: int) -> int:
    """Return the exit code for what ``waitpid`` says: 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill(pid: int, number: int) -> None:
    """Send a signal to a child that has not been waited for; one that has ended is passed over."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_below(*, spare: Collection[int] = ()) -> None:
    """Kill and bury everything below us but ``spare`` and what is below those: also what is frozen, or hides from us.

    Whoever is killed leaves its children to us, so that this goes on until nobody is left. Raises Undying.
    """
    while victims := [pid for pid in _children(os.getpid()) if pid not in spare]:
        for pid in victims:
            bury(pid)


def bury(pid: int) -> None:
    """Kill a child and what is below it, and take in its end; raises Undying."""
    for below in (pid, *_descendants(pid)):
        kill(below, signal.SIGKILL)
    deadline = time.monotonic() + DEATH_TIMEOUT
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                raise Undying(f"process {pid} is still there {DEATH_TIMEOUT:g} s after SIGKILL: the kernel holds it")
            time.sleep(0.002)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # that thread, or all of that process, has just ended
            found += map(int, listing.read_text().split())
    return found


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found
