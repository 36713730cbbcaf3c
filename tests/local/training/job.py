"""A training job of real processes: a coordinator and replicas of several ranks, for tests that break it.

No operator here: the tests start, kill and restart processes themselves. Every wait is for an event, with a deadline.
Ranks are forked from one process that has imported torch: a rank of its own in everything, that starts in a fraction of
a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from tests.local.forks import FORKS
from tests.local.training.points import Linger, count_passes
from tests.ports import free_port

DEADLINE = 120.0
"""Seconds for anything: a run takes some twenty, and the machine may be busy."""
TEXT = Path(argparse.__file__)
"""Enough to learn from for runs in which only the failures matter."""
T = TypeVar("T")


def _be_a_rank(
    log: Path, environment: Mapping[str, str], arguments: Sequence[str], troubles: Sequence[Callable[[int], None]]
) -> None:
    """Run the recipe in a forked process, as its container would, but for the troubles that this one is to make."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()
    os.environ.update(environment)
    import torch

    from fthsdp.recipes import tiny_llama

    torch.set_num_threads(1)
    count_passes(log.with_suffix(".passes"))
    for trouble in troubles:
        trouble(int(environment["FTHSDP_POD_INDEX"]))
    sys.exit(tiny_llama.main(arguments))


def brief(*, steps: int, compute: float) -> tuple[str, ...]:
    """Return the arguments of a run of little computing, one pass a step; ``compute`` is slept in it, in seconds."""
    data = ("--data", str(TEXT), "--sequence-length", "16", "--micro-batch-size", "8")
    return "--steps", str(steps), "--emulate-compute", str(compute), *data


def wait_for(what: str, look: Callable[[], T | None], deadline: float = DEADLINE) -> T:
    """Look until there is something; fails with ``what``."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {deadline:.0f} s")


@dataclass
class Job:
    """One run in a folder of its own."""

    folder: Path
    replicas: int = 3
    spares: int = 0
    ranks: int = 2
    min_replicas: int = 1
    arguments: Sequence[str] = ("--steps", "30", "--emulate-compute", "0.1")
    silence_timeout: float = 20.0
    """Long, because a busy machine can keep a leader from its once-a-second word for longer than the default 5 s."""
    times: Sequence[str] = ()
    """Further options of the coordinator."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every process, besides who it is."""
    trouble: Mapping[tuple[int, int], Callable[[int], None]] = field(default_factory=dict)
    """By replica and attempt: called in each of its ranks (with its number) before training begins."""
    lingers_after: int | None = None
    """The step after which the run waits for ``finish``, in steps that take longer and longer."""
    growth: float = 1.15
    """By how much each of these takes longer than the one before: 31 of them last 50 s. Who comes back waits for the
    ends of several, so each should be but a small part of the time that has passed."""
    port: int = field(default_factory=free_port)
    coordinator: subprocess.Popen[bytes] | None = None
    processes: dict[tuple[int, int, int], BaseProcess] = field(default_factory=dict)
    """By replica, attempt and rank."""

    @property
    def record(self) -> Path:
        """The run record's folder."""
        return self.folder / "record"

    @property
    def _awaited(self) -> Path:
        return self.folder / "awaited"

    def start(self) -> Job:
        """Start the coordinator and all replicas."""
        self.record.mkdir(parents=True)
        (self.folder / "key").write_text("0123456789abcdef" * 4)
        self.start_coordinator()
        for replica in range(self.replicas + self.spares):
            self.start_replica(replica)
        return self

    def start_coordinator(self) -> None:
        """Start the coordinator, or start it again."""
        command = [sys.executable, "-m", "fthsdp.coordinator", "--job", "test", "--port", str(self.port)]
        command += ["--replicas", str(self.replicas), "--min-replicas", str(self.min_replicas)]
        command += ["--spares", str(self.spares), *self.times]
        command += ["--key-file", str(self.folder / "key"), "--store", f"file:{self.folder / 'epochs.json'}"]
        command += ["--record-dir", str(self.record), "--silence-timeout", str(self.silence_timeout)]
        with (self.folder / "coordinator.log").open("ab") as log:
            self.coordinator = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **self.environment}
            )

    def start_replica(self, replica: int, attempt: int = 0) -> None:
        """Start all ranks of a replica."""
        port = free_port()
        for rank in range(self.ranks):
            environment = {
                "FTHSDP_JOB": "test",
                "FTHSDP_REPLICA": str(replica),
                "FTHSDP_ATTEMPT": str(attempt),
                "FTHSDP_POD_INDEX": str(rank),
                "FTHSDP_PODS_PER_REPLICA": str(self.ranks),
                "FTHSDP_COORDINATOR": f"127.0.0.1:{self.port}",
                "FTHSDP_JOB_KEY_FILE": str(self.folder / "key"),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **self.environment,
            }
            log = self.folder / f"r{replica}-a{attempt}-{rank}.log"
            troubles = [self.trouble[replica, attempt]] if (replica, attempt) in self.trouble else []
            if self.lingers_after is not None:
                troubles.append(Linger(after=self.lingers_after, until=self._awaited, growth=self.growth))
            process = FORKS.Process(target=_be_a_rank, args=(log, environment, self.arguments, troubles), daemon=True)
            process.start()
            self.processes[replica, attempt, rank] = process

    # --- breaking it

    def signal(self, replica: int, number: signal.Signals, *, attempt: int = 0, rank: int | None = None) -> None:
        """Send a signal to one rank of a replica, or to all of them."""
        for (r, a, w), process in self.processes.items():
            if (r, a) == (replica, attempt) and rank in (None, w) and process.is_alive():
                assert process.pid is not None
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(process.pid, number)

    def kill(self, replica: int, *, attempt: int = 0, rank: int | None = None) -> None:
        """SIGKILL one rank of a replica, or all of them."""
        self.signal(replica, signal.SIGKILL, attempt=attempt, rank=rank)

    def replace(self, replica: int, *, attempt: int = 0) -> None:
        """SIGKILL a whole replica, start its next attempt, and wait until that one is active."""
        self.kill(replica, attempt=attempt)
        self.start_replica(replica, attempt=attempt + 1)
        self.wait_for_active(replica, attempt=attempt + 1)

    def kill_coordinator(self) -> None:
        """SIGKILL the coordinator."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()

    # --- watching it

    def steps(self) -> list[dict[str, Any]]:
        """Return the step records so far."""
        return self._lines("steps.jsonl")

    def taken_out(self) -> set[tuple[int, int]]:
        """Return who was taken out so far, by replica and attempt."""
        return {(e["replica"], e["attempt"]) for e in self._lines("events.jsonl") if e["kind"] == "removed"}

    def _lines(self, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self.record / name).read_text().splitlines()
        except FileNotFoundError:
            return []
        records = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # the last line may be half written
                records.append(json.loads(line))
        return records

    def wait_for_step(self, step: int, *, replica: int | None = None) -> None:
        """Wait until this step is final somewhere (or at a replica)."""
        wait_for(
            f"step {step} of replica {replica}",
            lambda: (
                self._check_alive() and any(s["step"] >= step and replica in (None, s["replica"]) for s in self.steps())
            ),
        )

    def wait_for_active(self, replica: int, attempt: int) -> None:
        """Wait until an attempt of a replica has contributed to a final step."""
        wait_for(
            f"replica {replica} attempt {attempt} active",
            lambda: (
                self._check_alive()
                and any(
                    (s["replica"], s["attempt"]) == (replica, attempt) and replica in s["contributors"]
                    for s in self.steps()
                )
            ),
        )

    def _check_alive(self) -> bool:
        assert any(p.is_alive() for p in self.processes.values()), "all processes have ended\n" + self.logs()
        return True

    def finish(self) -> dict[str, Any]:
        """Wait until everything has ended by itself, and return the report."""
        assert self.coordinator is not None
        self._awaited.touch()
        wait_for("the end of the run", self._ended)
        assert self.coordinator.returncode == 0, self.logs()
        report: dict[str, Any] = json.loads((self.record / "report.json").read_text())
        return report

    def _ended(self) -> bool:
        assert self.coordinator is not None
        codes = {name: process.exitcode for name, process in self.processes.items()}
        assert None in codes.values() or 0 in codes.values(), f"exit codes {codes}\n{self.logs()}"
        return self.coordinator.poll() is not None

    def exit_code(self, replica: int, *, attempt: int = 0, rank: int = 0) -> int:
        """Wait until a process has ended and return its exit code."""
        process = self.processes[replica, attempt, rank]
        process.join(DEADLINE)
        assert process.exitcode is not None, self.logs()
        return process.exitcode

    def passes(self, replica: int, *, attempt: int = 0, rank: int = 0) -> list[int]:
        """Return the step of each backward pass that a rank has begun, in order."""
        file = self.folder / f"r{replica}-a{attempt}-{rank}.passes"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def log(self, name: str) -> str:
        """Return what one process wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(
            f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in sorted(self.folder.glob("*.log"))
        )

    def stop(self) -> None:
        """Kill what still runs."""
        for process in self.processes.values():
            process.kill()
            process.join()
        if self.coordinator is not None:
            self.coordinator.kill()
            self.coordinator.wait()


def assert_sound(report: dict[str, Any], *, steps: int) -> None:
    """What must hold after every run, whatever happened in it."""
    assert report["steps_final"] == steps
    assert report["samples"]["duplicated"] == 0
    assert report["samples"]["missing"] == 0
    assert report["digests"]["compared"] > 0
    assert report["digests"]["mismatched"] == 0
    assert report["outcomes"] == {"compared": steps, "mismatched": 0}


def assert_computed_once(job: Job, replicas: Iterable[int], *, steps: int) -> None:
    """No rank of these replicas ran a forward and backward pass twice, or left one out."""
    for replica in replicas:
        for rank in range(job.ranks):
            assert job.passes(replica, rank=rank) == list(range(1, steps + 1)), f"replica {replica} rank {rank}"


@contextlib.contextmanager
def running(job: Job) -> Iterator[Job]:
    """Run a job, and leave nothing of it behind."""
    try:
        yield job.start()
    finally:
        job.stop()
