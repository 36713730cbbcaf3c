"""A coordinator as its own process, and leaders that are nothing but their ``LeaderClient``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fthsdp.coordinator.client import LeaderClient
from fthsdp.coordinator.messages import (
    Announce,
    Break,
    Bye,
    Close,
    EpochRecord,
    FromCoordinator,
    Go,
    Install,
    JoinRecord,
    MemberState,
    Phase,
    Probe,
    RankReport,
    RefusedMember,
    StepRecord,
)
from fthsdp.tls import Tls

KEY = b"k" * 32
DEADLINE = 30.0
"""Seconds after which something that should have happened has not."""


class Process:
    """``python -m fthsdp.coordinator``, with its log and its output as they come."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        replicas: int = 3,
        least: int = 1,
        port: int = 0,
        certificates: Path | None = None,
    ) -> None:
        (folder / "key").write_bytes(KEY)
        (folder / "record").mkdir(exist_ok=True)
        command = [
            sys.executable, "-m", "fthsdp.coordinator", "--job", "job", "--replicas", str(replicas),
            "--min-replicas", str(least), "--port", str(port), "--host", "127.0.0.1",
            "--key-file", str(folder / "key"), "--store", f"file:{folder / 'epoch'}",
            "--record-dir", str(folder / "record"), *arguments,
        ]  # fmt: skip
        self.folder = folder
        self.log: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        env |= {} if certificates is None else {"FTHSDP_TLS_DIR": str(certificates)}
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self._readers = [
            threading.Thread(target=self._read, args=(self.popen.stderr, self.log.append)),
            threading.Thread(target=self._read, args=(self.popen.stdout, self._take_line)),
        ]
        for reader in self._readers:
            reader.start()
        self.port = int(self.wait_for_log(r"listening on .*:(\d+)").group(1))

    def _read(self, stream: Any, take: Callable[[str], None]) -> None:
        with stream:
            for text in stream:
                with self._changed:
                    take(text.rstrip("\n"))
                    self._changed.notify_all()

    def _take_line(self, text: str) -> None:
        self.lines.append(json.loads(text))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return next((m for m in (re.search(pattern, line) for line in self.log) if m), None)

        with self._changed:
            match = self._changed.wait_for(found, DEADLINE)
        assert match, f"the coordinator did not log {pattern!r} but:\n" + "\n".join(self.log)
        return match

    def logged(self, pattern: str) -> bool:
        with self._changed:
            return any(re.search(pattern, line) for line in self.log)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.popen.wait(DEADLINE)
        for reader in self._readers:
            reader.join(DEADLINE)
        return code

    def ends_undisturbed(self, leaders: Sequence[Leader]) -> None:
        """The job still works: it goes to its end, and nobody was taken out."""
        assert not self.logged("is out|fencing")
        leaders[0].change(finished=1)
        for one in leaders:
            one.says_goodbye()
        assert self.wait() == 0
        assert not self.logged("Traceback|exception|SSL")

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "record" / "report.json").read_text())
        return report


class Leader:
    """A leader without a trainer: it answers as the protocol asks, at once."""

    def __init__(
        self,
        address: str,
        replica: int,
        attempt: int = 0,
        *,
        job: str = "job",
        key: bytes = KEY,
        tls: Tls | None = None,
    ) -> None:
        self.replica, self.attempt = replica, attempt
        self.state = MemberState(origin="0123456789abcdef")
        self.heard: list[FromCoordinator] = []
        self.record: EpochRecord | None = None
        self.obedient = True
        self.phase = Phase.COLLECTIVE
        """Where it says that its rank has been for a minute, when it is asked."""
        self._changed = threading.Condition(threading.RLock())
        self.client = LeaderClient(
            address, key, job=job, replica=replica, attempt=attempt, addresses=(f"h{replica}.{attempt}:1",),
            on_message=self._hear, heartbeat_interval=0.5, tls=tls,
        )  # fmt: skip
        self.client.send_state(self.state)
        self.client.start()

    def _hear(self, message: FromCoordinator) -> None:
        with self._changed:
            self.heard.append(message)
            changes = self._answer(message) if self.obedient else {}
            if changes:
                self.change(**changes)
            self._changed.notify_all()

    def _answer(self, message: FromCoordinator) -> dict[str, Any]:
        match message:
            case Announce(record=record) if record.number > self.state.epoch and record.member(self.replica):
                self.record = record
                return {"connected": record.number}
            case Go(epoch=epoch) if self.record is not None and epoch > self.state.epoch:
                return {"epoch": epoch, "base": epoch if self.replica in self.record.snapshots else self.state.base}
            case Break(epoch=epoch):
                return {"fence": max(epoch, self.state.fence)}
            case Install(record=record) if record.number > max(self.state.epoch, self.state.fence):
                self.record = record
                assert record.outcome is not None
                step = None if self.replica in record.snapshots else record.outcome.step
                return {"epoch": record.number, "connected": record.number, "step": step, "serves": step is not None}
            case Probe(number=number):
                rank = RankReport(
                    rank=0, epoch=self.state.epoch, step=self.state.step + 1, phase=self.phase, seconds=60,
                    stack="  File train.py, line 7, in <module>\n    load()\n",
                )  # fmt: skip
                return {"probe": number, "ranks": (rank,)}
            case Close(step=step):
                return {"finished": step}
        return {}

    def change(self, **changes: Any) -> None:
        with self._changed:
            self.state = self.state.model_copy(update=changes)
            self.client.send_state(self.state)

    def wait(self, question: Callable[[Leader], Any], what: str = "") -> Any:
        with self._changed:
            answer = self._changed.wait_for(lambda: question(self), DEADLINE)
        assert answer, (
            f"replica {self.replica} attempt {self.attempt}: {what or 'nothing'} within {DEADLINE} s: {self.heard}"
        )
        return answer

    def wait_for_epoch(self, number: int) -> EpochRecord:
        self.wait(lambda me: me.state.epoch >= number, f"epoch {number}")
        assert self.record is not None
        return self.record

    def wait_for(self, kind: type[FromCoordinator], *, after: int = 0) -> FromCoordinator:
        def found(me: Leader) -> FromCoordinator | None:
            return next((m for m in me.heard[after:] if isinstance(m, kind)), None)

        message: FromCoordinator = self.wait(found, kind.__name__)
        return message

    def refusal(self) -> str:
        message = self.wait_for(RefusedMember)
        assert isinstance(message, RefusedMember)
        return message.reason

    def says_goodbye(self) -> None:
        self.wait_for(Bye)
        self.client.close()

    def steps(self, *numbers: int, replicas: int = 3) -> None:
        for number in numbers:
            now, first = time.time(), (number - 1) * 4 * replicas
            self.client.record(
                StepRecord(
                    replica=self.replica, attempt=self.attempt, step=number, epoch=self.state.epoch, role="active",
                    began=now - 0.1, ended=now, samples=((first + 4 * self.replica, first + 4 * self.replica + 4),),
                    contributors=tuple(range(replicas)), total_samples=4 * replicas, loss=1 / number,
                    digest=f"d{number}", outcome="normal", trained=((first, first + 4 * replicas),),
                )
            )  # fmt: skip

    def joined(self) -> None:
        now = time.time()
        self.client.record(
            JoinRecord(
                replica=self.replica, attempt=self.attempt, started=now - 1, active=now, first_step=3, bytes=9,
                replayed_steps=2,
            )
        )  # fmt: skip


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start coordinators, on one folder unless told otherwise; those still alive at the end are killed."""
    started: list[Process] = []

    def start(*arguments: str, folder: Path = tmp_path, **options: Any) -> Process:
        folder.mkdir(exist_ok=True)
        started.append(Process(folder, *arguments, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def leader() -> Iterator[Callable[..., Leader]]:
    """Make leaders; all are closed at the end."""
    made: list[Leader] = []

    def make(*arguments: Any, **options: Any) -> Leader:
        made.append(Leader(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.client.close(timeout=0)


@pytest.fixture
def tls() -> Tls | None:
    """What all connections of the job go by; none, unless a file has another one."""
    return None


@pytest.fixture
def leaders(process: Process, leader: Callable[..., Leader], tls: Tls | None) -> list[Leader]:
    """Two leaders that train, of a coordinator that each file starts in its own way."""
    made = [leader(process.address, replica, tls=tls) for replica in range(2)]
    for one in made:
        one.wait_for_epoch(1)
    return made
