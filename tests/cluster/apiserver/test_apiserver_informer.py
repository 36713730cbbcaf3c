"""The cache of pods against a real API server, over connections that are cut, and with an etcd that has forgotten."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tests.cluster.apiserver.server import ApiServer, running, why_not_here

from fthsdp_operator.api import ATTEMPT_LABEL, JOB_LABEL, JOB_UID_LABEL, POD_INDEX_LABEL, REPLICA_LABEL, ROLE_LABEL
from fthsdp_operator.cluster import AlreadyExists
from fthsdp_operator.informers import informer
from fthsdp_operator.informers.cache import Restored
from fthsdp_operator.informers.sight import Sight
from fthsdp_operator.kube.apiserver import KubernetesCluster
from fthsdp_operator.kube.requests import Access
from fthsdp_operator.observed.observe import JobKey, PodView

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
DEADLINE = 60.0


def pod(namespace: str, index: int, **metadata: Any) -> Object:
    labels = {
        JOB_LABEL: "llama",
        JOB_UID_LABEL: "u",
        ROLE_LABEL: "trainer",
        REPLICA_LABEL: "0",
        ATTEMPT_LABEL: "0",
        POD_INDEX_LABEL: str(index),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"llama-{index}", "namespace": namespace, "labels": labels, **metadata},
        "spec": {"containers": [{"name": "main", "image": "x"}], "terminationGracePeriodSeconds": 30},
    }


class Wire:
    """A TCP proxy before the API server, which can be cut, closed and opened again."""

    def __init__(self, server: str) -> None:
        self.leads_to(server)
        self._open: set[asyncio.StreamWriter] = set()
        self.closed = False
        self.cut_after: int | None = None
        """Bytes from the server after which a connection is cut, in the middle of whatever that is."""

    def leads_to(self, server: str) -> None:
        """Take connections from now on to the server at this address."""
        host, _, port = server.rpartition("://")[2].rpartition(":")
        self._target = (host, int(port))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closed:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._target)
        self._open |= {writer, back}
        try:
            await asyncio.gather(self._pump(reader, back, None), self._pump(there, writer, self.cut_after))
        except OSError:
            return
        finally:
            for end in (writer, back):
                self._open.discard(end)
                end.transport.abort()

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None) -> None:
        while chunk := await reader.read(1000):
            writer.write(chunk if most is None else chunk[:most])
            await writer.drain()
            if most is not None and (most := most - len(chunk)) <= 0:
                raise ConnectionAbortedError
        raise ConnectionAbortedError


class Seeing:
    """A cluster, what is seen of it over a wire, and what was told of it."""

    def __init__(self, cluster: KubernetesCluster, sight: Sight, wire: Wire, namespace: str) -> None:
        self.cluster = cluster
        self.wire = wire
        self.sight = sight
        self.namespace = namespace
        self.gone: list[str] = []
        """UIDs."""
        self.following: asyncio.Task[Any] | None = None
        cluster.see(sight)
        sight.listen(self._hear)

    def _hear(self, job: JobKey, gone: PodView | None, can_wait: bool) -> None:
        if gone is not None:
            self.gone.append(gone.uid)

    async def begin(self) -> None:
        self.following = asyncio.create_task(self.sight.follow())
        await asyncio.wait_for(self.sight.settled(), DEADLINE)

    async def end(self) -> None:
        if self.following is not None:
            self.following.cancel()
            await asyncio.gather(self.following, return_exceptions=True)

    def shown(self) -> dict[str, str]:
        """UIDs of the pods, by name."""
        return {it.name: it.uid for it in self.sight.pods(self.namespace, "llama")}

    def view(self, name: str) -> PodView:
        return next(it for it in self.sight.pods(self.namespace, "llama") if it.name == name)

    async def create(self, index: int, **metadata: Any) -> str:
        """Create a pod; return its uid."""
        return str((await self.cluster.create(pod(self.namespace, index, **metadata)))["metadata"]["uid"])

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not holds():  # noqa: ASYNC110 - what it waits for comes over the network
                await asyncio.sleep(0.05)


@asynccontextmanager
async def seeing(server: ApiServer, namespace: str, folder: Path, *, token: str = "") -> AsyncIterator[Seeing]:
    """Calls go to the server itself; what is seen comes over the wire, to whoever has this token."""
    config = yaml.safe_load(server.kubeconfig.read_text())
    wire = Wire(address_of(server))
    async with wire.listening() as address:
        config["clusters"][0]["cluster"]["server"] = address
        config["users"][0]["user"]["token"] = token or config["users"][0]["user"]["token"]
        (folder / "wire").write_text(json.dumps(config))
        near, far = [
            await KubernetesCluster.connect(Access(kubeconfig=str(file)), coordinator_image="x")
            for file in (server.kubeconfig, folder / "wire")
        ]
        it = Seeing(near, far.sight([namespace]), wire, namespace)
        try:
            await it.begin()
            yield it
        finally:
            await it.end()
            await near.close()
            await far.close()


def address_of(server: ApiServer) -> str:
    return str(yaml.safe_load(server.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


def elsewhere(server: ApiServer, namespace: str, *arguments: str) -> None:
    """Somebody else does something."""
    server.kubectl("-n", namespace, *arguments)


def account_made(server: ApiServer, namespace: str) -> None:
    """The controller makes the account of a namespace a moment after it; without it no pod may be created."""
    server.kubectl("-n", namespace, "wait", "--for=create", "serviceaccount/default", "--timeout=30s")


def place(server: ApiServer, namespace: str, name: str) -> None:
    """A pod with a node is given time to stop."""
    target = {"apiVersion": "v1", "kind": "Node", "name": "node-7"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
    server.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))


def test_no_deletion_is_missed_over_connections_that_are_cut_anywhere(
    apiserver: ApiServer, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with seeing(apiserver, namespace, tmp_path) as it:
            deleted = []
            for number in range(24):
                uid = await it.create(number)
                if number % 3:
                    await it.cluster.delete("Pod", namespace, f"llama-{number}", uid=uid, grace_seconds=0)
                    deleted.append(uid)
                it.wire.cut_after = 4000 + 613 * number
                if number % 2:
                    it.wire.cut()
                await asyncio.sleep(0.1)
            it.wire.cut_after = None
            it.wire.cut()
            there = {name: x["metadata"]["uid"] for name, x in apiserver.items("pods", namespace).items()}
            await it.until(lambda: set(deleted) <= set(it.gone) and it.shown() == there)
            assert len(there) == 8
            assert caplog.text.count("broke, and goes on in") > 5

    account_made(apiserver, namespace)
    asyncio.run(play())


def test_what_others_do_is_seen_and_what_we_do_is_known_at_once(
    apiserver: ApiServer, namespace: str, tmp_path: Path
) -> None:
    async def play() -> None:
        async with seeing(apiserver, namespace, tmp_path) as it:
            uids = [await it.create(number) for number in range(2)]
            await asyncio.to_thread(place, apiserver, namespace, "llama-0")
            await it.until(lambda: it.view("llama-0").node == "node-7")
            it.wire.closed = True
            it.wire.cut()  # from here on nothing is told
            assert it.shown() == {"llama-0": uids[0], "llama-1": uids[1]}
            await it.cluster.delete("Pod", namespace, "llama-0", uid=uids[0], grace_seconds=None)
            assert it.view("llama-0").deleted is not None
            await it.cluster.delete("Pod", namespace, "llama-1", uid=uids[1], grace_seconds=None)
            assert set(it.shown()) == {"llama-0"}  # the other had no node, and was gone at once
            await it.cluster.delete("Pod", namespace, "llama-0", uid=uids[0], grace_seconds=0)
            assert it.shown() == {}
            again = await it.create(0)
            assert it.shown() == {"llama-0": again}
            await it.cluster.delete("Pod", namespace, "llama-0", uid=uids[0], grace_seconds=0)
            assert it.shown() == {"llama-0": again}
            held = await it.create(1, finalizers=["example.com/held"])
            await it.cluster.delete("Pod", namespace, "llama-1", uid=held, grace_seconds=0)
            assert it.view("llama-1").deleted is not None
            await asyncio.to_thread(
                elsewhere, apiserver, namespace, "patch", "pod", "llama-1", "-p", '{"metadata":{"finalizers":null}}'
            )
            await it.cluster.delete("Pod", namespace, "llama-1", uid=held, grace_seconds=0)
            assert it.shown() == {"llama-0": again}
            it.wire.closed = False
            await it.until(lambda: {*uids, held} <= set(it.gone) and it.sight.age() < 1)
            assert it.shown() == {"llama-0": again}

    account_made(apiserver, namespace)
    asyncio.run(play())


def test_a_pod_that_exists_is_known_once_it_was_read(apiserver: ApiServer, namespace: str, tmp_path: Path) -> None:
    async def play() -> None:
        async with seeing(apiserver, namespace, tmp_path) as it:
            it.wire.closed = True
            it.wire.cut()
            manifest = json.dumps(pod(namespace, 0))
            await asyncio.to_thread(lambda: apiserver.kubectl("create", "-f", "-", stdin=manifest))
            with pytest.raises(AlreadyExists):
                await it.create(0)
            assert it.shown() == {}
            found = await it.cluster.get("Pod", namespace, "llama-0")
            assert found is not None
            assert it.shown() == {"llama-0": found["metadata"]["uid"]}

    account_made(apiserver, namespace)
    asyncio.run(play())


def test_a_right_that_is_taken_away_for_a_moment_blinds_nobody_and_no_list_is_needed_after_it(
    apiserver: ApiServer, namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def grant() -> None:
        elsewhere(
            apiserver,
            namespace,
            "create",
            "rolebinding",
            "viewer",
            "--role=viewer",
            f"--serviceaccount={namespace}:viewer",
        )

    async def play() -> None:
        async with seeing(apiserver, namespace, tmp_path, token=token) as it:
            uid = await it.create(0)
            await it.until(lambda: it.shown() == {"llama-0": uid})
            await asyncio.to_thread(elsewhere, apiserver, namespace, "delete", "rolebinding", "viewer")
            async with asyncio.timeout(DEADLINE):
                while not it.sight.refusals()["pods", namespace]:
                    it.wire.cut()  # a watch that is open is not ended by it
                    await asyncio.sleep(0.5)
            assert it.shown() == {"llama-0": uid}
            await asyncio.to_thread(elsewhere, apiserver, namespace, "delete", "pod", "llama-0", "--force")
            await asyncio.to_thread(grant)
            await it.until(lambda: it.gone == [uid])
            assert it.sight.refusals() == {("pods", namespace): False, ("nodes", ""): True}

    account_made(apiserver, namespace)
    elsewhere(apiserver, namespace, "create", "serviceaccount", "viewer")
    elsewhere(apiserver, namespace, "create", "role", "viewer", "--verb=list,watch", "--resource=pods")
    grant()
    token = apiserver.kubectl("create", "token", "viewer", "-n", namespace).strip()
    caplog.set_level(logging.INFO)
    asyncio.run(play())
    assert f'User "system:serviceaccount:{namespace}:viewer" cannot list resource "pods"' in caplog.text
    assert "not known any more" not in caplog.text.replace("nodes are not known any more", "")
    assert "has a gap" not in caplog.text


def test_a_server_whose_data_is_older_than_what_was_heard_ends_it(apiserver: ApiServer, tmp_path: Path) -> None:
    """Another server, on which less has happened so far, takes the place of the first."""

    async def play(older: ApiServer) -> None:
        async with seeing(apiserver, "default", tmp_path) as it:
            note = {"apiVersion": "v1", "kind": "ConfigMap"}
            metadata = ({"namespace": "default", "name": f"note-{number}"} for number in range(1000))
            await asyncio.gather(*(it.cluster.create({**note, "metadata": each}) for each in metadata))
            uid = await it.create(0)
            await it.until(lambda: it.shown() == {"llama-0": uid})
            it.wire.leads_to(address_of(older))
            it.wire.cut()
            assert it.following is not None
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(it.following, DEADLINE)
            assert raised.group_contains(Restored)
            await it.cluster.delete("Pod", "default", "llama-0", uid=uid, grace_seconds=0)

    account_made(apiserver, "default")
    (tmp_path / "older").mkdir()
    with running(tmp_path / "older") as older:
        asyncio.run(play(older))
    elsewhere(apiserver, "default", "delete", "--raw", "/api/v1/namespaces/default/configmaps")


def test_a_deletion_that_etcd_has_forgotten_is_closed_by_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An API server without a cache of its own: it sends no bookmarks, and 410 as soon as etcd was compacted."""
    if reason := why_not_here():
        pytest.skip(reason)
    monkeypatch.setattr(informer, "WATCH_TIME", 5)

    async def compact(server: ApiServer, version: str) -> None:
        async with aiohttp.ClientSession() as session:
            body = json.dumps({"revision": version, "physical": True})
            async with session.post(f"{server.etcd}/v3/kv/compaction", data=body) as answer:
                assert answer.status == 200, await answer.text()

    async def play(server: ApiServer) -> None:
        async with seeing(server, "default", tmp_path) as it:
            uid = await it.create(0)
            await it.until(lambda: it.sight.age() < 1 and "llama-0" in it.shown())
            it.wire.closed = True
            it.wire.cut()
            await asyncio.to_thread(elsewhere, server, "default", "delete", "pod", "llama-0", "--force")
            last = (await it.cluster.create(pod("default", 1)))["metadata"]["resourceVersion"]
            await compact(server, last)
            assert it.gone == []
            it.wire.closed = False
            await it.until(lambda: it.gone == [uid])
            assert "the watch of pods of default has a gap" in caplog.text
            assert list(it.shown()) == ["llama-1"]
            second = it.shown()["llama-1"]
            await asyncio.to_thread(elsewhere, server, "default", "delete", "pod", "llama-1", "--force")
            await it.until(lambda: it.gone == [uid, second])

    caplog.set_level(logging.INFO)
    with running(tmp_path, "--watch-cache=false") as server:
        account_made(server, "default")
        asyncio.run(play(server))
