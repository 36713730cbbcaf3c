"""A small HTTP server on loopback, which answers as a test says."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

__all__ = ["Answer", "kubeconfig_for", "serving"]

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Have every request answered so for as long as the context lasts; yield the server's address, with its scheme."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def kubeconfig_for(server: str, folder: Path, *, authority: Path | None = None) -> str:
    """Write a kubeconfig for an API server at this address, and return its path.

    ``authority``: a file with the certificates of those who may have signed the server's.
    """
    file = folder / "kubeconfig"
    trust = f', certificate-authority: "{authority}"' if authority else ""
    file.write_text(f"""\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}"{trust}}}}}]
users: [{{name: u, user: {{token: t}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
current-context: c
""")
    return str(file)
