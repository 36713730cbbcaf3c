"""A launcher as the first process of a container would be it, and what its commands tell of themselves."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.local.coordinator.conftest import KEY, Process
from tests.local.waiting import wait_for

from fthsdp.coordinator.client import OperatorClient
from fthsdp.coordinator.messages import Verdict

DEADLINE = 40.0
CHILD = Path(__file__).with_name("child.py")
NOBODY = "127.0.0.1:9"


class Container:
    """One launcher and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.births = folder / "births"
        self.births.touch()
        self.key = folder / "key"
        self.key.write_bytes(b"0123456789abcdef")
        self.attempts = folder / "attempt"
        self.says(0)
        self.coordinator = NOBODY
        self.preload = ""
        self._started: list[subprocess.Popen[str]] = []

    def says(self, attempt: int | str) -> None:
        """Put a new number on the pod, as a kubelet does: by another file in its place."""
        fresh = self.folder / "fresh"
        fresh.write_text(str(attempt))
        fresh.replace(self.attempts)

    def run(
        self, *command: str, unusual: Mapping[str, float] | None = None, under: Sequence[str] = (), **env: str
    ) -> subprocess.Popen[str]:
        """Start a launcher with this command; ``unusual`` as there, ``under`` a command that becomes the launcher."""
        launcher = ["fthsdp.launcher"] if unusual is None else ["tests.local.launcher.unusual", json.dumps(unusual)]
        process = subprocess.Popen(
            [*under, sys.executable, "-m", *launcher, "--", *command],
            env={
                **os.environ,
                "FTHSDP_ATTEMPT": "0",
                "FTHSDP_ATTEMPT_FILE": str(self.attempts),
                "FTHSDP_PRELOAD": self.preload,
                "FTHSDP_COORDINATOR": self.coordinator,
                "FTHSDP_JOB": "j",
                "FTHSDP_REPLICA": "2",
                "FTHSDP_POD_INDEX": "1",
                "FTHSDP_JOB_KEY_FILE": str(self.key),
                "MASTER_PORT": "29500",
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def child(self, *what: str, unusual: Mapping[str, float] | None = None, **env: str) -> subprocess.Popen[str]:
        """Start a launcher whose command does this, attempt by attempt."""
        return self.run(sys.executable, str(CHILD), str(self.births), *what, unusual=unusual, **env)

    def born(self, count: int) -> list[dict[str, Any]]:
        """Wait until this many have been born, and return them."""
        lines = wait_for(
            f"birth {count}", lambda: self._lines() if len(self._lines()) >= count else None, seconds=DEADLINE
        )
        return [json.loads(line) for line in lines]

    def _lines(self) -> list[str]:
        return self.births.read_text().splitlines()

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self._started:
            with process:
                process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a launcher; return its exit code and its standard error."""
    _, errors = process.communicate(timeout=DEADLINE)
    return process.returncode, errors


def below(launcher: int) -> list[int]:
    """Return what runs right below a launcher."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def template_of(launcher: int) -> int:
    """Wait for the interpreter that waits below a launcher to be ready, and return its number."""

    def look() -> int | None:
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in below(launcher)}
        return next((pid for pid, name in names.items() if name == "fthsdp-template"), None)

    return wait_for("the interpreter that waits", look, seconds=DEADLINE)


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
    """Return what tells a launcher of this coordinator."""
    container.key.write_bytes(KEY)
    return {"FTHSDP_COORDINATOR": coordinator.address, "FTHSDP_JOB": "job"}


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    container = Container(tmp_path)
    yield container
    container.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Process]:
    folder = tmp_path / "coordinator"
    folder.mkdir()
    process = Process(folder)
    yield process
    process.kill()


@pytest.fixture(params=["cold", "warm"])
def either(container: Container, request: pytest.FixtureRequest) -> Container:
    """A container without and with an interpreter that waits: for the command that makes no difference."""
    container.preload = "_pydecimal" if request.param == "warm" else ""
    return container


__all__ = ["CHILD", "DEADLINE", "Container", "at", "below", "ended", "heard", "template_of"]
