"""The liveness probe, and the metrics, of an operator whose API server goes silent on connections that stay open.

The server here is a small one, with real sockets: it answers lists and other questions, and sends bookmarks on its
watches, faster than Kubernetes does. It can be told to send nothing on them, to end them, or to answer nothing at all.
The operator is the real one with kopf in it, in this process, so that it can be less patient than it is by itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.ports import free_port
from tests.serving import kubeconfig_for, serving

from fthsdp.errors import ConfigError
from fthsdp_operator.api import API_VERSION, GROUP, KIND, PLURAL, VERSION
from fthsdp_operator.informers.cache import Mirror
from fthsdp_operator.kube.requests import Access
from fthsdp_operator.process import handlers
from fthsdp_operator.process.liveness import Limits

pytestmark = pytest.mark.local

BOOKMARK = 0.1
"""Seconds between two bookmarks."""
LIMIT = 3.0
"""Seconds for which the operator bears a silent watch."""
DEADLINE = 60.0
RESOURCES = {
    f"/apis/{API_VERSION}": [{"name": PLURAL, "singularName": "fthsdpjob", "kind": KIND, "namespaced": True}],
    "/api/v1": [
        {"name": "pods", "singularName": "pod", "kind": "Pod", "namespaced": True},
        {"name": "namespaces", "singularName": "namespace", "kind": "Namespace", "namespaced": False},
    ],
}
VERBS = ["get", "list", "watch"]
JOBS = f"/apis/{API_VERSION}/{PLURAL}"
JOB = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "llama", "namespace": "team", "uid": "1", "generation": 1, "resourceVersion": "1"},
}


class Server:
    """An API server that lists what it is given, and never answers who asks for one of these jobs."""

    def __init__(self, *jobs: dict[str, object]) -> None:
        self.jobs = jobs
        self.silent: set[str] = set()
        """Paths of the watches on which nothing is sent."""
        self.ends = False
        """A watch is ended a moment after it was opened, and nothing is sent on it."""
        self.deaf = False
        """No question is answered, though every connection is accepted."""
        self.forbidden: set[str] = set()
        """Paths of collections to which the operator has no right."""
        self.refusal = 403
        """The status with which it is told so."""
        self.watched: set[str] = set()
        self.open: dict[str, asyncio.Transport] = {}
        """Connections of watches that were opened, by path."""

    def cut(self) -> None:
        """Break all watches."""
        for transport in self.open.values():
            transport.abort()
        self.open.clear()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.deaf or request.path.endswith(f"/{PLURAL}/llama"):
            await asyncio.Event().wait()
        if request.path in self.forbidden:
            self.watched.add(request.path)
            return web.json_response({"kind": "Status", "code": self.refusal}, status=self.refusal)
        if request.query.get("watch"):
            assert request.query["timeoutSeconds"].isdecimal()  # an API server refuses all else
            return await self._watch(request)
        if request.path in RESOURCES:
            resources = [it | {"verbs": VERBS} for it in RESOURCES[request.path]]
            return web.json_response({"kind": "APIResourceList", "resources": resources})
        if request.path == "/apis":
            version = {"groupVersion": API_VERSION, "version": VERSION}
            group = {"name": GROUP, "versions": [version], "preferredVersion": version}
            return web.json_response({"kind": "APIGroupList", "groups": [group]})
        if request.path == "/api":
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        items = self.jobs if request.path == JOBS else ()
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watched.add(request.path)
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        self.open[request.path] = request.transport
        if self.ends:
            await asyncio.sleep(LIMIT / 2)
            return response
        bookmark = {"type": "BOOKMARK", "object": {"kind": "x", "metadata": {"resourceVersion": "1"}}}
        while True:
            if request.path not in self.silent and not self.deaf:
                await response.write(json.dumps(bookmark).encode() + b"\n")
            await asyncio.sleep(BOOKMARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A running operator, from outside."""

    health: str
    metrics: str
    session: aiohttp.ClientSession

    async def healthy(self) -> bool:
        """Ask the probe. A good answer is given again for ten seconds, so ask when there is something to hear."""
        async with self.session.get(self.health) as response:
            return response.status == 200

    async def watch_age(self) -> float:
        return (await self.samples())["fthsdp_watch_age_seconds"]

    async def samples(self) -> dict[str, float]:
        """What Prometheus would scrape, by series."""
        async with self.session.get(self.metrics) as response:
            lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + DEADLINE
    while not await holds():
        assert time.monotonic() < end
        await asyncio.sleep(BOOKMARK)


@asynccontextmanager
async def operating(server: Server, folder: Path) -> AsyncIterator[Operator]:
    """Run an operator of this server, and wait until it watches everything."""
    health = free_port()
    metrics = free_port()
    async with serving(server.answer) as address, aiohttp.ClientSession() as session:
        running = asyncio.create_task(
            handlers.run(
                access=Access(kubeconfig=kubeconfig_for(address, folder)),
                namespaces=[],
                coordinator_image="x",
                health_port=health,
                metrics_port=metrics,
                limits=Limits(watch=LIMIT, work=LIMIT),
            )
        )
        operator = Operator(
            health=f"http://127.0.0.1:{health}/healthz", metrics=f"http://127.0.0.1:{metrics}/metrics", session=session
        )

        async def up() -> bool:
            if running.done():
                await running
            return len(server.watched) == 3

        try:
            await until(up)
            yield operator
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("path", [JOBS, "/api/v1/pods", "/api/v1/nodes"])
def test_the_probe_fails_when_a_watch_goes_silent_while_the_server_answers(tmp_path: Path, path: str) -> None:
    async def story() -> None:
        server = Server()
        async with operating(server, tmp_path) as operator:
            server.silent.add(path)

            async def silent() -> bool:
                return await operator.watch_age() > LIMIT

            await until(silent)
            assert not await operator.healthy()

    asyncio.run(story())


def test_the_probe_fails_when_no_reconcile_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with operating(Server(JOB), tmp_path) as operator:

            async def stuck() -> bool:
                return not await operator.healthy()

            await asyncio.sleep(LIMIT)
            await until(stuck)
            assert await operator.watch_age() < LIMIT

    asyncio.run(story())


@pytest.mark.parametrize("ends", [False, True], ids=["bookmarks", "watches that are ended in time"])
def test_an_operator_to_which_nothing_happens_is_kept_alive_by(tmp_path: Path, ends: bool) -> None:
    async def story() -> None:
        server = Server()
        server.ends = ends
        async with operating(server, tmp_path) as operator:
            for _ in range(int(2 * LIMIT)):
                await asyncio.sleep(1)
                assert await operator.watch_age() < LIMIT
            assert await operator.healthy()

    asyncio.run(story())


def test_it_stays_alive_while_the_server_answers_nobody(tmp_path: Path) -> None:
    """A new process would hear as little, and kubelets let a process that fails again and again wait for minutes."""

    async def story() -> None:
        server = Server()
        async with operating(server, tmp_path) as operator:
            server.deaf = True

            async def silent() -> bool:
                return await operator.watch_age() > 2 * LIMIT

            await until(silent)
            assert await operator.healthy()

    asyncio.run(story())


def test_requests_of_both_clients_are_counted_as_kubernetes_calls_them(tmp_path: Path) -> None:
    async def story() -> None:
        async with operating(Server(), tmp_path) as operator:
            counted = await operator.samples()
            assert counted["fthsdp_leader"] == 1
            assert counted['fthsdp_api_requests_total{code="200",verb="list"}'] == 3
            assert counted['fthsdp_api_requests_total{code="200",verb="watch"}'] == 3
            assert counted['fthsdp_api_requests_total{code="200",verb="get"}'] >= 1

    asyncio.run(story())


def test_an_operator_that_may_not_see_nodes_works_without_them(tmp_path: Path) -> None:
    async def story() -> None:
        server = Server()
        server.forbidden.add("/api/v1/nodes")
        async with operating(server, tmp_path) as operator:
            await asyncio.sleep(LIMIT / 2)
            assert await operator.healthy()
            samples = await operator.samples()
            assert 1 < samples['fthsdp_api_requests_total{code="403",verb="list"}'] < 10
            assert samples['fthsdp_watch_forbidden{resource="nodes",watched_namespace=""}'] == 1
            assert samples['fthsdp_watch_forbidden{resource="pods",watched_namespace=""}'] == 0

    asyncio.run(story())


@pytest.mark.parametrize("status", [403, 503])
def test_an_operator_whose_jobs_are_not_shown_for_long_lives_and_watches_them_when_they_are(
    tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        server = Server()
        async with operating(server, tmp_path) as operator:
            server.refusal = status
            server.forbidden.add(JOBS)
            server.cut()

            async def refused() -> bool:
                assert await operator.healthy()
                name = f'fthsdp_api_requests_total{{code="{status}",verb="watch"}}'
                return (await operator.samples()).get(name, 0) > 100

            await until(refused)
            series = f'fthsdp_watch_forbidden{{resource="{PLURAL}",watched_namespace=""}}'
            assert (await operator.samples())[series] == (status == 403)
            assert await operator.watch_age() < LIMIT
            server.forbidden.clear()

            async def shown() -> bool:
                return (await operator.samples())[series] == 0 and JOBS in server.open

            await until(shown)

    monkeypatch.setattr(handlers, "RETRY_LONGEST", 0.01)
    asyncio.run(story())


def test_an_operator_whose_watch_dies_of_a_mistake_of_ours_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: object) -> None:
        raise ZeroDivisionError

    async def story() -> None:
        async with serving(Server().answer) as address:
            access = Access(kubeconfig=kubeconfig_for(address, tmp_path))
            with pytest.raises(RuntimeError, match="pods and nodes are not followed any more") as raised:
                await handlers.run(access=access, namespaces=[], coordinator_image="x")
            assert isinstance(raised.value.__cause__, ExceptionGroup)

    monkeypatch.setattr(Mirror, "replace", mistaken)
    asyncio.run(story())


def test_a_metrics_port_that_is_taken_is_refused_by_its_option(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(Server().answer) as address:
            port = int(address.rpartition(":")[2])
            access = Access(kubeconfig=kubeconfig_for(address, tmp_path))
            with pytest.raises(ConfigError, match=f"--metrics-port {port}: .*address already in use"):
                await handlers.run(access=access, namespaces=[], coordinator_image="x", metrics_port=port)

    asyncio.run(story())
