"""Processes that are forked from one that has imported everything: of their own in all, and started in a moment.

There is one such server for all tests, so what it imports is said in one place.
"""

from __future__ import annotations

import multiprocessing

__all__ = ["FORKS"]

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "fthsdp.checkpoint",
        "fthsdp.group",
        "fthsdp.recipes.tiny_llama",
        # Optimizers import it at their first step, and every rank of every job would pay a second for that.
        "torch._dynamo",
        "tests.local.ftar.nursery",
        "tests.local.training.points",
        "tests.local.frozen",
    ]
)
