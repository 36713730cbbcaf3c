"""Running other programs: foreground ones with an error that shows what they said, and daemons with a log each."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["ClusterError", "reap_daemons", "run", "start_daemon", "stop_process", "until"]

Argument = str | Path
_daemons: list[subprocess.Popen[bytes]] = []


class ClusterError(RuntimeError):
    """The test cluster cannot be had; the message says which program said what."""


def run(
    *command: Argument,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 300.0,
) -> str:
    """Run a program and return its standard output; raises ClusterError with the end of what it printed."""
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            cwd=cwd,
            timeout=timeout,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{_words(command)}: not done after {timeout:g} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise ClusterError(f"{_words(command)}: exit code {done.returncode}: {said}")
    return done.stdout


def start_daemon(command: Sequence[Argument], log: Path) -> subprocess.Popen[bytes]:
    """Start a program that outlives this call, in a session of its own so that Ctrl-C reaches only the test run."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=log.parent
        )
    _daemons.append(process)
    return process


def stop_process(pid: int) -> None:
    """Kill a process, ours or not, and wait until it has let go of its ports and files."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not _command(pid), f"process {pid} has ended", timeout=30)


def _command(pid: int) -> bytes:
    """A process that has ended has none, also while nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def reap_daemons() -> None:
    """Collect the exit codes of the daemons that this process started; for when they have been killed."""
    while _daemons:
        _daemons.pop().wait(timeout=30)


def until(
    holds: Callable[[], bool],
    what: str,
    *,
    timeout: float,
    log: Path | None = None,
    detail: Callable[[], str] | None = None,
) -> None:
    """Wait until ``holds()``, looking often; raises ClusterError that says what was waited for.

    ``log``: a file whose end, ``detail``: a function whose words belong into the message.
    """
    deadline = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > deadline:
            words = f"; {detail()}" if detail else ""
            tail = f"; the end of {log}:\n{log.read_text(errors='replace')[-2000:]}" if log and log.exists() else ""
            raise ClusterError(f"{what}: not so after {timeout:g} s{words}{tail}")
        time.sleep(0.1)


def _words(command: Sequence[Argument]) -> str:
    return " ".join(str(word) for word in command)[:400]
