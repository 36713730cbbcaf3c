"""The recipe as a pod runs it, in a replica that crashes in its first attempts, some steps after it began to train.

``python -m tests.local.run.crashing DEATHS ATTEMPTS LOSSES AFTER ARGUMENTS`` trains with ARGUMENTS.
In the last pod of replica 1 each of the first ATTEMPTS attempts kills itself when it computes the loss number LOSSES,
and leaves its number and the Unix time in the file DEATHS. Steps after AFTER take longer and longer until the next one
trains as well; with an AFTER of 0 none does.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.local.run.patient import GROWTH
from tests.local.training.points import Linger

from fthsdp.recipes import tiny_llama


def crash(deaths: Path, after: int) -> None:
    """Let this process kill itself at the loss with this number."""
    loss, numbers = tiny_llama.emulated_loss, itertools.count(1)

    def once(*given: Any) -> Any:
        if next(numbers) == after:
            print("it breaks here", file=sys.stderr, flush=True)
            with deaths.open("a") as file:
                file.write(f"{os.environ['FTHSDP_ATTEMPT']} {time.time()}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(*given)

    tiny_llama.emulated_loss = once


def tell(file: Path) -> None:
    """Let this process leave a file when it computes its first loss."""
    loss = tiny_llama.emulated_loss

    def first(*given: Any) -> Any:
        file.touch()
        return loss(*given)

    tiny_llama.emulated_loss = first


if __name__ == "__main__":
    deaths, attempts, losses, after, *arguments = sys.argv[1:]
    over = Path(f"{deaths}.over")
    if int(after):
        Linger(after=int(after), until=over, growth=GROWTH)(0)
    replica, attempt, pod, pods = (
        int(os.environ[f"FTHSDP_{name}"]) for name in ("REPLICA", "ATTEMPT", "POD_INDEX", "PODS_PER_REPLICA")
    )
    if replica == 1 and attempt >= int(attempts):
        tell(over)
    elif replica == 1 and pod == pods - 1:
        crash(Path(deaths), int(losses))
    sys.exit(tiny_llama.main(arguments))
