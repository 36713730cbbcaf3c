"""Standard error of the command: passed on as it comes, its end kept, since there stands why it failed."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["KEPT", "LastWords"]

KEPT = 2048
"""Bytes of the end that are kept: as many as a kubelet takes from the end of a log."""
_AT_ONCE = 1 << 16


class LastWords:
    """A pipe whose writing end is the command's standard error."""

    def __init__(self, *, out: int = 2) -> None:
        self._out = out
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._kept = b""

    def pass_on(self) -> bool:
        """Pass on what is there, once; return whether there was anything."""
        try:
            data = os.read(self.reader, _AT_ONCE)
        except BlockingIOError:
            return False
        self._kept = (self._kept + data)[-KEPT:]
        view = memoryview(data)
        with suppress(OSError):  # nobody reads our standard error: the command goes on all the same
            while view:
                view = view[os.write(self._out, view) :]
        return True

    def drain(self) -> str:
        """Pass on all that is there and return the end of it; the next words are another child's."""
        while self.pass_on():
            pass
        kept, self._kept = self._kept, b""
        return kept.decode(errors="replace")
