"""Whatever becomes of any one call to a real API server, the end is the same and nothing is restarted twice.

A proxy stands between the operator and the server. In each story each call that changes something goes wrong once. The
same is done with every call, and with more stories, in ``tests/unit/operator/test_survival.py``, against a cluster in
memory; here it is the server that says what was done.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_crd import GOOD
from tests.serving import kubeconfig_for, serving

from fthsdp_operator.cluster import ClusterError
from fthsdp_operator.execute import reconcile
from fthsdp_operator.kube.apiserver import KubernetesCluster
from fthsdp_operator.kube.requests import Access

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
SPEC = {
    **GOOD["spec"],
    "podsPerReplica": 1,
    "ttlSecondsAfterFinished": 0,
    "retainFailedPods": 0,
    "failurePolicy": {"perReplica": {"limit": 1000}, "backoff": {"initialSeconds": 0, "maxSeconds": 0}},
}
NEVER = 10**9


class Fault(Enum):
    """What becomes of one call."""

    KILLED_BEFORE = "the operator is killed before it"
    KILLED_AFTER = "the operator is killed when it was made"
    RESET_BEFORE = "the connection is reset before it arrives"
    RESET_AFTER = "the connection is reset before the answer arrives"
    CONFLICT = 409
    BUSY = 429
    FAILED = 500


KILLED = (Fault.KILLED_BEFORE, Fault.KILLED_AFTER)
MADE = (Fault.KILLED_AFTER, Fault.RESET_AFTER)


class Server:
    """The API server, as users and kubelets talk to it."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._address = address

    async def forward(self, request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
        sent = self._session.request(
            request.method, f"{self._address}{request.raw_path}", data=await request.read(), headers=headers
        )
        async with sent as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Pass on what comes on a watch as it comes."""
        passed = web.StreamResponse()
        async with self._session.get(f"{self._address}{request.raw_path}") as answer:
            passed.set_status(answer.status)
            await passed.prepare(request)
            async for chunk in answer.content.iter_any():
                await passed.write(chunk)
        return passed

    async def call(self, method: str, path: str, body: Object | None = None, *, patch: bool = False) -> Object:
        headers = {"Content-Type": "application/merge-patch+json" if patch else "application/json"}
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, f"{self._address}/{path}", data=data, headers=headers) as answer:
            assert answer.status < 300 or (method == "GET" and answer.status == 404), await answer.text()
            return {} if answer.status == 404 else dict(await answer.json())


class Proxy:
    """Passes requests on to the server; one of those that change something goes wrong."""

    def __init__(self, server: Server) -> None:
        self.writes = 0
        self.struck = False
        self.dead = False
        """The operator that made the requests does not exist any more."""
        self._server = server
        self._fault = Fault.FAILED
        self._at = NEVER

    def arm(self, fault: Fault, at: int) -> None:
        self._fault, self._at = fault, self.writes + at
        self.struck = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.dead:
            return self._hang_up(request)
        if "watch" in request.query:
            return await self._server.stream(request)
        if request.method == "GET":
            return await self._server.forward(request)
        self.writes += 1
        if self.struck or self.writes <= self._at:
            return await self._server.forward(request)
        self.struck = True
        self.dead = self._fault in KILLED
        if self._fault in MADE:
            await self._server.forward(request)
        if isinstance(self._fault.value, str):
            return self._hang_up(request)
        words = {"kind": "Status", "reason": "Conflict", "message": "a fault", "code": self._fault.value}
        return web.json_response(words, status=self._fault.value, headers={"Retry-After": "1"})

    @staticmethod
    def _hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


class Story:
    """A job, what happens to it, and operators that see to it."""

    def __init__(self, server: Server, proxy: Proxy, access: Access, namespace: str) -> None:
        self.server = server
        self.proxy = proxy
        self.name = "llama"
        self._access = access
        self._namespace = namespace

    # --- what happens ---

    async def submit(self, name: str) -> None:
        self.name = name
        job = {**GOOD, "metadata": {"name": name}, "spec": SPEC}
        await self.server.call("POST", self.path("fthsdpjobs"), job)

    async def change(self, **spec: Any) -> None:
        await self.server.call("PATCH", self.path("fthsdpjobs", self.name), {"spec": spec}, patch=True)

    async def says(self, pod: str, status: Mapping[str, Any]) -> None:
        path = f"{self.path('pods', pod)}/status"
        await self.server.call("PATCH", path, {"status": dict(status)}, patch=True)

    async def kubelets_start_everything(self) -> None:
        for name, pod in (await self.pods()).items():
            if pod["status"]["phase"] == "Pending" and "coordinator" not in name:
                await self.says(name, {"phase": "Running"})

    async def ends(self, pod: str, code: int) -> None:
        ended = {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}}
        container = {"name": "train", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": ended}
        phase = "Failed" if code else "Succeeded"
        await self.says(pod, {"phase": phase, "containerStatuses": [container]})

    async def newest(self, replica: int) -> str:
        """Return the pod of a replica."""
        names = [name for name in await self.pods() if f"-r{replica}-" in name]
        assert len(names) == 1, names
        return names[0]

    # --- what is there ---

    async def job(self) -> Object:
        return await self.server.call("GET", self.path("fthsdpjobs", self.name))

    async def pods(self) -> dict[str, Object]:
        selector = f"labelSelector=fthsdp.dev/job={self.name}"
        found = await self.server.call("GET", f"{self.path('pods')}?{selector}")
        return {it["metadata"]["name"]: it for it in found["items"]}

    async def uids(self) -> dict[str, str]:
        """UIDs of the training pods."""
        pods = await self.pods()
        return {name: it["metadata"]["uid"] for name, it in pods.items() if "coordinator" not in name}

    async def counts(self) -> list[tuple[int, int]]:
        """Attempt and restarts of each replica."""
        return [(it["attempt"], it["restarts"]) for it in (await self.job())["status"]["replicaStatuses"]]

    def path(self, plural: str, name: str = "") -> str:
        group = "apis/fthsdp.dev/v1alpha1" if plural == "fthsdpjobs" else "api/v1"
        return f"{group}/namespaces/{self._namespace}/{plural}{f'/{name}' if name else ''}"

    # --- the operator ---

    async def settle(self) -> None:
        """Reconcile until that changes nothing; when the operator is killed another one goes on."""
        for _ in range(3):
            if await self._operate():
                return
            self.proxy.dead = False
        raise AssertionError("it was killed more than once")

    async def _operate(self) -> bool:
        """Reconcile until that changes nothing, or until the operator is killed: False."""
        cluster = await KubernetesCluster.connect(self._access, coordinator_image="x")
        sight = cluster.sight([self._namespace])
        cluster.see(sight)
        following = asyncio.create_task(sight.follow())
        try:
            await sight.settled()
            for _ in range(20):
                before, wait = self.proxy.writes, 0.0
                with suppress(ClusterError):
                    wait = await reconcile(cluster, self._namespace, self.name, time.time())
                if self.proxy.dead:
                    return False
                if wait > 0 and self.proxy.writes == before:
                    return True
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await cluster.close()
        raise AssertionError("it never settles")


@asynccontextmanager
async def story_at(apiserver: ApiServer, namespace: str, folder: Path) -> AsyncIterator[Story]:
    """Give a story whose operators reach the server only through a proxy."""
    config = yaml.safe_load(apiserver.kubeconfig.read_text())
    address, token = config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]["token"]
    connector = aiohttp.TCPConnector(ssl=False)
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        server = Server(session, address)
        proxy = Proxy(server)
        async with serving(proxy.answer) as proxied:
            yield Story(server, proxy, Access(kubeconfig=kubeconfig_for(proxied, folder)), namespace)


async def each_call(story: Story, fault: Fault, scene: Callable[[], Awaitable[None]]) -> None:
    """Play a scene as often as there are calls in it, each time with another one of them going wrong."""
    for at in itertools.count():
        story.proxy.arm(fault, at)
        await scene()
        if not story.proxy.struck:
            assert at > 1
            return


async def begun(story: Story) -> None:
    await story.submit("llama")
    await story.settle()
    await story.kubelets_start_everything()
    await story.settle()


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_a_pod_that_fails_restarts_its_replica_once(
    apiserver: ApiServer, namespace: str, tmp_path: Path, fault: Fault
) -> None:
    async def play() -> None:
        async with story_at(apiserver, namespace, tmp_path) as story:
            await begun(story)

            async def fails() -> None:
                before, (attempt, restarts) = await story.uids(), (await story.counts())[2]
                await story.ends(await story.newest(2), 1)
                await story.settle()
                assert await story.counts() == [(0, 0), (0, 0), (attempt + 1, restarts + 1)]
                others = {name: uid for name, uid in before.items() if "-r2-" not in name}
                assert await story.newest(2) == f"llama-r2-a{attempt + 1}-0"
                assert others.items() <= (await story.uids()).items()
                await story.kubelets_start_everything()

            await each_call(story, fault, fails)

    asyncio.run(play())


def test_a_pod_that_is_deleted_restarts_its_replica_once(apiserver: ApiServer, namespace: str, tmp_path: Path) -> None:
    async def play() -> None:
        async with story_at(apiserver, namespace, tmp_path) as story:
            await begun(story)

            async def deleted() -> None:
                before, (attempt, restarts) = await story.uids(), (await story.counts())[0]
                await story.server.call("DELETE", story.path("pods", await story.newest(0)))
                await story.settle()
                assert await story.counts() == [(attempt + 1, restarts + 1), (0, 0), (0, 0)]
                others = {name: uid for name, uid in before.items() if "-r0-" not in name}
                assert await story.newest(0) == f"llama-r0-a{attempt + 1}-0"
                assert others.items() <= (await story.uids()).items()
                await story.kubelets_start_everything()

            await each_call(story, Fault.KILLED_AFTER, deleted)

    asyncio.run(play())


def test_suspending_and_resuming_costs_nobody_a_restart(apiserver: ApiServer, namespace: str, tmp_path: Path) -> None:
    async def play() -> None:
        async with story_at(apiserver, namespace, tmp_path) as story:
            await begun(story)

            async def pause() -> None:
                attempts = [attempt for attempt, _ in await story.counts()]
                await story.change(suspend=True)
                await story.settle()
                assert await story.pods() == {}
                assert (await story.job())["status"]["state"] == "Suspended"
                await story.change(suspend=False)
                await story.settle()
                assert await story.counts() == [(attempt + 1, 0) for attempt in attempts]
                assert len(await story.pods()) == 4
                await story.kubelets_start_everything()

            await each_call(story, Fault.KILLED_AFTER, pause)

    asyncio.run(play())


def test_scaling_up_and_down_touches_no_replica_that_stays(
    apiserver: ApiServer, namespace: str, tmp_path: Path
) -> None:
    async def play() -> None:
        async with story_at(apiserver, namespace, tmp_path) as story:
            await begun(story)
            before = await story.uids()

            async def scaled() -> None:
                await story.change(replicas=4)
                await story.settle()
                assert len(await story.uids()) == 4
                await story.kubelets_start_everything()
                await story.change(replicas=3)
                await story.settle()
                assert await story.uids() == before
                assert (await story.counts())[:3] == [(0, 0)] * 3

            await each_call(story, Fault.KILLED_AFTER, scaled)

    asyncio.run(play())


def test_a_job_is_started_and_ended_whatever_call_is_the_last(
    apiserver: ApiServer, namespace: str, tmp_path: Path
) -> None:
    async def play() -> None:
        async with story_at(apiserver, namespace, tmp_path) as story:
            numbers = itertools.count()

            async def lives() -> None:
                await story.submit(f"job-{next(numbers)}")
                await story.settle()
                assert await story.counts() == [(0, 0)] * 3
                assert len(await story.pods()) == 4
                await story.kubelets_start_everything()
                for replica in range(3):
                    await story.ends(await story.newest(replica), 0)
                await story.settle()
                assert await story.job() == {}

            await each_call(story, Fault.KILLED_AFTER, lives)

    asyncio.run(play())
