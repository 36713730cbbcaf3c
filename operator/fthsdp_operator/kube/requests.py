"""Requests to an API server, and what its answers mean, with the asyncio client of ``kubernetes``.

Bodies are plain mappings: a pod is looked at through a handful of fields, and turning thousands of them into client
objects would cost more than all the rules.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from yaml import YAMLError

from fthsdp.errors import ConfigError
from fthsdp_operator.cluster import (
    AlreadyExists,
    Busy,
    ClusterError,
    Conflict,
    Forbidden,
    Manifest,
    NamespaceEnding,
    Refused,
    Unanswered,
)

__all__ = ["Access", "Gone", "NotFound", "Requests", "find_kubeconfig", "trusting"]

REQUEST_TIMEOUT = 30.0
"""Seconds for one request to the API server."""
LONGEST_RETRY_AFTER = 60.0
"""Seconds for which a job waits at most because a server, or what stands before it, asked for it."""
LONGEST_LINE = 16 * 2**20
"""Bytes of one line of a stream. An object has at most a tenth of that."""

LONGEST_WORDS = 2000
"""Characters of what the server says that are kept: where it refuses an object, it may repeat much of it."""

Query = Mapping[str, str]
_FAILED = (aiohttp.ClientError, TimeoutError, OSError, config.ConfigException)
"""What a request fails with that has no answer; the last: where the account's token cannot be read just now."""


class NotFound(Refused):
    """There is no such object."""


class Gone(ClusterError):
    """The server does not have that version any more."""


def find_kubeconfig(given: str | None) -> str:
    """Return the kubeconfig that kubectl would take, which may be several files; raises ConfigError without any."""
    files = given or os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    if not any(Path(file).is_file() for file in files.split(os.pathsep)):
        raise ConfigError(f"there is no kubeconfig at {files}: name one with --kubeconfig FILE")
    return files


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach the API server."""

    kubeconfig: str | None
    """Path of a kubeconfig file; None: as the service account of the pod that this runs in."""

    async def load(self) -> Configuration:
        """Return address and credentials as they are now; raises ConfigError."""
        settings = Configuration()
        try:
            if self.kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                await config.load_kube_config(config_file=self.kubeconfig, client_configuration=settings)
        # The last three: of a file that is YAML but no kubeconfig, the client takes parts that are not there.
        except (config.ConfigException, OSError, ValueError, YAMLError, TypeError, KeyError, AttributeError) as error:
            where = f"kubeconfig {self.kubeconfig}" if self.kubeconfig else "the service account of this pod"
            raise ConfigError(f"{where} gives no access to a cluster: {' '.join(str(error).split())}") from error
        # Else aiohttp looks for a proxy, and for a .netrc, before each request anew, and in a thread.
        settings.proxy = settings.proxy or _proxy(settings.host)
        settings.client_session_kwargs = {"trust_env": False}
        return settings


def _proxy(address: str) -> str | None:
    """Return the proxy that the environment names for an address (HTTPS_PROXY, NO_PROXY)."""
    where = urlsplit(address)
    proxies, host = getproxies(), where.hostname or ""
    return None if proxy_bypass(host) or _in_a_range(host, proxies.get("no", "")) else proxies.get(where.scheme)


def _in_a_range(host: str, ranges: str) -> bool:
    """Whether NO_PROXY names a range of addresses with this one in it, as kubectl understands it."""
    with suppress(ValueError):
        address = ip_address(host)
        return any(address in network for network in _networks(ranges))
    return False


def _networks(ranges: str) -> Iterator[IPv4Network | IPv6Network]:
    for word in ranges.split(","):
        with suppress(ValueError):
            yield ip_network(word.strip(), strict=False)


class Requests:
    """Connections to one API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._client.user_agent = "fthsdp-operator"
        self._time_left: Callable[[], float] = lambda: math.inf
        self._given_up: set[asyncio.Task[aiohttp.ClientResponse]] = set()
        """Requests for streams that nobody waits for any more."""

    @classmethod
    async def connect(
        cls, access: Access, *, traces: Sequence[aiohttp.TraceConfig] = (), most: int | None = None
    ) -> Requests:
        """Connect; ``traces`` are told of every request, ``most``: connections at a time, 0 for any number.

        Raises ConfigError when there is no access.
        """
        settings = await access.load()
        settings.trace_configs = list(traces)
        if most is not None:
            settings.connection_pool_maxsize = most
        client = ApiClient(settings)
        if settings.ssl_ca_cert:
            settings.trace_configs.append(trusting(client.rest_client.ssl_context, settings.ssl_ca_cert))
        return cls(client)

    def only_while(self, time_left: Callable[[], float]) -> None:
        """Ask this before each call from now on: it returns the seconds that one may take, or does not return."""
        self._time_left = time_left

    def time_left(self) -> float:
        """Return the seconds that a call may take, or do not return."""
        return self._time_left()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
        for asking in self._given_up:  # they have just lost theirs, and would try again
            asking.cancel()
        await asyncio.gather(*self._given_up, return_exceptions=True)

    async def make(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | Sequence[Any] | None = None,
        content_type: str = "application/json",
        timeout: float = REQUEST_TIMEOUT,
    ) -> Manifest:
        """Make one request; raises ClusterError with what the server said."""
        what = f"{method} {path}"
        limit = min(timeout, self._time_left())
        try:
            response = await self._send(method, path, query, limit, body=body, content_type=content_type)
            content = await response.read()
        except _FAILED as error:
            raise _unanswered(what, error) from error
        return _answer(what, response, content)

    async def lines(
        self, path: str, *, query: Query, silence: float, opened: Callable[[], None]
    ) -> AsyncGenerator[bytes]:
        """Yield each line of an answer that goes on until the server ends it; what has no end is no line.

        ``opened`` is called as soon as the answer begins.
        Raises ClusterError with what the server said, Unanswered when the connection breaks within a line or says
        nothing for ``silence`` seconds.
        """
        what = f"watch of {path}"
        limit = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT, sock_read=silence)
        try:
            response = await self._open(path, query, limit)
            try:
                if response.status != 200:
                    _answer(what, response, await response.read())
                opened()
                rest = b""
                async for chunk in response.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        yield line
                    if len(rest) > LONGEST_LINE:
                        raise ClusterError(f"{what}: a line is longer than {LONGEST_LINE} bytes")
                if rest:
                    raise Unanswered(f"{what}: it ended within a line")
            finally:
                _hang_up(response)
        except _FAILED as error:
            raise _unanswered(what, error) from error

    async def _open(self, path: str, query: Query, limit: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Ask for a stream. Who gives up before it has begun hangs up when it begins, or when all is closed."""
        asking = asyncio.create_task(self._send("GET", path, query, limit))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._given_up.add(asking)
            asking.add_done_callback(self._begun_too_late)
            raise

    def _begun_too_late(self, asking: asyncio.Task[aiohttp.ClientResponse]) -> None:
        self._given_up.discard(asking)
        if not asking.cancelled() and asking.exception() is None:
            _hang_up(asking.result())

    async def _send(
        self,
        method: str,
        path: str,
        query: Query | None,
        limit: float | aiohttp.ClientTimeout,
        *,
        body: Mapping[str, Any] | Sequence[Any] | None = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        verb, url, headers, _, _ = await self._client.param_serialize(
            method,
            f"/{path}",
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        # Past what param_serialize does to a body: it looks at each word for things that no body here has.
        answer = await self._client.call_api(verb, url, headers, body, _request_timeout=limit)
        response: aiohttp.ClientResponse = answer.response
        return response


def trusting(context: ssl.SSLContext, authorities: str) -> aiohttp.TraceConfig:
    """Return what a session is given so that it trusts a new authority of the cluster, when its file has got one.

    A service account's file changes in its pod, and nobody tells. It is read again when a server's certificate is not
    trusted: the next attempt is made with it.
    """
    traces = aiohttp.TraceConfig()

    async def failed(_: aiohttp.ClientSession, __: SimpleNamespace, end: aiohttp.TraceRequestExceptionParams) -> None:
        if isinstance(end.exception, aiohttp.ClientConnectorCertificateError):
            with suppress(OSError):
                context.load_verify_locations(cafile=authorities)

    traces.on_request_exception.append(failed)
    return traces


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """Close the connection of an answer now, if it has not ended: TLS would wait for the server to agree to it."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()


def _unanswered(what: str, error: BaseException) -> Unanswered:
    return Unanswered(f"{what}: the API server does not answer: {error or type(error).__name__}")


def _retry_after(header: str | None) -> float:
    """Seconds; a date, which the API server never sends, counts as none."""
    return min(float(header), LONGEST_RETRY_AFTER) if header and header.isdecimal() else 0.0


def _causes(words: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the causes that an API server names; what stands before it may have answered in words of its own."""
    details = words.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return [cause for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []


_ERRORS = {403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone}


def _answer(what: str, response: aiohttp.ClientResponse, content: bytes) -> Manifest:
    status = response.status
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if status < 300 and isinstance(answer, dict):
        return answer
    words = answer if isinstance(answer, dict) else {"message": content[:200].decode(errors="replace")}
    message = f"{what}: {status} {words.get('reason', '')}: {str(words.get('message', ''))[:LONGEST_WORDS]}"
    if words.get("reason") == "AlreadyExists":
        raise AlreadyExists(message)
    if status == 403 and any(cause.get("reason") == "NamespaceTerminating" for cause in _causes(words)):
        raise NamespaceEnding(message)
    kind = Busy if status == 429 or status >= 500 else _ERRORS.get(status, Refused if status >= 400 else ClusterError)
    raise kind(message, retry_after=_retry_after(response.headers.get("Retry-After")))
