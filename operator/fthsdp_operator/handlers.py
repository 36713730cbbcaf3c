"""The operator as a process: kopf watches, a queue remembers, workers reconcile. The only module that imports kopf.

Watch events carry no truth here. They say which job to look at, and a worker then asks the API server. kopf's other
kinds of handlers would put finalizers and annotations on objects; ``on.event`` leaves nothing. What is taken from an
event beyond that is the last sight of a pod that is gone: nobody can ask for it any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import kopf

from fthsdp_operator.api import GROUP, JOB_LABEL, PLURAL, VERSION
from fthsdp_operator.apiserver import Access, KubernetesCluster
from fthsdp_operator.cluster import Cluster, ClusterError
from fthsdp_operator.execute import reconcile
from fthsdp_operator.health import answering
from fthsdp_operator.lease import Leadership, Place, identity
from fthsdp_operator.queue import WorkQueue

__all__ = ["Reconciler", "run"]

log = logging.getLogger(__name__)

WORKERS = 8
"""Jobs reconciled at a time. A reconcile mostly waits for answers."""
LEAST_WAIT = 0.05
"""Seconds between two looks at a job that wants to be looked at again at once."""

Key = tuple[str, str]
"""Namespace and name of a job."""


class Reconciler:
    """What watch events are turned into: a queue of jobs, and the workers that reconcile them."""

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._clock = clock
        self._queue: WorkQueue[Key] = WorkQueue()
        self._generations: dict[str, int | None] = {}
        self._last_words: dict[Key, dict[str, Mapping[str, Any]]] = {}

    def job_event(self, job: Mapping[str, Any], *, kind: str | None) -> None:
        """Note a change of a job; what only changed its status was written by us."""
        metadata = job["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation")
        if kind == "DELETED":
            self._generations.pop(uid, None)
        elif kind == "MODIFIED" and self._generations.get(uid) == generation:
            return
        else:
            self._generations[uid] = generation
        self._queue.add((metadata["namespace"], metadata["name"]))

    def pod_event(self, pod: Mapping[str, Any], *, kind: str | None) -> None:
        """Note a change of a pod, and keep the last sight of one that is gone."""
        metadata = pod["metadata"]
        name = (metadata.get("labels") or {}).get(JOB_LABEL)
        if not name:
            return
        key = (metadata["namespace"], name)
        if kind == "DELETED":
            self._last_words.setdefault(key, {})[metadata["uid"]] = pod
        self._queue.add(key)

    async def work(self) -> None:
        """Reconcile one job after another until cancelled."""
        while True:
            key = await self._queue.get()
            try:
                wait = await self._reconcile(key)
            except ClusterError as error:
                wait = self._queue.failed(key, at_least=error.retry_after)
                log.warning("%s/%s: %s; again in %.1f s", *key, error, wait)
            except Exception:
                log.exception("%s/%s: reconcile failed; again in %.1f s", *key, self._queue.failed(key))
            else:
                self._queue.done(key)
                if math.isfinite(wait):
                    self._queue.add(key, delay=max(wait, LEAST_WAIT))

    async def _reconcile(self, key: Key) -> float:
        heard = self._last_words.pop(key, {})
        wait = 0.0
        try:
            wait = await reconcile(self._cluster, *key, self._clock(), last_words=heard.values())
        finally:
            if wait == 0.0:  # it was not finished, and needs them again
                self._last_words[key] = heard | self._last_words.get(key, {})
        return wait


async def run(
    *,
    access: Access,
    namespaces: Sequence[str],
    coordinator_image: str,
    health_port: int | None = None,
    lease: Place | None = None,
) -> None:
    """Run the operator until a signal comes; no namespaces: all of them. Raises ConfigError before it has begun.

    With a lease it acts only while it holds that, and the process ends when it is lost.
    """
    async with _connected(access, coordinator_image) as cluster:
        if lease is None:
            await _operate(cluster, access, namespaces, health_port)
            return
        # Over connections of its own, so that a renewal never waits behind a thousand pods that are created.
        async with _connected(access, coordinator_image) as leases:
            leadership = Leadership(leases, lease, me=identity())
            try:
                if await _stand_by(leadership, health_port):
                    cluster.only_while(leadership.time_left)
                    await _lead(leadership, _operate(cluster, access, namespaces, health_port))
            finally:
                await leadership.resign()


@asynccontextmanager
async def _connected(access: Access, coordinator_image: str) -> AsyncIterator[KubernetesCluster]:
    cluster = await KubernetesCluster.connect(access, coordinator_image=coordinator_image)
    try:
        yield cluster
    finally:
        await cluster.close()


async def _stand_by(leadership: Leadership, health_port: int | None) -> bool:
    """Wait for the lease; False when a signal came first. kopf takes the signals over as soon as it runs."""
    waiting = asyncio.create_task(leadership.acquire())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, waiting.cancel)
    async with answering(health_port):
        try:
            await waiting
        except asyncio.CancelledError:
            return False
        return True


async def _lead(leadership: Leadership, work: Coroutine[Any, Any, None]) -> None:
    keeper = asyncio.create_task(leadership.keep())
    try:
        await work
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def _operate(
    cluster: KubernetesCluster, access: Access, namespaces: Sequence[str], health_port: int | None
) -> None:
    """Watch and reconcile until a signal comes; nothing of it acts any more when this returns."""
    await cluster.check()
    reconciler = Reconciler(cluster)
    workers = [asyncio.create_task(reconciler.work()) for _ in range(WORKERS)]
    try:
        await kopf.operator(
            registry=_registry(reconciler, access),
            settings=_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            liveness_endpoint=None if health_port is None else f"http://0.0.0.0:{health_port}/healthz",
        )
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _registry(reconciler: Reconciler, access: Access) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await _credentials(access)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job(event: kopf.RawEvent, **_: Any) -> None:
        reconciler.job_event(event["object"], kind=event["type"])

    @kopf.on.event("v1", "pods", registry=registry)
    async def pod(event: kopf.RawEvent, **_: Any) -> None:
        reconciler.pod_event(event["object"], kind=event["type"])

    return registry


async def _credentials(access: Access) -> kopf.ConnectionInfo:
    """Let kopf connect as the client does, exec plugins and rotated tokens included."""
    settings = await access.load()
    scheme, _, token = (await settings.get_api_key_with_prefix("BearerToken") or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=settings.host,
        ca_path=settings.ssl_ca_cert,
        insecure=not settings.verify_ssl,
        username=settings.username or None,
        password=settings.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=settings.cert_file,
        private_key_path=settings.key_file,
        proxy_url=settings.proxy,
    )


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # The server sends no other pods: without this, every pod of the cluster would pass through here.
    settings.watching.label_selectors["v1", "pods"] = JOB_LABEL
    settings.scanning.disabled = True  # what is watched is known; watching definitions and namespaces would take rights
    settings.posting.enabled = False  # events are recorded by the executor, after the status was written
    return settings
