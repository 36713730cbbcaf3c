"""The benchmark's own hands and eyes at the API server, apart from the operator's: one call, many calls, a watch.

What watches asks for the metadata of pods only, so that looking on costs little. Times are seconds of the monotonic
clock, taken when the line arrived.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import yaml
from tests.bench.processes import BenchmarkFailed

__all__ = ["IN_FLIGHT", "Api", "Pods"]

IN_FLIGHT = 50
"""Calls at a time, where many are made."""
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_TIMEOUT = 60.0

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """An API server, spoken to as its administrator."""

    address: str
    """host:port"""
    token: str

    @classmethod
    def of(cls, kubeconfig: Path) -> Api:
        """Read address and token."""
        config = yaml.safe_load(kubeconfig.read_text())
        address = urlsplit(config["clusters"][0]["cluster"]["server"]).netloc
        return cls(address=address, token=config["users"][0]["user"]["token"])

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Manifest:
        """Make one call over a connection of its own; raises BenchmarkFailed with what the server said."""
        try:
            with self._connection() as connection:
                connection.request(method, f"/{path}", json.dumps(body) if body is not None else None, self.headers())
                response = connection.getresponse()
                answer: Manifest = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BenchmarkFailed(f"{method} {path}: {error or type(error).__name__}") from error
        if response.status >= 300:
            raise BenchmarkFailed(f"{method} {path}: {response.status} {answer.get('message')}")
        return answer

    def delete_pod(self, namespace: str, name: str) -> float:
        """Delete a pod at once and return when it was asked for."""
        began = time.monotonic()
        self.call("DELETE", f"api/v1/namespaces/{namespace}/pods/{name}", {"gracePeriodSeconds": 0})
        return began

    def create_all(self, path: str, bodies: Iterable[Manifest]) -> float:
        """Create objects of one kind, so many in flight; returns when that began.

        In a process of its own, so that who watches meanwhile does not slow it down, nor the other way round.
        """
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_create_all, self, path, [json.dumps(body).encode() for body in bodies]).result()

    def watch(self, path: str, query: Mapping[str, str], ear: Ear) -> Iterator[Manifest]:
        """Yield what is there, then a bookmark, then every event: metadata only, until the ear is closed."""
        begin = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
        while not ear.closed:  # the server ends the watch of who falls behind
            words = {**query, "watch": "true", **begin}
            with self._connection(timeout=None) as connection:
                connection.request("GET", f"/{path}?{urlencode(words)}", headers=self.headers(Accept=_METADATA_ONLY))
                ear.connected(connection.sock)
                response = connection.getresponse()
                if response.status >= 300:
                    raise BenchmarkFailed(f"watch of {path}: {response.status} {response.read()[:500]!r}")
                while line := response.readline():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise BenchmarkFailed(f"watch of {path}: {event['object'].get('message')}")
                    begin = {"resourceVersion": event["object"]["metadata"]["resourceVersion"]}
                    yield event

    @contextmanager
    def _connection(self, timeout: float | None = _TIMEOUT) -> Iterator[http.client.HTTPSConnection]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(self.address, timeout=timeout, context=context)
        try:
            yield connection
        finally:
            connection.close()

    def headers(self, **more: str) -> dict[str, str]:
        """Return what goes with every call."""
        return {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", **more}


def _create_all(api: Api, path: str, bodies: list[bytes]) -> float:
    began = time.monotonic()
    try:
        asyncio.run(_create_some(api, f"https://{api.address}/{path}", iter(bodies)))
    except (OSError, TimeoutError, aiohttp.ClientError) as error:
        raise BenchmarkFailed(f"POST {path}: {error or type(error).__name__}") from None
    return began


async def _create_some(api: Api, url: str, waiting: Iterator[bytes]) -> None:
    async def one_after_the_other(session: aiohttp.ClientSession) -> None:
        for body in waiting:
            async with session.post(url, data=body) as response:
                if response.status >= 300:
                    raise BenchmarkFailed(f"POST {url}: {response.status} {(await response.text())[:500]}")
                await response.read()

    connector = aiohttp.TCPConnector(ssl=False, limit=IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector, headers=api.headers()) as session:
        await asyncio.gather(*(one_after_the_other(session) for _ in range(IN_FLIGHT)))


class Ear:
    """What ends a watch."""

    def __init__(self) -> None:
        self.closed = False
        self._socket: Any = None

    def connected(self, socket: Any) -> None:
        """Take the connection that it listens on now."""
        self._socket = socket
        if self.closed:
            self.close()

    def close(self) -> None:
        """End the connection, and let no other follow."""
        self.closed = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(2)


class Pods:
    """All pods of a namespace that have a label, seen by a watch of their metadata and one of those that run."""

    def __init__(self, api: Api, namespace: str, selector: str) -> None:
        self.made: dict[str, float] = {}
        """When each pod was seen first, by name; those that are gone as well."""
        self.labels: dict[str, Mapping[str, str]] = {}
        self.leaving: dict[str, float] = {}
        """When each pod was seen first as one that is to go, or was gone."""
        self.there: set[str] = set()
        self.running: dict[str, float] = {}
        """When each that runs, and nobody asked to stop, was seen to."""
        self._uids: dict[str, str] = {}
        """Of those that run: new pods of LeaderWorkerSet have the names of old ones, and two watches tell of both."""
        self._api = api
        self._path = f"api/v1/namespaces/{quote(namespace)}/pods"
        self._selector = selector
        self._news = threading.Condition()
        self._ears = (Ear(), Ear())
        self._failed: Exception | None = None

    def __enter__(self) -> Pods:
        self._threads = []
        running = {"fieldSelector": "status.phase=Running"}
        for query, take, ear in zip(({}, running), (self._exists, self._runs), self._ears, strict=True):
            started = threading.Event()
            thread = threading.Thread(target=self._follow, args=(query, take, started, ear), daemon=True)
            thread.start()
            self._threads.append(thread)
            if not started.wait(_TIMEOUT):
                raise BenchmarkFailed(f"the watch of {self._path} did not begin: {self._failed}")
        return self

    def __exit__(self, *_: object) -> None:
        for ear in self._ears:
            ear.close()
        for thread in self._threads:
            thread.join(_TIMEOUT)

    def _follow(
        self, query: dict[str, str], take: Callable[[str, Manifest, float], None], started: threading.Event, ear: Ear
    ) -> None:
        try:
            for event in self._api.watch(self._path, {"labelSelector": self._selector, **query}, ear):
                now = time.monotonic()
                if event["type"] == "BOOKMARK":
                    started.set()
                    continue
                with self._news:
                    take(event["type"], event["object"]["metadata"], now)
                    self._news.notify_all()
        except Exception as error:
            with self._news:
                self._failed = None if ear.closed else error
                self._news.notify_all()

    def _exists(self, kind: str, metadata: Manifest, now: float) -> None:
        name = metadata["name"]
        if kind == "DELETED":
            self.there.discard(name)
        elif name not in self.there:
            self.there.add(name)
            self.made[name] = now
            self.labels[name] = metadata.get("labels") or {}
            self.leaving.pop(name, None)
        if kind == "DELETED" or metadata.get("deletionTimestamp"):
            self.leaving.setdefault(name, now)
            self._runs_no_more(metadata)

    def _runs(self, kind: str, metadata: Manifest, now: float) -> None:
        if kind == "DELETED" or metadata.get("deletionTimestamp"):
            self._runs_no_more(metadata)
        elif self._uids.get(metadata["name"]) != metadata["uid"]:
            self._uids[metadata["name"]] = metadata["uid"]
            self.running[metadata["name"]] = now

    def _runs_no_more(self, metadata: Manifest) -> None:
        if self._uids.get(metadata["name"]) == metadata["uid"]:
            self.running.pop(metadata["name"], None)

    def having(self, labels: Mapping[str, str]) -> set[str]:
        """Return the names of those that are there and have these labels."""
        with self._news:
            return {name for name in self.there if labels.items() <= self.labels[name].items()}

    def left_since(self, moment: float) -> set[str]:
        """Return the names of those that were seen to go since then."""
        with self._news:
            return {name for name, at in self.leaving.items() if at >= moment}

    def evicted(self, mates: set[str], deadline: float) -> float:
        """Wait until the first of these pods is to go, or gone; returns when that was seen."""
        self.until(lambda: not mates.isdisjoint(self.leaving), "the group is evicted", deadline)
        return min(self.leaving[name] for name in mates & self.leaving.keys())

    def replaced(self, group: set[str], count: int, deadline: float) -> float:
        """Wait until none of these pods is there, and so many run in all; returns when."""
        return self.until(
            lambda: len(self.running) >= count and group.isdisjoint(self.there), "the group is back", deadline
        )

    def until(self, holds: Callable[[], bool], what: str, deadline: float) -> float:
        """Wait until something holds, asked after every event; returns when. Raises BenchmarkFailed."""
        end = time.monotonic() + deadline
        with self._news:
            while not holds():
                if self._failed is not None:
                    raise BenchmarkFailed(f"nothing is seen of the pods any more: {self._failed}")
                left = end - time.monotonic()
                if left <= 0:
                    raise BenchmarkFailed(
                        f"{what}: not so after {deadline:g} s; {len(self.there)} pods, {len(self.running)} run"
                    )
                self._news.wait(min(left, 1.0))
            return time.monotonic()
