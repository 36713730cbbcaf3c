"""What the survivors see when a member's process is killed or frozen: real processes, real signals."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.local

DEADLINE = 60.0


class Nursery:
    """The processes and what they tell."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._seen: list[dict[str, Any]] = []
        assert process.stdout is not None
        self._stdout = process.stdout
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            self._lines.put(json.loads(line))

    def await_events(self, event: str, replicas: set[int]) -> dict[int, dict[str, Any]]:
        """Wait until each of these replicas has told of this event."""
        deadline = time.monotonic() + DEADLINE
        while True:
            found = {told["replica"]: told for told in self._seen if told["event"] == event}
            if replicas <= set(found):
                return found
            try:
                self._seen.append(self._lines.get(timeout=deadline - time.monotonic()))
            except (queue.Empty, ValueError):
                pytest.fail(f"no {event} from {replicas - set(found)}; seen: {self._seen}")


@contextmanager
def nursery(n: int, mode: str) -> Iterator[Nursery]:
    command = [sys.executable, str(Path(__file__).with_name("nursery.py")), str(n), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        nurse = Nursery(process)
        try:
            yield nurse
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(DEADLINE)
            nurse.reader.join()


@pytest.mark.parametrize("mode", ["busy", "idle"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_survivors_see_a_killed_member_in_well_under_a_second(n: int, mode: str) -> None:
    with nursery(n, mode) as members:
        pids = {r: told["pid"] for r, told in members.await_events("connected", set(range(n))).items()}
        if mode == "busy":
            members.await_events("busy", set(range(n)))
        killed = time.time()
        os.kill(pids[1], signal.SIGKILL)
        survivors = set(range(n)) - {1}
        broken = members.await_events("broken", survivors)
        assert {broken[r]["at"] - killed < 0.8 for r in survivors} == {True}
        # Its neighbours name it; the others name the one that passed the break on.
        assert all(abs(broken[r]["suspect"] - r) in (1, n - 1) for r in survivors)
        assert 1 in {broken[r]["suspect"] for r in survivors}
        closed = members.await_events("closed", survivors)
        assert {closed[r]["threads"] for r in survivors} == {1}


@pytest.mark.parametrize("mode", ["busy", "idle"])
def test_all_others_see_a_frozen_member_after_the_silence_timeout(mode: str) -> None:
    with nursery(3, mode) as members:
        pids = {r: told["pid"] for r, told in members.await_events("connected", {0, 1, 2}).items()}
        if mode == "busy":
            members.await_events("busy", {0, 1, 2})
        frozen = time.time()
        os.kill(pids[1], signal.SIGSTOP)
        broken = members.await_events("broken", {0, 2})
        assert all(2.0 < told["at"] - frozen < 5.0 for r, told in broken.items() if r != 1)
        assert any("replica 1: silent for" in told["reason"] for told in broken.values())
        # Thawed, it finds that it was left behind.
        os.kill(pids[1], signal.SIGCONT)
        members.await_events("closed", {0, 1, 2})


def test_a_pause_of_everybody_breaks_nothing() -> None:
    with nursery(2, "busy") as members:
        pids = {r: told["pid"] for r, told in members.await_events("connected", {0, 1}).items()}
        members.await_events("busy", {0, 1})
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(4.0)  # longer than the silence timeout
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
        resumed = time.time()
        # Only what is killed afterwards is seen.
        threading.Event().wait(1.0)
        os.kill(pids[1], signal.SIGKILL)
        broken = members.await_events("broken", {0})
        assert broken[0]["at"] > resumed + 1.0
        assert "silent" not in broken[0]["reason"]
