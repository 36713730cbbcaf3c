"""An earlier version of the chart, and a job that its operator ran: what an upgrade finds. Written by ``freeze.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["BEFORE", "JOB", "OBJECTS", "UID", "objects"]

BEFORE = Path(__file__).with_name("chart")
"""The chart as it was, rendered with its defaults."""
OBJECTS = BEFORE / "templates" / "all.yaml"
JOB = Path(__file__).with_name("job.json")
UID = "JOB-UID"
"""Stands where the uid of the job belongs."""


def objects(*, uid: str = UID) -> list[dict[str, Any]]:
    """Return the job and all that was made for it, in the order in which it was made."""
    found: list[dict[str, Any]] = json.loads(JOB.read_text(encoding="utf-8").replace(UID, uid))["objects"]
    return found
