"""The coordinator is told how the command ended: the operator asks there, as to a kubelet the container still runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fthsdp.environment import COORDINATOR, JOB, POD_INDEX, REPLICA, read_job_key
from fthsdp.errors import ConfigError, FthsdpError, Refused, WireError
from fthsdp.tls import Tls
from fthsdp.wire import open_blocking, receive_frame, send_frame

__all__ = ["Crash", "Report", "Telling", "tell"]

TIMEOUT = 2.0
"""Seconds for one attempt to tell it, and for each answer."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between attempts; doubled each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """How the command ended."""

    attempt: int
    code: int
    """128 + n for signal n."""
    words: str
    """The last ones on its standard error."""
    time: float
    """Unix time in seconds."""


Report = Callable[[Crash], None]
"""Tells it once: raises WireError when nobody has heard it, Refused or ConfigError when nobody ever will."""


def tell(env: Mapping[str, str]) -> Report:
    """Return how to tell the coordinator that this environment names."""

    def report(crash: Crash) -> None:
        missing = next((name for name in (COORDINATOR, JOB, REPLICA) if not env.get(name)), None)
        if missing is not None:
            raise ConfigError(f"{missing} is not set: nobody can be told of the crash")
        connection = open_blocking(
            env[COORDINATOR],
            read_job_key(env),
            job=env[JOB],
            purpose="operator",
            timeout=TIMEOUT,
            tls=Tls.from_environment(env),
        )
        with connection:
            connection.settimeout(TIMEOUT)
            send_frame(connection, _exited(env, crash))
            send_frame(connection, {"kind": "status-request"})
            receive_frame(connection)  # what was said before is taken in when this is answered

    return report


def _exited(env: Mapping[str, str], crash: Crash) -> dict[str, object]:
    return {
        "kind": "exited",
        "replica": int(env[REPLICA]),
        "attempt": crash.attempt,
        "reason": f"a training process ended with exit code {crash.code}",
        "detected": crash.time,
        "crash": {"pod": int(env.get(POD_INDEX, "0")), "exit_code": crash.code, "words": crash.words},
    }


class Telling:
    """Tells of one crash, again and again until it is heard, in a thread of its own."""

    def __init__(self, report: Report, crash: Crash) -> None:
        self._report, self._crash = report, crash
        self._over = threading.Event()
        self.in_vain = ""
        """Why nobody will ever hear it; empty while somebody may."""
        self._thread = threading.Thread(target=self._tell, name="fthsdp-crash", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: after this there is none."""
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        pause = FIRST_PAUSE
        while not self._over.is_set():
            began = time.monotonic()
            try:
                self._report(self._crash)
                return
            except (Refused, ConfigError) as error:
                self.in_vain = str(error)
                return
            except (WireError, OSError):
                self._over.wait(max(0.0, pause - (time.monotonic() - began)))
                pause = min(2 * pause, LONGEST_PAUSE)
            except FthsdpError as error:
                self.in_vain = str(error)
                return
