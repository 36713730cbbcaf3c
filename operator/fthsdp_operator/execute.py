"""From a plan to calls. ``reconcile`` looks, plans, writes the status, acts: in this order, each time anew.

It keeps nothing between two calls and every action may be done twice, so it can be killed anywhere. It never goes on
after a status write that failed: then somebody else has changed the job, and the plan was made for another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any, Protocol

from fthsdp.errors import ConfigError
from fthsdp_operator import render
from fthsdp_operator.actions import Action, Create, Delete, Event, Plan
from fthsdp_operator.api import Job, parse_job
from fthsdp_operator.cluster import AlreadyExists, Cluster, ClusterError, Conflict, Manifest
from fthsdp_operator.observe import Observed, observe
from fthsdp_operator.plan import plan, refuse

__all__ = ["IN_FLIGHT", "Witness", "reconcile"]

log = logging.getLogger(__name__)

IN_FLIGHT = 50
"""Calls of one kind at a time: beyond that, an API server only queues them."""


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
    last_words: Iterable[Mapping[str, Any]] = (),
    witness: Witness | None = None,
) -> float:
    """Bring a job one step closer to what it should be.

    ``last_words`` are pods as watch events showed them last, possibly gone by now. Returns the seconds after which to
    look again even if nothing happens (infinity: only when something does). Raises ClusterError when a call failed:
    try again, later.
    """
    job, manifest = await _read(cluster, namespace, name, now)
    if job is None:
        if witness is not None:
            witness.forget(namespace, name)
        return math.inf
    observed = await _look(cluster, job, last_words)
    todo = plan(job, observed, now)
    try:
        await _write_status(cluster, manifest, todo)
    except Conflict:
        return 0.0
    if witness is not None:
        witness.looked(job, observed, todo, now)
    await _act(cluster, job, todo, now)
    return max(0.0, todo.wake_at - now)


async def _read(cluster: Cluster, namespace: str, name: str, now: float) -> tuple[Job | None, Manifest]:
    """Return a job; None when it is gone, or cannot be understood, and then its status says so."""
    manifest = await cluster.get_job(namespace, name)
    if manifest is None:
        return None, {}
    try:
        return parse_job(manifest), manifest
    except ConfigError as error:
        await _write_status(cluster, manifest, refuse(manifest, str(error), now))
        return None, manifest


async def _look(cluster: Cluster, job: Job, last_words: Iterable[Mapping[str, Any]]) -> Observed:
    wanted = [(m["kind"], m["metadata"]["name"]) for m in render.support(job, key="")]
    pods, status, found = await asyncio.gather(
        cluster.list_pods(job.namespace, job.name),
        cluster.coordinator_status(job),
        asyncio.gather(*(cluster.get(kind, job.namespace, name) for kind, name in wanted)),
    )
    return observe(
        job,
        pods,
        last_words=last_words,
        support=[there for there in found if there is not None],
        coordinator=status,
        fresh_key=secrets.token_hex(32),
        coordinator_image=cluster.coordinator_image,
    )


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
        for _, stage in groupby(todo.actions, key=_stage):
            await _together(cluster, job, list(stage))
    except ClusterError as error:
        await cluster.record_event(job, Event(warning=True, reason="CallFailed", message=str(error)), now)
        raise
    finally:
        for event in todo.events:
            who = {"replica": event.replica, "attempt": event.attempt}
            log.info("%s/%s: %s: %s", job.namespace, job.name, event.reason, event.message, extra=who)
            await cluster.record_event(job, event, now)


def _stage(action: Action) -> tuple[type[Action], str]:
    """A binding needs the role that it names, and pods need everything."""
    kind = action.manifest["kind"] if isinstance(action, Create) else ""
    return type(action), kind if kind in ("RoleBinding", "Pod") else ""


async def _together(cluster: Cluster, job: Job, actions: list[Action]) -> None:
    turn = asyncio.Semaphore(IN_FLIGHT)

    async def one(action: Action) -> None:
        async with turn:
            await _call(cluster, job, action)

    results = await asyncio.gather(*map(one, actions), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _call(cluster: Cluster, job: Job, action: Action) -> None:
    if isinstance(action, Create):
        with suppress(AlreadyExists):
            await cluster.create(action.manifest)
    elif isinstance(action, Delete):
        await cluster.delete(
            action.kind, job.namespace, action.name, uid=action.uid, grace_seconds=action.grace_seconds
        )
    else:
        await cluster.tell_coordinator(job, action.message)
