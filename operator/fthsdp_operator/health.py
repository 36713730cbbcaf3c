"""Answers the kubelet's probes while an operator stands by: it is well, and ready to take over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

__all__ = ["answering"]


@asynccontextmanager
async def answering(port: int | None) -> AsyncIterator[None]:
    """Answer GET /healthz on this port for as long as the context lasts; do nothing without a port."""
    if port is None:
        yield
        return

    async def well(request: web.Request) -> web.Response:
        return web.json_response({})

    application = web.Application()
    application.add_routes([web.get("/healthz", well)])
    runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()  # noqa: S104
        yield
    finally:
        await runner.cleanup()
