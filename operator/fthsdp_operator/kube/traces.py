"""Every request to the API server, told to those who count: aiohttp says when an answer came, or why none did."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Protocol

from aiohttp import ClientResponse, ClientSession, TraceConfig, TraceRequestEndParams, TraceRequestExceptionParams
from yarl import URL

__all__ = ["Listener", "trace", "verb"]

Count = Callable[[str, str], None]
"""Takes a request's verb and status."""

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Listener(Protocol):
    """Who wants to know about lists and watches."""

    def listed(self, path: str) -> None:
        """A collection was listed."""
        ...

    def refused(self, path: str, *, forbidden: bool) -> None:
        """A list or a watch was refused: we have no right to it, or the server cannot do it now."""
        ...

    def opened(self, path: str, signs: Callable[[], int]) -> None:
        """A watch was opened; ``signs`` grows with each byte that comes on it, and when the server ends it."""
        ...


def verb(method: str, url: URL) -> str:
    """Return what Kubernetes calls a request: get, list, watch, create, update, patch or delete."""
    if method != "GET":
        return _VERBS.get(method, method.lower())
    if url.query.get("watch") in ("true", "1"):
        return "watch"
    return "list" if _COLLECTION.search(url.path) else "get"


_PATH = re.compile(r"/api(?:s/[^/]+)?/v[^/]+/.+")
"""What follows the address of the API server: some are found under a path of somebody else's server."""
_COLLECTION = re.compile(r"/api(?:s/[^/]+)?/v[^/]+(?:/namespaces/[^/]+)?/[^/]+$")


def _path(url: URL) -> str:
    found = _PATH.search(url.path)
    return found.group() if found is not None else url.path


def _tell(listener: Listener, kind: str, path: str, response: ClientResponse) -> None:
    if response.status in (403, 429) or response.status >= 500:
        listener.refused(path, forbidden=response.status == 403)
    elif response.status == 200 and kind == "watch":
        listener.opened(path, lambda: response.content.total_bytes + response.content.is_eof())
    elif response.status == 200:
        listener.listed(path)


def trace(count: Count, listener: Listener | None = None) -> TraceConfig:
    """Return what a session is given so that its requests are counted, and its watches heard."""
    config = TraceConfig()

    async def answered(_: ClientSession, __: SimpleNamespace, end: TraceRequestEndParams) -> None:
        kind = verb(end.method, end.url)
        count(kind, str(end.response.status))
        if listener is not None and kind in ("list", "watch"):
            _tell(listener, kind, _path(end.url), end.response)

    async def failed(_: ClientSession, __: SimpleNamespace, end: TraceRequestExceptionParams) -> None:
        count(verb(end.method, end.url), "error")

    config.on_request_end.append(answered)
    config.on_request_exception.append(failed)
    return config
