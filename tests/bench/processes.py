"""The processes of a benchmark: each tells on its standard output what it is doing, and none outlives the benchmark.

A line of output is a JSON object with at least ``what`` and ``t``, seconds of the machine's monotonic clock, which is
the same in all processes. Nothing is polled: whoever waits for an event wakes when its line arrives.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

__all__ = ["ROOT", "BenchmarkFailed", "Child", "Event", "ended_by_signals", "environment", "run_to_its_end"]

ROOT = Path(__file__).parents[2]
"""The repository."""
DEADLINE = 180.0
"""Seconds for anything that a benchmark waits for."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class BenchmarkFailed(Exception):
    """Something did not happen that should have; the message holds the end of the log that may say why."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line that a child has written."""

    t: float
    what: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step that it is about; -1 for none."""
        return int(self.fields.get("step", -1))


def environment(**more: str) -> dict[str, str]:
    """Return what a child sees: one thread each, as all of them share the processors, and this repository."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


class Child:
    """One process, in a session of its own."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.events: list[Event] = []
        self._log = log
        self._news = threading.Condition()
        self.spawned = time.monotonic()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=_die_with_the_benchmark,
            )
        self._reader = threading.Thread(target=self._read, name=f"bench-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                fields = json.loads(line)
                event = Event(float(fields.pop("t")), str(fields.pop("what")), fields)
            except (ValueError, KeyError, AttributeError):  # something that a library has printed
                continue
            with self._news:
                self.events.append(event)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def processor_seconds(self) -> float:
        """What it has used so far of all processors together."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> float:
        """Send a signal and return when."""
        now = time.monotonic()
        self._process.send_signal(number)
        return now

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._reader.join(DEADLINE)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # a line that it has not read
                assert pipe is not None
                pipe.close()

    def wait_for(self, what: str, *, step: int = -1, after: float = 0.0, deadline: float = DEADLINE) -> Event:
        """Wait for the first event of this kind, of at least this step, later than ``after`` (exclusive)."""
        return self.wait_until(
            what, lambda event: event.what == what and event.step >= step and event.t > after, deadline
        )

    def wait_count(self, what: str, count: int) -> Event:
        """Wait for the event of this kind that makes so many of them."""
        self.wait_until(what, lambda _: sum(e.what == what for e in self.events) >= count)
        return [event for event in self.events if event.what == what][count - 1]

    def wait_until(self, what: str, wanted: Callable[[Event], bool], deadline: float = DEADLINE) -> Event:
        """Wait for the first event that is wanted; raises BenchmarkFailed when the process ends or time is up."""
        end = time.monotonic() + deadline
        seen = 0
        with self._news:
            while True:
                for event in self.events[seen:]:
                    if wanted(event):
                        return event
                seen = len(self.events)
                if not self._reader.is_alive():
                    raise self.failure(f"ended before {what!r}")
                if not self._news.wait(min(1.0, max(end - time.monotonic(), 0.0))) and time.monotonic() >= end:
                    raise self.failure(f"did not say {what!r} within {deadline:g} s")

    def failure(self, text: str) -> BenchmarkFailed:
        """Return an error that shows the end of this process's log."""
        log = self._log.read_text(errors="replace")[-2000:]
        return BenchmarkFailed(f"{self.name} {text}\n--- {self._log.name}\n{log}")


def _die_with_the_benchmark() -> None:
    """Between fork and exec: a benchmark that is killed outright leaves nothing behind either."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_to_its_end(command: Sequence[str]) -> tuple[int, str]:
    """Run a program that has children of its own; return its exit code and output. None of them outlives this call."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_die_with_the_benchmark,
    )
    try:
        output, _ = process.communicate()
        return process.returncode, output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the benchmark as Ctrl-C does, so that everything is cleaned up."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
