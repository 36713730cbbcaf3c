"""Waiting for what processes do."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["ends", "wait_for"]

T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], *, seconds: float) -> T:
    """Look until something is there, and return it; raises AssertionError after ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found is not None:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


def ends(pid: int, *, seconds: float) -> bool:
    """Wait until a process that is not our child has ended; return whether it has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
