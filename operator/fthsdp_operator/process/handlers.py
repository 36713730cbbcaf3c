"""The operator as a process: watches wake, a queue remembers, workers reconcile. The only module that imports kopf.

kopf watches jobs, and what it says of one only wakes: if it speaks of another version than the one that is known, a
worker then asks the API server. kopf's other kinds of handlers would put finalizers and annotations on objects;
``on.event`` leaves nothing. Pods and nodes are followed by ``sight``, since after a gap kopf tells what is there, and
nothing of what was deleted meanwhile: a pod that nobody reports as deleted is a replica that nobody restarts.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
import kopf
from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from fthsdp.errors import ConfigError
from fthsdp_operator.api import API_VERSION, GROUP, PLURAL, VERSION
from fthsdp_operator.cluster import Cluster, ClusterError, Refused
from fthsdp_operator.execute import Memory, reconcile
from fthsdp_operator.informers.informer import SILENCE, WATCH_TIME
from fthsdp_operator.informers.sight import EVERYWHERE, Sight
from fthsdp_operator.kube.apiserver import KubernetesCluster
from fthsdp_operator.kube.lease import Leadership, Place, identity
from fthsdp_operator.kube.requests import Access, trusting
from fthsdp_operator.kube.traces import trace
from fthsdp_operator.observed.observe import JobKey, PodView
from fthsdp_operator.process import logs
from fthsdp_operator.process.liveness import Limits, Watches
from fthsdp_operator.process.metrics import Metrics
from fthsdp_operator.process.queue import WorkQueue
from fthsdp_operator.process.serving import Unwell, answer, serving, well

__all__ = ["Reconciler", "run"]

log = logging.getLogger(__name__)

WORKERS = 8
"""Jobs reconciled at a time. A reconcile mostly waits for answers."""
FIRST_SIGHT = 30.0
"""Seconds that workers wait for the first list of all pods; then they look at jobs whose pods are known."""
TOGETHER = 0.25
"""Seconds for which changes that nobody hurries for are gathered: of a group of a thousand pods that start, each tells
several times, and one look is enough for all that came meanwhile."""
TWICE_IN = 0.2
"""Seconds within which a job is looked at twice at most: what happens to it is looked at at once, and of a thousand
pods that go, which each tell of it, not each by itself."""
RETRY_FIRST = 0.5
RETRY_LONGEST = 15.0
"""Seconds until jobs are listed or watched again after that failed or was refused; doubled each time."""
LEAST_WAIT = 0.05
"""Seconds between two looks at a job that wants to be looked at again at once."""


class Reconciler:
    """What watch events are turned into: a queue of jobs, and the workers that reconcile them."""

    def __init__(
        self, cluster: Cluster, *, clock: Callable[[], float] = time.time, metrics: Metrics | None = None
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics or Metrics()
        self.queue: WorkQueue[JobKey] = WorkQueue(twice_in=TWICE_IN, waited=self._metrics.queue_wait.observe)
        """Jobs that are to be looked at."""
        self._generations: dict[str, int | None] = {}
        self._last_words: dict[JobKey, dict[str, PodView]] = {}
        self._memory = Memory()
        self._trouble: dict[JobKey, str] = {}
        """What the API server refused of a job, at the last attempt."""

    def job_event(self, job: Mapping[str, Any], *, kind: str | None) -> None:
        """Note a change of a job; what only changed its status was written by us."""
        self._memory.told(job)
        metadata = job["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation")
        if kind == "DELETED":
            self._generations.pop(uid, None)
        elif kind == "MODIFIED" and self._generations.get(uid) == generation:
            return
        else:
            self._generations[uid] = generation
        self.queue.add((metadata["namespace"], metadata["name"]))

    def pods_event(self, key: JobKey, gone: PodView | None, can_wait: bool) -> None:
        """Note a change of what a job's pods are, or are on, and keep the last sight of a pod that is gone."""
        if gone is not None:
            self._last_words.setdefault(key, {})[gone.uid] = gone
        self.queue.add(key, delay=TOGETHER if can_wait else 0.0)

    async def work(self) -> None:
        """Reconcile one job after another until cancelled."""
        while True:
            key = await self.queue.get()
            with logs.about(namespace=key[0], job=key[1]):
                await self._work_on(key)

    async def _work_on(self, key: JobKey) -> None:
        try:
            with self._metrics.reconcile_seconds.time():
                wait = await self._reconcile(key)
        except ClusterError as error:
            self._metrics.reconcile_errors.inc()
            if isinstance(error, Refused):
                self._trouble[key] = str(error)
            wait = self.queue.failed(key, at_least=error.retry_after)
            log.warning("%s/%s: %s; again in %.1f s", *key, error, wait)
        except Exception:
            self._metrics.reconcile_errors.inc()
            log.exception("%s/%s: reconcile failed; again in %.1f s", *key, self.queue.failed(key))
        else:
            self.queue.done(key)
            if self._trouble.pop(key, ""):
                wait = min(wait, LEAST_WAIT)  # the job still says that it is stalled
            if math.isfinite(wait):
                self.queue.add(key, delay=max(wait, LEAST_WAIT))

    async def _reconcile(self, key: JobKey) -> float:
        words = self._last_words.setdefault(key, {})
        heard = dict(words)
        wait = await reconcile(
            self._cluster,
            *key,
            self._clock(),
            last_words=words.values(),
            witness=self._metrics,
            memory=self._memory,
            trouble=self._trouble.get(key, ""),
        )
        if wait > 0.0:  # else it was not finished, and needs them again
            for uid, pod in heard.items():
                if words[uid] is pod:
                    del words[uid]
        if not words:
            del self._last_words[key]
        return wait


async def run(
    *,
    access: Access,
    namespaces: Sequence[str],
    coordinator_image: str,
    health_port: int | None = None,
    metrics_port: int | None = None,
    lease: Place | None = None,
    limits: Limits | None = None,
) -> None:
    """Run the operator until a signal comes; no namespaces: all of them. Raises ConfigError before it has begun.

    With a lease it acts only while it holds that, and the process ends when it is lost.
    """
    metrics = Metrics()
    connected = partial(_connected, access, coordinator_image, trace(metrics.request))
    # Each over connections of its own: calls are limited to a hundred at a time, of which watches would hold some, and
    # a renewal never waits behind a thousand pods that are created.
    async with connected() as cluster, connected(most=0) as watching, _telling(metrics, metrics_port):
        sight = watching.sight(namespaces)
        cluster.see(sight)
        operate = partial(_operate, cluster, sight, access, namespaces, health_port, metrics, limits or Limits())
        if lease is None:
            await operate()
            return
        async with connected() as leases:
            leadership = Leadership(leases, lease, me=identity())
            try:
                if await _stand_by(leadership, health_port):
                    cluster.only_while(leadership.time_left)
                    await _lead(leadership, operate())
            finally:
                await leadership.resign()


@asynccontextmanager
async def _connected(
    access: Access, coordinator_image: str, counting: aiohttp.TraceConfig, *, most: int | None = None
) -> AsyncIterator[KubernetesCluster]:
    cluster = await KubernetesCluster.connect(access, coordinator_image=coordinator_image, traces=[counting], most=most)
    try:
        yield cluster
    finally:
        await cluster.close()


@asynccontextmanager
async def _telling(metrics: Metrics, port: int | None) -> AsyncIterator[None]:
    """Answer Prometheus, also while standing by; do nothing without a port. Raises ConfigError when it is taken."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serving(port, "/metrics", make_aiohttp_handler(metrics.registry)))
        except OSError as error:
            raise ConfigError(f"--metrics-port {port}: {error.strerror or error}") from error
        yield


async def _stand_by(leadership: Leadership, health_port: int | None) -> bool:
    """Wait for the lease; False when a signal came first. kopf takes the signals over as soon as it runs."""
    waiting = asyncio.create_task(leadership.acquire())
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, waiting.cancel)
    try:
        async with serving(health_port, "/healthz", well):
            await waiting
    except asyncio.CancelledError:
        return False
    finally:
        for number in signals:
            loop.remove_signal_handler(number)  # until kopf runs they end the process, and are not lost
    return True


async def _lead(leadership: Leadership, work: Coroutine[Any, Any, None]) -> None:
    keeper = asyncio.create_task(leadership.keep())
    try:
        await work
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def _operate(
    cluster: KubernetesCluster,
    sight: Sight,
    access: Access,
    namespaces: Sequence[str],
    health_port: int | None,
    metrics: Metrics,
    limits: Limits,
) -> None:
    """Watch and reconcile until a signal comes; nothing of it acts any more when this returns."""
    await cluster.check()
    reconciler = Reconciler(cluster, metrics=metrics)
    sight.listen(reconciler.pods_event)
    watches = Watches(map(_jobs_of, namespaces or [EVERYWHERE]), clock=time.monotonic)
    metrics.lead(
        queue_depth=lambda: reconciler.queue.depth,
        watch_age=lambda: max(watches.age(), sight.age()),
        forbidden=partial(_forbidden, sight, watches, namespaces),
    )

    async def probed(_: web.Request) -> web.Response:
        silent = max(watches.age(), sight.age())
        return await answer(_alive(cluster, reconciler.queue, silent, limits))

    workers = [asyncio.create_task(_work(reconciler, sight)) for _ in range(WORKERS)]
    operator = kopf.operator(
        registry=_registry(reconciler, access, partial(_stop, workers), trace(metrics.request, watches)),
        settings=_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )
    try:
        async with serving(health_port, "/healthz", probed):
            await _while_followed(sight, operator)
    finally:
        await _stop(workers)


async def _work(reconciler: Reconciler, sight: Sight) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(sight.settled(), FIRST_SIGHT)
    await reconciler.work()


async def _while_followed(sight: Sight, work: Coroutine[Any, Any, None]) -> None:
    """Do the work while pods and nodes are followed; raises RuntimeError if they are not any more."""
    following, working = asyncio.create_task(sight.follow()), asyncio.create_task(work)
    try:
        await asyncio.wait((following, working), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            raise RuntimeError("pods and nodes are not followed any more, so the operator ends") from (
                following.exception()
            )
    finally:
        following.cancel()
        working.cancel()
        await asyncio.gather(following, working, return_exceptions=True)
    working.result()


async def _alive(cluster: KubernetesCluster, queue: WorkQueue[JobKey], silent: float, limits: Limits) -> None:
    """Raise Unwell when nothing is heard though the API server answers, or nothing gets done though there is work.

    ``silent``: seconds for which the watch that is silent longest has been so.
    """
    stuck = queue.stuck()
    if stuck > limits.work:
        raise Unwell(f"no reconcile has ended for {stuck:.0f} s, and there is something to do")
    if silent > limits.watch and await cluster.answers():
        raise Unwell(f"a watch has been silent for {silent:.0f} s, and the API server answers")


async def _stop(workers: Sequence[asyncio.Task[None]]) -> None:
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


def _jobs_of(namespace: str) -> str:
    """Return the path of a collection that kopf watches."""
    return f"/apis/{API_VERSION}{f'/namespaces/{namespace}' if namespace else ''}/{PLURAL}"


def _forbidden(sight: Sight, watches: Watches, namespaces: Sequence[str]) -> Mapping[tuple[str, str], bool]:
    """Return of all that is watched, by resource and namespace, whether the API server refuses it."""
    jobs = {(PLURAL, namespace): watches.forbids(_jobs_of(namespace)) for namespace in namespaces or [EVERYWHERE]}
    return {**sight.refusals(), **jobs}


def _registry(
    reconciler: Reconciler,
    access: Access,
    stop: Callable[[], Awaitable[None]],
    listener: aiohttp.TraceConfig,
) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return _session(await _credentials(access), listener)

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        await stop()  # else kopf takes calls that are under way for its own, and fails with what they fail with

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job(event: kopf.RawEvent, **_: Any) -> None:
        reconciler.job_event(event["object"], kind=event["type"])

    return registry


def _session(access: kopf.ConnectionInfo, listener: aiohttp.TraceConfig) -> kopf.AiohttpSession:
    """Connect as kopf would, and hear what it hears: it tells nobody of bookmarks."""
    context = access.as_ssl_context()
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=context),
        headers=access.as_http_headers(),
        proxy=access.proxy_url,
        trace_configs=[listener, *([trusting(context, str(access.ca_path))] if access.ca_path else [])],
    )
    return kopf.AiohttpSession(server=access.server, aiohttp_session=session)


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


class _Backoffs:
    """Seconds between the attempts of kopf at a request. It would end the operator after some; these never end."""

    def __iter__(self) -> Iterator[float]:
        return (min(RETRY_LONGEST, RETRY_FIRST * 2.0 ** min(count, 20)) for count in itertools.count())


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # what is watched is known; watching definitions and namespaces would take rights
    settings.watching.server_timeout = WATCH_TIME  # each is seen to live by its end
    settings.watching.inactivity_timeout = SILENCE
    settings.networking.error_backoffs = _Backoffs()
    settings.posting.enabled = False  # events are recorded by the executor, after the status was written
    return settings
