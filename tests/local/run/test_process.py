"""Pods as processes: exits as a kubelet reports them, and nothing that outlives its pod or its launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.local.waiting import ends

from fthsdp_operator.local.process import Launch, PodProcess

pytestmark = pytest.mark.local
DEADLINE = 20.0


class Watched:
    """One started pod, its events as futures."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = loop.create_future()
        self.exited: asyncio.Future[tuple[int, str]] = loop.create_future()
        self.process: PodProcess

    @classmethod
    async def start(cls, log: Path, *argv: str) -> Watched:
        self = cls()
        self.process = await PodProcess.start(
            Launch(argv=argv, env=dict(os.environ), cwd="/"),
            log=log,
            on_started=self.started.set_result,
            on_exit=lambda code, message: self.exited.set_result((code, message)),
        )
        return self


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await test()

    asyncio.run(limited())


def stopped(pid: int) -> bool:
    """Wait until Linux has stopped a process."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137), ("kill -TERM $$", 143), ("kill -SEGV $$", 139)],
)
def test_an_exit_is_reported_as_a_kubelet_would(tmp_path: Path, command: str, code: int) -> None:
    async def check() -> None:
        pod = await Watched.start(tmp_path / "log", "sh", "-c", command)
        assert await pod.exited == (code, "")

    run(check)


def test_the_output_of_a_pod_is_in_its_log(tmp_path: Path) -> None:
    async def check() -> None:
        pod = await Watched.start(tmp_path / "log", "sh", "-c", "echo out; echo err >&2")
        await pod.exited

    run(check)
    assert (tmp_path / "log").read_text() == "out\nerr\n"


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async def check() -> None:
        pod = await Watched.start(tmp_path / "log", "no-such-command")
        assert await pod.exited == (128, "no-such-command: No such file or directory")

    run(check)


def test_signals_reach_the_pod(tmp_path: Path) -> None:
    async def check() -> None:
        pod = await Watched.start(tmp_path / "log", "sleep", "60")
        await pod.started
        pod.process.signal(signal.SIGTERM)
        assert await pod.exited == (143, "")

    run(check)


def test_a_frozen_pod_can_be_killed(tmp_path: Path) -> None:
    async def check() -> None:
        pod = await Watched.start(tmp_path / "log", "sleep", "60")
        pid = await pod.started
        pod.process.signal(signal.SIGSTOP)
        assert await asyncio.to_thread(stopped, pid)
        pod.process.signal(signal.SIGTERM)
        pod.process.signal(signal.SIGKILL)
        assert (await pod.exited)[0] == 137

    run(check)


def test_what_a_pod_started_ends_with_it_even_in_a_session_of_its_own(tmp_path: Path) -> None:
    async def check() -> None:
        log = tmp_path / "log"
        script = "setsid sleep 60 & setsid sh -c 'sleep 60; :' & echo $!; exit 5"
        pod = await Watched.start(log, "sh", "-c", script)
        assert await pod.exited == (5, "")
        assert ends(int(log.read_text()), seconds=DEADLINE)

    run(check)


def test_a_killed_shim_takes_the_pod_with_it(tmp_path: Path) -> None:
    async def check() -> None:
        pod = await Watched.start(tmp_path / "log", "sleep", "60")
        pid = await pod.started
        pod.process._shim.kill()
        assert await pod.exited == (137, "")
        assert ends(pid, seconds=DEADLINE)

    run(check)


LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from fthsdp_operator.local.process import Launch, PodProcess

async def main():
    launch = Launch(argv=("sh", "-c", "setsid sleep 60 & echo $!; wait"), env=dict(os.environ), cwd="/")
    pod = await PodProcess.start(launch, log=Path(sys.argv[1]), on_started=lambda pid: print(pid, flush=True),
                                 on_exit=lambda *_: None)
    await pod.wait()

asyncio.run(main())
"""


def test_nothing_survives_a_killed_launcher(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(log)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        first = int(launcher.stdout.readline())
        deadline = time.monotonic() + DEADLINE
        while not log.read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        launcher.kill()
    assert ends(first, seconds=DEADLINE)
    assert ends(int(log.read_text()), seconds=DEADLINE)
