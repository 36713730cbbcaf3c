"""The launcher's loop: one child at a time, started for the newest attempt, until something has to end the container.

What ends it: the child exits with 0 (done) or 2 (bad input), cannot be started at all, or we are told to stop; then the
container ends as the child did. A crash is told to the coordinator, and the loop waits for a new attempt for as long as
``patience`` allows. A new attempt that comes while the child runs means that another pod's child has crashed: ours is
killed, since its replica is out, and started anew.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fthsdp.exit_codes import EXIT_CONFIG, EXIT_TERMINATED
from fthsdp.launcher.attempts import environment_of, read_attempt
from fthsdp.launcher.command import program_of
from fthsdp.launcher.memory import oom_kills
from fthsdp.launcher.processes import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    Undying,
    adopt_orphans,
    bury,
    code_of,
    fork,
    kill,
    kill_below,
    spawn,
)
from fthsdp.launcher.report import Crash, Report, keep_telling
from fthsdp.launcher.warm import Waiting
from fthsdp.launcher.words import LastWords

__all__ = ["IMPORT_TIMEOUT", "PATIENCE", "Settings", "Supervisor"]

PATIENCE = 30.0
"""Seconds for which a crashed command may be started again here; then the container ends, as it would have at once."""
IMPORT_TIMEOUT = 120.0
"""Seconds in which the interpreter that waits has to have imported everything; one that has not is frozen, or waits for
something in vain, and the command starts without it."""
POLL = 0.1
"""Seconds between two looks at the file with the attempt."""
_PASSED_ON = (0, EXIT_CONFIG, NOT_EXECUTABLE, NOT_FOUND)
"""Exit codes after which it makes no sense to start again here."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_FORWARDED = (*_STOPS, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a launcher is told."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    """Of the container."""
    born: int
    """The attempt for which the container was made."""
    attempts: Path
    """File with the number of the attempt that is to run."""
    preload: tuple[str, ...] = ()
    """What a waiting interpreter has imported; none is kept where empty."""
    patience: float = PATIENCE
    import_timeout: float = IMPORT_TIMEOUT


class Supervisor:
    """Runs the command; ``run`` is called once, in the only thread there is."""

    def __init__(self, settings: Settings, *, report: Report) -> None:
        self._signals: list[int] = []
        self._wakeup = self._listen()
        adopt_orphans()
        self._settings = settings
        self._report = report
        self._attempt = settings.born
        self._words = LastWords()
        self._child: int | None = None
        self._due = True
        """The child has to be started as soon as that is possible."""
        self._oom_kills = 0
        """Of this container when the child was started."""
        self._stopping = False
        self._code = 0
        """Of the child that crashed."""
        self._telling: int | None = None
        """Process that tells of the crash."""
        self._deadline = 0.0
        self._waiting = self._interpreter()
        self._ready_by = time.monotonic() + settings.import_timeout

    def run(self) -> int:
        """Run the command until the container has to end, and return its exit code; nothing is left below us."""
        try:
            while (code := self._step()) is None:
                self._wait()
            kill_below()
            return code
        except Undying as error:
            _say(f"{error}: nothing can be started here again")
            return 128 + signal.SIGKILL
        finally:
            self._words.drain()
            if self._waiting is not None:
                self._waiting.channel.close()

    def _listen(self) -> int:
        """Take signals from now on; return a descriptor that becomes readable when one arrives, or a child ends."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _FORWARDED:
            signal.signal(number, self._hear)
        return reader

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    # --- one turn -----------------------------------------------------------------------------------------------------

    def _step(self) -> int | None:
        """Take in what has happened; return an exit code when the container has to end."""
        self._forward()
        code = self._reap()
        if code is not None:
            return code
        if self._stopping:
            return self._stopped()
        self._look_for_a_new_attempt()
        if self._due:
            self._start()
        waits_in_vain = self._telling is not None and time.monotonic() >= self._deadline
        return self._code if waits_in_vain else None

    def _stopped(self) -> int | None:
        """We were told to stop: what runs was told too, and nothing is started any more."""
        if self._child is not None:
            return None
        return EXIT_TERMINATED if self._due else self._code

    def _wait(self) -> None:
        channel = self._waiting.channel if self._waiting is not None else None
        sources: list[int | socket.socket] = [self._wakeup, self._words.reader]
        sources += [channel] if channel is not None else []
        readable, _, _ = select.select(sources, [], [], POLL)
        if self._wakeup in readable:
            os.read(self._wakeup, 4096)
        if self._words.reader in readable:
            self._words.pass_on()
        if channel is not None and channel in readable:
            self._hear_the_interpreter()

    def _forward(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._stopping |= number in _STOPS
            if self._child is not None:
                kill(self._child, number)

    def _reap(self) -> int | None:
        """Take in who has ended; return an exit code when that of the child ends the container."""
        code = None
        while (ended := _next_end()) is not None:
            pid, status = ended
            if pid == self._child:
                code = self._ended(code_of(status))
            elif pid == self._telling:
                code = self._code  # nobody will ever start the command again here
            elif self._waiting is not None and pid == self._waiting.pid:
                self._go_cold(f"it ended with exit code {code_of(status)}")
        return code

    def _ended(self, code: int) -> int | None:
        """The child has ended: whatever it left goes too, and what it said is kept."""
        self._child = None
        kill_below(spare=self._spared)
        words = self._words.drain()
        self._code = code
        if self._stopping or code in _PASSED_ON:
            return code
        out_of_memory = code == 128 + signal.SIGKILL and oom_kills() > self._oom_kills
        crash = Crash(attempt=self._attempt, code=code, words=words, time=time.time(), oom_killed=out_of_memory)
        self._telling = fork(lambda: self._tell(crash))
        self._deadline = time.monotonic() + self._settings.patience
        return None

    def _tell(self, crash: Crash) -> int:
        """Tell of a crash, in a process of its own: it may hang, and is killed when it is not needed any more."""
        _say(f"the crash is told to nobody: {keep_telling(self._report, crash)}")
        return 1

    def _look_for_a_new_attempt(self) -> None:
        newest = read_attempt(self._settings.attempts)
        if newest is None or newest <= self._attempt:
            return
        kill_below(spare=self._spared)
        self._words.drain()
        self._child = self._telling = None
        self._attempt, self._due = newest, True

    # --- starting -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the child; not yet while the interpreter that is to make it still imports."""
        if self._waiting is not None and not self._waiting.ready:
            if time.monotonic() < self._ready_by:
                return
            self._go_cold(f"it has not imported everything within {self._settings.import_timeout:g} s")
        env = environment_of(self._settings.env, self._attempt, born=self._settings.born)
        self._oom_kills = oom_kills()
        if self._waiting is not None:
            self._child = self._waiting.fork(env)
            if self._child is None:
                self._go_cold(self._waiting.why)
                kill_below()  # what it may have made without telling us
        if self._waiting is None:
            self._child = spawn(self._settings.command, env, stderr=self._words.writer)
        self._due = False
        if self._attempt != self._settings.born:
            how = "in place" if self._waiting is None else "in place, from an interpreter that had started"
            _say(f"attempt {self._attempt} starts {how}")

    @property
    def _spared(self) -> tuple[int, ...]:
        return () if self._waiting is None else (self._waiting.pid,)

    def _interpreter(self) -> Waiting | None:
        program = program_of(self._settings.command)
        if not self._settings.preload or program is None or sys.platform != "linux":
            return None
        return Waiting(program, self._settings.preload, self._settings.env, stderr=self._words.writer)

    def _hear_the_interpreter(self) -> None:
        assert self._waiting is not None
        self._waiting.hear()
        if self._waiting.why:
            self._go_cold(self._waiting.why)

    def _go_cold(self, why: str) -> None:
        """The interpreter is of no use: the command is started as it would be without one."""
        _say(f"no interpreter waits for this command: {why}")
        assert self._waiting is not None
        self._waiting.channel.close()
        bury(self._waiting.pid)
        self._waiting = None


def _next_end() -> tuple[int, int] | None:
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return pid, status
    return None


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"fthsdp: {text}\n".encode())
