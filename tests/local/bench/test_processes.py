"""The processes of a benchmark: what they say is heard at once, and none is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.bench.processes import ROOT, BenchmarkFailed, Child, environment
from tests.bench.worker_fthsdp import slow_down_downloads

pytestmark = pytest.mark.local

TALKS = """
import json, sys, time
for step, line in enumerate(sys.stdin):
    print("something else")
    print(json.dumps({"t": time.monotonic(), "what": line.strip(), "step": step}), flush=True)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a child's errors go."""
    return tmp_path / "child.log"


def test_a_child_is_told_and_heard(log: Path) -> None:
    child = Child("talks", [sys.executable, "-c", TALKS], log=log, env=environment())
    try:
        child.tell("first")
        first = child.wait_for("first")
        child.tell("second")
        assert child.wait_for("second", after=first.t).step == 1
        assert child.wait_count("first", 1) == first
    finally:
        child.end()
    assert not child.alive


WORKS = """
import json, time
while time.process_time() < 0.3:
    pass
print(json.dumps({"t": time.monotonic(), "what": "done", "used": time.process_time()}), flush=True)
time.sleep(60)
"""


def test_the_processor_time_of_a_child_is_what_it_says_itself(log: Path) -> None:
    child = Child("works", [sys.executable, "-c", WORKS], log=log, env=environment())
    try:
        used = child.wait_for("done").fields["used"]
        assert child.processor_seconds == pytest.approx(used, abs=0.05)
    finally:
        child.end()


def test_a_child_that_ends_fails_who_waits_for_it_with_its_last_words(log: Path) -> None:
    child = Child("dies", [sys.executable, "-c", "raise SystemExit('no memory')"], log=log, env=environment())
    try:
        with pytest.raises(BenchmarkFailed, match=r"dies ended before 'ready'(.|\n)*no memory"):
            child.wait_for("ready")
    finally:
        child.end()


def test_a_stopped_child_ends(log: Path) -> None:
    child = Child("talks", [sys.executable, "-c", TALKS], log=log, env=environment())
    child.signal(signal.SIGSTOP)
    child.end()
    assert not child.alive


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_benchmark_that_is_killed_outright_leaves_no_child(tmp_path: Path) -> None:
    script = f"""
import json, sys
from pathlib import Path
from tests.bench.processes import Child, environment
child = Child("talks", [sys.executable, "-c", {TALKS!r}], log=Path({str(tmp_path / "log")!r}), env=environment())
child.tell("ready")
child.wait_for("ready")
print(json.dumps(child._process.pid), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        pid = json.loads(benchmark.stdout.readline())
        descriptor = os.pidfd_open(pid)
        try:
            benchmark.kill()
            assert select.select([descriptor], [], [], 20)[0], "the child still runs"
        finally:
            os.close(descriptor)


def test_only_sockets_that_block_are_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "recv_into", socket.socket.recv_into)  # put back at the end
    slow_down_downloads(bytes_per_second=1e5)
    assert _seconds_to_receive(50_000, blocking=True) > 0.4
    assert _seconds_to_receive(300_000, blocking=False) < 2.0


def _seconds_to_receive(count: int, *, blocking: bool) -> float:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(blocking)
        sender = threading.Thread(target=theirs.sendall, args=(bytes(count),))
        began = time.monotonic()
        sender.start()
        got, room = 0, memoryview(bytearray(count))
        while got < count:
            try:
                got += ours.recv_into(room[got:])
            except BlockingIOError:
                time.sleep(0)
        sender.join()
    return time.monotonic() - began
