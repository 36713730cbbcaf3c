"""One pod's processes, as the launcher's event loop sees them: start, signal, exit.

The shim does the work in a process of its own (see ``shim``); here are only its two pipes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Launch", "PodProcess"]

_SHIM = Path(__file__).with_name("shim.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


class PodProcess:
    """A pod's first process and everything it starts.

    ``on_started(pid)`` and ``on_exit(code, message)`` come from the event loop; the code is 128 + n for signal n, the
    message is empty unless the command could not be started.
    """

    def __init__(self, shim: asyncio.subprocess.Process) -> None:
        self._shim = shim
        self._watch: asyncio.Task[None] | None = None
        self.pid: int | None = None
        """Of the first process, once it runs."""

    @classmethod
    async def start(
        cls,
        launch: Launch,
        *,
        log: Path,
        on_started: Callable[[int], None],
        on_exit: Callable[[int, str], None],
    ) -> PodProcess:
        """Start ``launch`` with its output appended to ``log``."""
        with log.open("ab") as output:
            shim = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_SHIM),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )  # fmt: skip
        process = cls(shim)
        process._write(json.dumps(asdict(launch)))
        process._watch = asyncio.create_task(process._follow(on_started, on_exit), name=f"watch {log.stem}")
        return process

    def signal(self, number: int) -> None:
        """Send a signal; after the exit this has no effect."""
        self._write(str(int(number)))

    async def wait(self) -> None:
        """Wait until the pod has ended and ``on_exit`` has been called."""
        assert self._watch is not None
        await asyncio.shield(self._watch)

    def _write(self, line: str) -> None:
        assert self._shim.stdin is not None
        if not self._shim.stdin.is_closing():
            self._shim.stdin.write(line.encode() + b"\n")

    async def _follow(self, on_started: Callable[[int], None], on_exit: Callable[[int, str], None]) -> None:
        assert self._shim.stdout is not None
        assert self._shim.stdin is not None
        code, message = 137, ""  # a shim that was killed takes the pod with it and says nothing
        async for line in self._shim.stdout:
            said = json.loads(line)
            if "pid" in said:
                self.pid = said["pid"]
                on_started(said["pid"])
            code, message = said.get("exit", code), said.get("error", message)
        self._shim.stdin.close()
        await self._shim.wait()
        on_exit(code, message)
