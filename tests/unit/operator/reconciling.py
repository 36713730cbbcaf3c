"""A worker of the operator on a world."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.unit.operator.world import World

from fthsdp_operator.process.handlers import Reconciler

__all__ = ["working"]


@asynccontextmanager
async def working(world: World) -> AsyncIterator[Reconciler]:
    """Let one worker reconcile what is put into the queue, by the world's clock."""
    reconciler = Reconciler(world, clock=lambda: world.now)
    worker = asyncio.create_task(reconciler.work())
    try:
        yield reconciler
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
