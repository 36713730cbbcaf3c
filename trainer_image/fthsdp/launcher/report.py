"""The coordinator is told how the command ended: the operator asks there, as to a kubelet the container still runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fthsdp.environment import COORDINATOR, JOB, POD_INDEX, REPLICA, read_job_key
from fthsdp.errors import ConfigError, FthsdpError, Refused, WireError
from fthsdp.tls import Tls
from fthsdp.wire import open_blocking, receive_frame, send_frame

__all__ = ["Crash", "Report", "keep_telling", "tell"]

TIMEOUT = 2.0
"""Seconds for one attempt to tell it, and for each answer."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between attempts; doubled each time."""
AGAIN = 4.0
"""Seconds after which it is told again though it was heard: a coordinator that is restarted before the operator has
asked it knows nothing of it."""


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
    oom_killed: bool = False
    """The kernel has killed it, since the container had no memory left."""


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
    why = ", killed for its memory" if crash.oom_killed else ""
    seen = {"pod": int(env.get(POD_INDEX, "0")), "exit_code": crash.code, "words": crash.words}
    return {
        "kind": "exited",
        "replica": int(env[REPLICA]),
        "attempt": crash.attempt,
        "reason": f"a training process ended with exit code {crash.code}{why}",
        "detected": crash.time,
        # A coordinator of an earlier version takes no word that it does not know.
        "crash": seen | ({"oom_killed": True} if crash.oom_killed else {}),
    }


def keep_telling(report: Report, crash: Crash) -> str:
    """Tell of a crash, again and again; return why nobody will ever hear of it.

    No answer says that the operator knows: that shows when it ends us, with a new attempt.
    """
    pause = FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            report(crash)
            pause, wait = FIRST_PAUSE, AGAIN
        except (Refused, ConfigError) as error:
            return str(error)
        except (WireError, OSError):
            pause, wait = min(2 * pause, LONGEST_PAUSE), pause
        except FthsdpError as error:
            return str(error)
        time.sleep(max(0.0, wait - (time.monotonic() - began)))
