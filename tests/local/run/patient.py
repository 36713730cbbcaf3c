"""The recipe as a pod runs it, in a run that waits: its later steps take longer and longer until a file is there.

``python -m tests.local.run.patient FILE AFTER ARGUMENTS`` trains with ARGUMENTS, and waits for FILE after step AFTER.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.local.training.points import Linger

from fthsdp.recipes import tiny_llama

GROWTH = 1.15
"""A process that really starts takes seconds, and on a busy machine many: the first 30 slow steps last 43 s."""

if __name__ == "__main__":
    file, after, *arguments = sys.argv[1:]
    Linger(after=int(after), until=Path(file), growth=GROWTH)(0)
    sys.exit(tiny_llama.main(arguments))
