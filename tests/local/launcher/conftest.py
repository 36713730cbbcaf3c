"""A launcher as the first process of a container would be it, and what its commands tell of themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.local.waiting import wait_for

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

    def run(self, *command: str, patience: float | None = None, **env: str) -> subprocess.Popen[str]:
        """Start a launcher with this command."""
        launcher = ["fthsdp.launcher"] if patience is None else ["tests.local.launcher.patience", str(patience)]
        process = subprocess.Popen(
            [sys.executable, "-m", *launcher, "--", *command],
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

    def child(self, *what: str, patience: float | None = None) -> subprocess.Popen[str]:
        """Start a launcher whose command does this, attempt by attempt."""
        return self.run(sys.executable, str(CHILD), str(self.births), *what, patience=patience)

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


def template_of(launcher: int) -> int:
    """Wait for the interpreter that waits below a launcher to be ready, and return its number."""

    def look() -> int | None:
        for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().strip() == "fthsdp-template":
                return int(pid)
        return None

    return wait_for("the interpreter that waits", look, seconds=DEADLINE)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    container = Container(tmp_path)
    yield container
    container.close()


@pytest.fixture(params=["cold", "warm"])
def either(container: Container, request: pytest.FixtureRequest) -> Container:
    """A container without and with an interpreter that waits: for the command that makes no difference."""
    container.preload = "_pydecimal" if request.param == "warm" else ""
    return container


__all__ = ["CHILD", "DEADLINE", "Container", "ended", "signal", "template_of"]
