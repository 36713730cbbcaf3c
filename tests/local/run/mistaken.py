"""The recipe as a pod runs it, with a fault in its code: ``python -m tests.local.run.mistaken STEP ARGUMENTS``."""

from __future__ import annotations

import sys

from tests.local.training.points import Mistake

from fthsdp.recipes import tiny_llama

if __name__ == "__main__":
    step, *arguments = sys.argv[1:]
    Mistake(step=int(step))(0)
    sys.exit(tiny_llama.main(arguments))
