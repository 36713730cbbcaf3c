"""A port on which one question is answered: whether an operator is well, what there is for Prometheus to scrape."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

__all__ = ["Answer", "Unwell", "answer", "serving", "well"]

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Unwell(Exception):
    """Why a process is better restarted."""


@asynccontextmanager
async def serving(port: int | None, path: str, answer: Answer) -> AsyncIterator[None]:
    """Answer GET there for as long as the context lasts; without a port do nothing. Raises OSError if it is taken."""
    if port is None:
        yield
        return
    application = web.Application()
    application.router.add_get(path, answer)
    runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


async def well(_: web.Request) -> web.Response:
    """Answer the kubelet's probes while an operator stands by: it is well, and ready to take over."""
    return web.json_response({})


async def answer(question: Awaitable[None]) -> web.Response:
    """Answer the kubelet's probes of an operator that acts: it is well unless the question raises Unwell."""
    try:
        await question
    except Unwell as reason:
        return web.json_response({"reason": str(reason)}, status=500)
    return web.json_response({})
