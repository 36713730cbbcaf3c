"""The kernel kills a command for its memory and leaves its launcher alone: the operator hears of it as such."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.local.coordinator.conftest import Process
from tests.local.launcher.conftest import DEADLINE, Container, at, heard
from tests.local.waiting import wait_for

pytestmark = pytest.mark.local

LIMIT = 100 << 20
HOG = "taken = b'x' * (1 << 30)"
ROOT = Path("/sys/fs/cgroup")


@pytest.fixture
def small() -> Iterator[Path]:
    """A cgroup with little memory and no swap, in which the kernel kills one process at a time."""
    old = ROOT / "memory"
    limits = {"memory.limit_in_bytes": LIMIT, "memory.memsw.limit_in_bytes": LIMIT}
    folder = old if old.exists() else ROOT
    folder /= f"fthsdp-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        for name, limit in (limits if old.exists() else {"memory.max": LIMIT, "memory.swap.max": 0}).items():
            if not (folder / name).exists():
                pytest.skip(f"cgroups have no {name} here")
            (folder / name).write_text(str(limit))
        yield folder
        wait_for("the end of all in it", lambda: None if (folder / "cgroup.procs").read_text() else 1, seconds=DEADLINE)
    finally:
        folder.rmdir()


def test_a_command_that_was_killed_for_its_memory_is_told_apart(
    small: Path, container: Container, coordinator: Process
) -> None:
    launcher = container.run(
        sys.executable,
        "-c",
        HOG,
        under=["sh", "-c", f'echo $$ > {small}/cgroup.procs && exec "$@"', "sh"],
        **at(container, coordinator),
    )
    verdict = heard(coordinator)
    assert verdict.crash is not None
    assert (verdict.crash.exit_code, verdict.crash.oom_killed) == (137, True)
    assert verdict.reason == "a training process ended with exit code 137, killed for its memory"
    launcher.kill()
    launcher.wait(DEADLINE)
