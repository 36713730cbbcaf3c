"""An event loop in which waiting takes no time: when nothing is ready, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    """Waits for nothing: the time that the loop wants to wait has passed when this returns."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for something that never comes"
            self._loop.now += timeout
        return ready


def run(story: Coroutine[Any, Any, T]) -> T:
    """Run a story to its end; ``asyncio.get_running_loop().time()`` is its time in seconds."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(story)
