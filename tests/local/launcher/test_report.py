"""A crash reaches the coordinator of the job, as soon as there is one, and nobody else."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from tests.local.coordinator.conftest import Process
from tests.local.launcher.conftest import DEADLINE, Container, at, ended, heard
from tests.local.waiting import ends

from fthsdp.coordinator.messages import Cause

pytestmark = pytest.mark.local


def test_a_crash_is_told_with_pod_exit_code_and_last_words(either: Container, coordinator: Process) -> None:
    script = either.folder / "main.py"
    script.write_text("import sys; print('x' * 5000, file=sys.stderr); sys.exit('it breaks')")
    launcher = either.run(sys.executable, str(script), **at(either, coordinator))
    verdict = heard(coordinator)
    assert (verdict.replica, verdict.attempt, verdict.cause) == (2, 0, Cause.EXITED)
    assert verdict.crash is not None
    assert (verdict.crash.pod, verdict.crash.exit_code) == (1, 1)
    assert verdict.crash.words.endswith("xxx\nit breaks\n")
    assert launcher.poll() is None
    launcher.terminate()
    assert ended(launcher)[0] == 1


def test_a_process_that_was_killed_is_told_of_too_and_started_again(container: Container, coordinator: Process) -> None:
    container.child("wait", **at(container, coordinator))
    os.kill(container.born(1)[0]["pid"], signal.SIGKILL)
    crash = heard(coordinator).crash
    assert crash is not None
    assert (crash.exit_code, crash.oom_killed) == (137, False)
    container.says(1)
    assert container.born(2)[1]["attempt"] == 1


def test_a_crash_is_told_until_there_is_a_coordinator_and_again_when_it_is_another_one(
    container: Container, coordinator: Process
) -> None:
    coordinator.kill()
    launcher = container.child("crash", **at(container, coordinator))
    (child,) = container.born(1)
    assert ends(child["pid"], seconds=DEADLINE)
    for _ in range(2):
        another = Process(coordinator.folder, port=coordinator.port)
        try:
            crash = heard(another).crash
            assert crash is not None
            assert crash.exit_code == 7
        finally:
            another.kill()
    assert launcher.poll() is None


def test_a_coordinator_whose_answer_never_ends_keeps_no_attempt_waiting(container: Container) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        container.coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        launcher = container.child("crash", "0")
        server.settimeout(DEADLINE)
        connection, _ = server.accept()
        with connection, drip(connection):
            container.says(1)
            assert ended(launcher)[0] == 0


@contextmanager
def drip(connection: socket.socket) -> Iterator[None]:
    """Announce a frame and send it byte by byte, slowly, and yet so that nobody calls it silence."""
    over = threading.Event()

    def send() -> None:
        with suppress(OSError):
            connection.sendall((1000).to_bytes(4, "big"))
            while not over.wait(0.5):
                connection.sendall(b" ")

    thread = threading.Thread(target=send)
    thread.start()
    yield
    over.set()
    thread.join()


def test_with_the_wrong_key_the_container_ends_at_once(container: Container, coordinator: Process) -> None:
    env = at(container, coordinator)
    container.key.write_bytes(b"w" * 32)
    code, errors = ended(container.run(sys.executable, "-c", "raise SystemExit(3)", **env))
    assert code == 3
    assert "the crash is told to nobody" in errors
