"""From a plan to calls. ``reconcile`` looks, plans, writes the status, acts: in this order, each time anew.

Every action may be done twice, so it can be killed anywhere. It never goes on after a status write that failed: then
somebody else has changed the job, and the plan was made for another one. What it keeps between two calls only saves
questions: that what pods lean on was all there.

The pods are those that are known, and what is known may be late. The job is read from the API server, so its status may
speak of pods that another operator saw. When one is missing that was seen before, and nobody told of its end, the API
server is asked before anything is concluded from that, once for each that is missing. Who is known to be there stays
there until its end is told, since that tells the exit code, and so what the failure costs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from typing import Any, Protocol

from fthsdp.errors import ConfigError
from fthsdp_operator.api import JOB_LABEL, MANAGER, Job, ReplicaState, coordinator_name, parse_job, pod_name
from fthsdp_operator.cluster import AlreadyExists, Cluster, ClusterError, Conflict, Manifest, NamespaceEnding, Refused
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import JobKey, Name, Observed, PodView, observe, owned
from fthsdp_operator.rules.actions import Action, Create, Delete, Event, Label, Plan
from fthsdp_operator.rules.plan import plan, refuse

__all__ = ["IN_FLIGHT", "Memory", "Witness", "reconcile"]

log = logging.getLogger(__name__)

IN_FLIGHT = 50
"""Calls of one kind at a time: beyond that, an API server only queues them."""
NAMESPACE_ENDING = 60.0
"""Seconds between two looks at a job whose namespace is being deleted. Its own deletion is an event."""
SUPPORT_KNOWN = 300.0
"""Seconds for which what pods lean on is taken to be there once all of it was: six questions for every look are many.
When a call for the job fails, it is looked at anew."""
_WHOLE = (ReplicaState.STARTING, ReplicaState.CATCHING_UP, ReplicaState.ACTIVE, ReplicaState.SPARE)
"""States of a replica all of whose pods were seen."""


class Memory:
    """Jobs of which all that their pods lean on was there."""

    def __init__(self) -> None:
        self._whole: dict[JobKey, tuple[str, frozenset[Name], float]] = {}
        """The job's uid, what was there, and since which Unix time that is known."""
        self._missing: dict[JobKey, tuple[str, frozenset[str]]] = {}
        """The job's uid, and the names of pods that are not there by what the API server answered when asked."""

    def knows(self, job: Job, names: frozenset[Name], now: float) -> bool:
        """Whether all of this was there a short while ago, and is the job's own."""
        uid, known, since = self._whole.get((job.namespace, job.name), ("", frozenset(), 0.0))
        return uid == job.metadata.uid and names <= known and 0 <= now - since < SUPPORT_KNOWN

    def learn(self, job: Job, names: frozenset[Name], now: float) -> None:
        """All of this is there, and the job's own."""
        self._whole[job.namespace, job.name] = (job.metadata.uid, names, now)

    def missing(self, job: Job) -> frozenset[str]:
        """Return which pods the API server was asked for, and has not."""
        uid, names = self._missing.get((job.namespace, job.name), ("", frozenset()))
        return names if uid == job.metadata.uid else frozenset()

    def miss(self, job: Job, names: frozenset[str]) -> None:
        """These pods were asked for, and are not there; all others are, or nobody asked."""
        self._missing[job.namespace, job.name] = (job.metadata.uid, names)

    def doubt(self, namespace: str, name: str) -> None:
        """Something may be amiss with what pods lean on."""
        self._whole.pop((namespace, name), None)

    def forget(self, namespace: str, name: str) -> None:
        """The job is gone."""
        self.doubt(namespace, name)
        self._missing.pop((namespace, name), None)


class Witness(Protocol):
    """Who is told what a look at a job found, to count it."""

    def looked(self, job: Job, observed: Observed, todo: Plan, now: float) -> None:
        """A job was looked at, and the status of its plan is written."""
        ...

    def forget(self, namespace: str, name: str) -> None:
        """A job is gone, or cannot be understood any more."""
        ...


async def reconcile(
    cluster: Cluster,
    namespace: str,
    name: str,
    now: float,
    *,
    last_words: Collection[PodView] = (),
    witness: Witness | None = None,
    memory: Memory | None = None,
    trouble: str = "",
) -> float:
    """Bring a job one step closer to what it should be.

    ``last_words`` are pods that are gone, as they were seen last; they may grow more until the pods are looked at.
    ``trouble`` is what was refused when it was tried last. Returns the seconds after which to look again even if
    nothing happens (infinity: only when something does). Raises ClusterError when a call failed: try again, later.
    """
    memory = memory or Memory()
    job, manifest = await _read(cluster, namespace, name, now)
    if job is None:
        memory.forget(namespace, name)
        if witness is not None:
            witness.forget(namespace, name)
        return math.inf
    observed = await _look(cluster, job, last_words, memory, now, trouble)
    todo = plan(job, observed, now)
    try:
        await _write_status(cluster, manifest, todo)
    except Conflict:
        return 0.0
    if witness is not None:
        witness.looked(job, observed, todo, now)
    try:
        await _act(cluster, job, todo, now)
    except NamespaceEnding:
        log.info("%s/%s: its namespace is being deleted, and takes nothing new", namespace, name)
        return NAMESPACE_ENDING
    except ClusterError:
        memory.doubt(namespace, name)
        raise
    return max(0.0, todo.wake_at - now)


async def _read(cluster: Cluster, namespace: str, name: str, now: float) -> tuple[Job | None, Manifest]:
    """Return a job; None when it is gone, somebody else's, or cannot be understood, and then its status says so."""
    manifest = await cluster.get_job(namespace, name)
    if manifest is None or (manifest.get("spec") or {}).get("managedBy", MANAGER) != MANAGER:
        return None, {}
    try:
        return parse_job(manifest), manifest
    except ConfigError as error:
        await _write_status(cluster, manifest, refuse(manifest, str(error), now))
        return None, manifest


async def _look(
    cluster: Cluster, job: Job, last_words: Collection[PodView], memory: Memory, now: float, trouble: str
) -> Observed:
    status, support = await asyncio.gather(cluster.coordinator_status(job), _support(cluster, job, memory, now))
    pods, words = cluster.known_pods(job.namespace, job.name), tuple(last_words)  # as of the same moment
    missing = _missing(job, pods, words)
    if not missing <= memory.missing(job):
        listed = await cluster.list_pods(job.namespace, job.name)
        pods, words = cluster.known_pods(job.namespace, job.name), tuple(last_words)
        pods = _all_of(listed, pods, words)
        missing = _missing(job, pods, words)
    memory.miss(job, missing)
    return observe(
        job,
        pods,
        last_words=words,
        support=support,
        nodes=cluster.nodes({pod.node for pod in pods if pod.node is not None}),
        coordinator=status,
        trouble=trouble,
        fresh_key=secrets.token_hex(32),
        coordinator_image=cluster.coordinator_image,
    )


async def _support(cluster: Cluster, job: Job, memory: Memory, now: float) -> Mapping[Name, bool]:
    """Return which objects exist that the job's pods lean on, and whether each is the job's own."""
    names = [(m["kind"], m["metadata"]["name"]) for m in render.support(job, key="")]
    if memory.knows(job, frozenset(names), now):
        return dict.fromkeys(names, True)
    found = await asyncio.gather(*(cluster.get(kind, job.namespace, name) for kind, name in names))
    there = {name: owned(job, it) for name, it in zip(names, found, strict=True) if it is not None}
    if len(there) == len(names) and all(there.values()):
        memory.learn(job, frozenset(names), now)
    return there


def _missing(job: Job, pods: Iterable[PodView], words: Iterable[PodView]) -> frozenset[str]:
    """Return the pods that were seen before, and nobody told of their end: what is known may be older than the job."""
    if job.spec.suspend or job.status.terminal:
        return frozenset()
    seen = {
        pod_name(job.name, entry.index, entry.named_after, index)
        for entry in job.status.replica_statuses
        if entry.state in _WHOLE
        for index in range(job.spec.pods_per_replica)
    }
    if job.status.coordinator.pod_uid is not None:
        seen.add(coordinator_name(job.name))
    return frozenset(seen - {pod.name for pod in (*pods, *words) if pod.job_uid == job.metadata.uid})


def _all_of(listed: Iterable[PodView], known: Iterable[PodView], words: Iterable[PodView]) -> Collection[PodView]:
    """Return the pods of a list together with what was told while it was under way.

    One that is not in the list, and known to be there, ends in a moment: then it is told how.
    """
    ended = {pod.uid for pod in words}
    return {pod.uid: pod for pod in (*listed, *known) if pod.uid not in ended}.values()


async def _write_status(cluster: Cluster, manifest: Mapping[str, Any], todo: Plan) -> None:
    status = todo.status.dump()
    if status == manifest.get("status"):
        return
    metadata = manifest["metadata"]
    await cluster.patch_status(
        metadata["namespace"], metadata["name"], status, resource_version=metadata["resourceVersion"]
    )


async def _act(cluster: Cluster, job: Job, todo: Plan, now: float) -> None:
    """Do the actions, those of one stage side by side, then say what happened, even if one of them failed."""
    try:
        for _, stage in groupby(_possible(cluster, job, todo), key=_stage):
            await _together(cluster, job, list(stage))
    except NamespaceEnding:
        raise
    except ClusterError as error:
        await cluster.record_event(job, Event(warning=True, reason="CallFailed", message=str(error)), now)
        raise
    finally:
        for event in todo.events:
            who = {"replica": event.replica, "attempt": event.attempt}
            log.info("%s/%s: %s: %s", job.namespace, job.name, event.reason, event.message, extra=who)
            await cluster.record_event(job, event, now)


def _possible(cluster: Cluster, job: Job, todo: Plan) -> list[Action]:
    """Return the actions without pods whose names those of an earlier job still have: we are told of their end."""
    taken = {pod.name for pod in cluster.known_pods(job.namespace, job.name) if pod.job_uid != job.metadata.uid}
    return [action for action in todo.actions if _new_pod(action) not in taken]


def _new_pod(action: Action) -> str | None:
    if not isinstance(action, Create) or action.manifest["kind"] != "Pod":
        return None
    name: str = action.manifest["metadata"]["name"]
    return name


def _stage(action: Action) -> tuple[type[Action], str]:
    """A binding needs the role that it names, and pods need everything."""
    kind = action.manifest["kind"] if isinstance(action, Create) else ""
    return type(action), kind if kind in ("RoleBinding", "Pod") else ""


async def _together(cluster: Cluster, job: Job, actions: list[Action]) -> None:
    turn, refused = asyncio.Semaphore(IN_FLIGHT), False

    async def one(action: Action) -> None:
        nonlocal refused
        async with turn:
            if refused and isinstance(action, Create):
                return  # a quota that is used up is used up for the thousands that follow as well
            try:
                await _call(cluster, job, action)
            except Refused:
                refused = True
                raise

    results = await asyncio.gather(*map(one, actions), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _call(cluster: Cluster, job: Job, action: Action) -> None:
    if isinstance(action, Create):
        await _create(cluster, job, action.manifest)
    elif isinstance(action, Delete):
        await cluster.delete(
            action.kind, job.namespace, action.name, uid=action.uid, grace_seconds=action.grace_seconds
        )
    elif isinstance(action, Label):
        await cluster.label_pod(job.namespace, action.name, action.labels, uid=action.uid)
    else:
        await cluster.tell_coordinator(job, action.message)


async def _create(cluster: Cluster, job: Job, manifest: Manifest) -> None:
    """Create an object. A pod whose name is taken is looked at: it is known from then on, or it is in the way."""
    try:
        await cluster.create(manifest)
    except AlreadyExists:
        if manifest["kind"] != "Pod":
            return  # the next look says whose it is
        name = manifest["metadata"]["name"]
        there = await cluster.get("Pod", job.namespace, name)
        labels = (there or {}).get("metadata", {}).get("labels") or {}
        # One that is labelled with the job's name is the job's, or one of an earlier job of that name, and on its way
        # out: we are told of its end. Nobody would tell us of another one.
        if there is not None and labels.get(JOB_LABEL) != job.name:
            raise ClusterError(
                f"Pod {name} is there already and not of this job: delete it, or give the job another name"
            ) from None
