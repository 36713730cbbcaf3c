"""What the tests of the operator share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _loggers_are_left_as_they_were() -> Iterator[None]:
    """Undo what a command does to the logs of its whole process."""
    root, chatty = logging.getLogger(), [logging.getLogger(name) for name in ("kopf.objects", "aiohttp.access")]
    handlers, levels = root.handlers[:], [each.level for each in (root, *chatty)]
    yield
    root.handlers[:] = handlers
    for each, level in zip((root, *chatty), levels, strict=True):
        each.setLevel(level)
