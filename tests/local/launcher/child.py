"""A command for the launcher: ``child.py BIRTHS WHAT …`` says who it is in the file BIRTHS, and does the next of WHAT.

The attempt's number picks from WHAT, the last one for all that follow. ``wait`` ends with 9 at SIGTERM, ``deaf`` takes
no notice of it, ``crash`` says so and ends with 7, ``nursery`` leaves a process that hides from its parent and waits,
and a number is an exit code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ORPHAN = "import os, signal; os.setsid(); signal.pause()"
LEAVE = f"import subprocess as s, sys; print(s.Popen([sys.executable, '-c', {ORPHAN!r}], stdout=s.DEVNULL).pid)"


def main() -> None:
    """Say who we are, and do what is asked for."""
    births, *todo = sys.argv[1:]
    attempt = int(os.environ["FTHSDP_ATTEMPT"])
    what = todo[min(attempt, len(todo) - 1)]
    born = {
        "attempt": attempt,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "port": os.environ.get("MASTER_PORT"),
        "warm": "_pydecimal" in sys.modules,
        "orphan": orphan() if what == "nursery" else None,
    }
    if what in ("wait", "nursery"):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Path(births).open("a") as file:
        file.write(json.dumps(born) + "\n")
    if what == "crash":
        print("it breaks", file=sys.stderr)
        sys.exit(7)
    while not what.isdecimal():
        signal.pause()
    sys.exit(int(what))


def orphan() -> int:
    """Leave a process that nobody waits for; return its number."""
    done = subprocess.run([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


if __name__ == "__main__":
    main()
