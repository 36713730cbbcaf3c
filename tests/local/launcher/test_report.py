"""A crash reaches the coordinator of the job, as soon as there is one, and nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.local.coordinator.conftest import KEY, Process
from tests.local.launcher.conftest import DEADLINE, Container, ended
from tests.local.waiting import wait_for

from fthsdp.coordinator.client import OperatorClient
from fthsdp.coordinator.messages import Cause, Verdict

pytestmark = pytest.mark.local


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Process]:
    folder = tmp_path / "coordinator"
    folder.mkdir()
    process = Process(folder)
    yield process
    process.kill()


def heard(coordinator: Process) -> Verdict:
    """Wait for the one verdict that the operator will hear."""

    async def ask() -> tuple[Verdict, ...]:
        client = OperatorClient(coordinator.address, KEY, job="job")
        try:
            return (await client.status()).verdicts
        finally:
            await client.close()

    (verdict,) = wait_for("a verdict", lambda: asyncio.run(ask()) or None, seconds=DEADLINE)
    return verdict


def at(container: Container, coordinator: Process) -> dict[str, str]:
    container.key.write_bytes(KEY)
    return {"FTHSDP_COORDINATOR": coordinator.address, "FTHSDP_JOB": "job"}


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


def test_a_process_that_was_killed_is_told_of_too(either: Container, coordinator: Process) -> None:
    launcher = either.run(
        sys.executable, str(Path(__file__).with_name("child.py")), str(either.births), "wait", **at(either, coordinator)
    )
    os.kill(either.born(1)[0]["pid"], signal.SIGKILL)
    crash = heard(coordinator).crash
    assert crash is not None
    assert crash.exit_code == 137
    either.says(1)
    assert either.born(2)[1]["attempt"] == 1
    launcher.kill()


def test_a_crash_is_told_again_until_there_is_a_coordinator(container: Container, coordinator: Process) -> None:
    os.kill(coordinator.popen.pid, signal.SIGSTOP)
    launcher = container.run(sys.executable, "-c", "raise SystemExit(3)", **at(container, coordinator))
    with pytest.raises(Exception, match="timed out"):
        launcher.communicate(timeout=3)
    os.kill(coordinator.popen.pid, signal.SIGCONT)
    crash = heard(coordinator).crash
    assert crash is not None
    assert crash.exit_code == 3


def test_with_the_wrong_key_the_container_ends_at_once(container: Container, coordinator: Process) -> None:
    env = at(container, coordinator)
    container.key.write_bytes(b"w" * 32)
    code, errors = ended(container.run(sys.executable, "-c", "raise SystemExit(3)", **env))
    assert code == 3
    assert "the crash is told to nobody" in errors
