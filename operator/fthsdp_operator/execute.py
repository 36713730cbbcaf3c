"""From a plan to calls. ``reconcile`` looks, plans, writes the status, acts: in this order, each time anew.

Every action may be done twice, so it can be killed anywhere. It never goes on after a status write that failed: then
somebody else has changed the job, and the plan was made for another one. What it keeps between two calls only saves
questions (``Memory``).

The pods are those that are known, and what is known may be late. The job is as the API server gave it to us, so its
status may speak of pods that another operator saw. When one is missing that was seen before, and nobody told of its
end, the API server is asked before anything is concluded from that, once for each that is missing. Who is known to be
there stays there until its end is told, since that tells the exit code, and so what the failure costs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

from fthsdp.errors import ConfigError
from fthsdp_operator.api import (
    MANAGER,
    UP,
    Job,
    ReplicaStatus,
    coordinator_name,
    parse_job,
    pod_name,
)
from fthsdp_operator.cluster import AlreadyExists, Cluster, ClusterError, Conflict, Manifest, NamespaceEnding, Refused
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.known import AttemptPods, JobPods
from fthsdp_operator.observed.observe import (
    BudgetView,
    JobKey,
    Name,
    Observed,
    PodView,
    as_restarted,
    budget_view,
    observe,
    owned,
    view,
)
from fthsdp_operator.rules import disruption
from fthsdp_operator.rules.actions import Action, Create, Delete, Event, Label, Plan
from fthsdp_operator.rules.plan import plan, refuse

__all__ = ["IN_FLIGHT", "Memory", "Witness", "reconcile"]

log = logging.getLogger(__name__)

IN_FLIGHT = 50
"""Calls of one kind at a time: beyond that, an API server only queues them."""
NAMESPACE_ENDING = 60.0
"""Seconds between two looks at a job whose namespace is being deleted. Its own deletion is an event."""
FEW = 16
"""Pods that are asked for one by one: a list of thousands takes seconds."""
GLANCE = 0.1
"""Seconds between two glances, while pods are created, at whether that is still right. Thousands take minutes."""
SUPPORT_KNOWN = 300.0
"""Seconds for which what pods lean on is taken to be there once all of it was: six questions for every look are many.
When a call for the job fails, it is looked at anew."""
JOB_KNOWN = 30.0
"""Seconds for which a job is taken to be as it was read or written last, while the watch tells of no other version: as
long as it may take to notice a change when the watch is dead."""


class Memory:
    """What saves questions: jobs as the API server gave them to us last, and that all that their pods lean on is there.

    A job is never taken from the watch. What comes from there says only that another version exists, and then the API
    server is asked. So nothing is older than what we have written, and a plan that was made for a job that had changed
    fails when its status is written.
    """

    def __init__(self) -> None:
        self._jobs: dict[JobKey, tuple[Manifest, float]] = {}
        """Jobs, and since which Unix time that is known."""
        self._parsed: dict[JobKey, tuple[Manifest, Job]] = {}
        """What a job says, and where that is from."""
        self._versions: dict[JobKey, int] = {}
        """The newest version of each that the watch has told of."""
        self._whole: dict[JobKey, tuple[str, frozenset[Name], float]] = {}
        """The job's uid, what was there, and since which Unix time that is known."""
        self._budgets: dict[JobKey, tuple[str, BudgetView, float]] = {}
        """The job's uid, its disruption budget, and since which Unix time that is known."""
        self._missing: dict[JobKey, tuple[str, frozenset[str]]] = {}
        """The job's uid, and the names of pods that are not there by what the API server answered when asked."""
        self._silent: dict[JobKey, tuple[tuple[str, str] | None, float]] = {}
        """Uid and address of a coordinator's pod, and the Unix time since which it has been asked in vain."""
        self._dropped: set[str] = set()
        """Fields of a status that the API server has dropped."""

    def job(self, key: JobKey, now: float) -> Manifest | None:
        """Return a job as it was read or written a short while ago; None when it may be another one by now."""
        manifest, since = self._jobs.get(key, (None, 0.0))
        if manifest is None or not 0 <= now - since < JOB_KNOWN:
            return None
        return manifest if _version(manifest) >= self._versions.get(key, 0) else None

    def parsed(self, manifest: Manifest) -> Job:
        """Return what a job says; raises ConfigError when it cannot be understood."""
        key = _key(manifest)
        source, job = self._parsed.get(key, (None, None))
        if job is None or source is not manifest:
            job = parse_job(manifest)
            self._parsed[key] = (manifest, job)
        return job

    def keep(self, manifest: Manifest, now: float) -> None:
        """The API server has answered this to a question or a write of ours."""
        self._jobs[_key(manifest)] = (manifest, now)

    def told(self, manifest: Mapping[str, Any]) -> None:
        """The watch has told of this version of a job, or that this was its last one."""
        key = _key(manifest)
        self._versions[key] = max(_version(manifest), self._versions.get(key, 0))

    def knows(self, job: Job, names: frozenset[Name], now: float) -> bool:
        """Whether all of this was there a short while ago, and is the job's own."""
        uid, known, since = self._whole.get((job.namespace, job.name), ("", frozenset(), 0.0))
        return uid == job.metadata.uid and names <= known and 0 <= now - since < SUPPORT_KNOWN

    def learn(self, job: Job, names: frozenset[Name], now: float) -> None:
        """All of this is there, and the job's own."""
        self._whole[job.namespace, job.name] = (job.metadata.uid, names, now)

    def budget(self, job: Job, now: float) -> BudgetView | None:
        """Return the job's disruption budget if it was a short while ago as the job wants it now."""
        uid, budget, since = self._budgets.get((job.namespace, job.name), ("", BudgetView(), 0.0))
        known = uid == job.metadata.uid and 0 <= now - since < SUPPORT_KNOWN
        return budget if known and disruption.fits(job, budget) else None

    def keep_budget(self, job: Job, budget: BudgetView, now: float) -> None:
        """This is the job's disruption budget."""
        self._budgets[job.namespace, job.name] = (job.metadata.uid, budget, now)

    def missing(self, job: Job) -> frozenset[str]:
        """Return which pods the API server was asked for, and has not."""
        uid, names = self._missing.get((job.namespace, job.name), ("", frozenset()))
        return names if uid == job.metadata.uid else frozenset()

    def miss(self, job: Job, names: frozenset[str]) -> None:
        """These pods were asked for, and are not there; all others are, or nobody asked."""
        self._missing[job.namespace, job.name] = (job.metadata.uid, names)

    def silence(self, key: JobKey, keeper: PodView | None, *, answered: bool, now: float) -> float:
        """Return the seconds for which this coordinator's pod has been asked in vain: none if it has just answered."""
        who = None if keeper is None else (keeper.uid, keeper.address)
        before, since = self._silent.get(key, (None, now))
        since = now if answered or who != before else min(since, now)
        self._silent[key] = (who, since)
        return now - since

    def compare(self, status: Mapping[str, Any], there: Mapping[str, Any]) -> None:
        """Say it once if the API server drops what is written: then its definition of a job is older than this code."""
        lost = set(_fields(status)) - set(_fields(there)) - self._dropped
        if lost:
            self._dropped |= lost
            names = ", ".join(sorted(lost))
            log.warning(
                "the definition of FTHSDPJob in this cluster is older than this operator, and drops status fields"
                " without which jobs are not run as they should be: upgrade it (%s)",
                names,
            )

    def doubt(self, key: JobKey) -> None:
        """The job has changed."""
        self._jobs.pop(key, None)

    def forget(self, key: JobKey) -> None:
        """Something may be amiss with the job, or with what its pods lean on."""
        self._jobs.pop(key, None)
        self._whole.pop(key, None)
        self._budgets.pop(key, None)

    def lose(self, key: JobKey) -> None:
        """The job is gone: so is what its watch has told."""
        self.forget(key)
        self._versions.pop(key, None)
        self._parsed.pop(key, None)
        self._missing.pop(key, None)
        self._silent.pop(key, None)


def _fields(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a status' fields, and of those of its replicas."""
    yield from status
    yield from (f"replicaStatuses.{name}" for entry in status.get("replicaStatuses", ()) for name in entry)


def _key(manifest: Mapping[str, Any]) -> JobKey:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _version(manifest: Mapping[str, Any]) -> int:
    """Versions can be compared, as those of pods (``informers.cache``)."""
    return int(manifest["metadata"]["resourceVersion"])


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
    memory, key = memory or Memory(), (namespace, name)
    try:
        return await _step(cluster, key, now, last_words, witness, memory, trouble)
    except NamespaceEnding:
        log.info("%s/%s: its namespace is being deleted, and takes nothing new", namespace, name)
        return NAMESPACE_ENDING
    except Exception:
        memory.forget(key)
        raise


async def _step(
    cluster: Cluster,
    key: JobKey,
    now: float,
    last_words: Collection[PodView],
    witness: Witness | None,
    memory: Memory,
    trouble: str,
) -> float:
    remembered = memory.job(key, now) is not None
    job, manifest = await _read(cluster, key, memory, now)
    if job is None:
        memory.lose(key)
        if witness is not None:
            witness.forget(*key)
        return math.inf
    try:
        observed, refused = await _look(cluster, job, last_words, memory, now, trouble)
        todo = plan(job, observed, now)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        await _write_status(cluster, manifest, refuse(manifest, _no_plan(error), now))
        raise
    try:
        written = await _write_status(cluster, manifest, todo)
    except Conflict:
        memory.doubt(key)
        return 0.0
    if written is not None:
        memory.keep(written, now)
        memory.compare(todo.status.dump(), written.get("status") or {})
    elif remembered and any(map(_takes_a_pod, todo.actions)):
        memory.doubt(key)  # nothing has shown that the job is still this one, and what is gone does not come back
        return 0.0
    if witness is not None:
        witness.looked(job, observed, todo, now)
    course = _Course(cluster, job, observed, todo, changed=lambda: memory.job(key, now) is None)
    whole = await _act(cluster, job, todo, course, now)
    if refused is not None:
        raise refused
    return max(0.0, todo.wake_at - now) if whole else 0.0


def _takes_a_pod(action: Action) -> bool:
    return isinstance(action, Delete) and action.kind == "Pod"


def _no_plan(error: Exception) -> str:
    return (
        f"no plan can be made for this job ({type(error).__name__}: {error}): most likely a field of spec.template is"
        " not of the type that a pod has there; the operator's log has the place"
    )


async def _read(cluster: Cluster, key: JobKey, memory: Memory, now: float) -> tuple[Job | None, Manifest]:
    """Return a job; None when it is gone, somebody else's, or cannot be understood, and then its status says so."""
    manifest = memory.job(key, now)
    if manifest is None:
        manifest = await cluster.get_job(*key)
        if manifest is None or (manifest.get("spec") or {}).get("managedBy", MANAGER) != MANAGER:
            return None, {}
        memory.keep(manifest, now)
    try:
        return memory.parsed(manifest), manifest
    except ConfigError as error:
        await _write_status(cluster, manifest, refuse(manifest, str(error), now))
        return None, manifest


async def _look(
    cluster: Cluster, job: Job, last_words: Collection[PodView], memory: Memory, now: float, trouble: str
) -> tuple[Observed, Refused | None]:
    """Return what a plan needs, and what was refused of that which it can do without."""
    status, support, (budget, refused) = await asyncio.gather(
        cluster.coordinator_status(job), _support(cluster, job, memory, now), _budget(cluster, job, memory, now)
    )
    pods: Collection[PodView] = cluster.known_pods(job.namespace, job.name)
    words = tuple(last_words)  # as of the same moment
    missing = _missing(job, JobPods.of(pods), words)
    if not missing <= memory.missing(job):
        listed = await _ask(cluster, job, missing)
        pods, words = cluster.known_pods(job.namespace, job.name), tuple(last_words)
        pods = _all_of(listed, pods, words)
        missing = _missing(job, JobPods.of(pods), words)
    memory.miss(job, missing)
    observed = observe(
        job,
        pods,
        last_words=words,
        support=support,
        budget=budget,
        nodes=cluster.nodes(),
        coordinator=status,
        trouble=trouble,
        fresh_key=secrets.token_hex(32),
        coordinator_image=cluster.coordinator_image,
    )
    silence = memory.silence((job.namespace, job.name), observed.coordinator_pod, answered=status is not None, now=now)
    return replace(observed, silence=silence), refused


async def _ask(cluster: Cluster, job: Job, names: Collection[str]) -> Collection[PodView]:
    """Ask the API server for these pods: for all of the job, unless they are few."""
    if len(names) > FEW:
        return await cluster.list_pods(job.namespace, job.name)
    found = await asyncio.gather(*(cluster.get("Pod", job.namespace, name) for name in names))
    return [pod for pod in (view(it) for it in found if it is not None) if pod is not None]


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


async def _budget(cluster: Cluster, job: Job, memory: Memory, now: float) -> tuple[BudgetView | None, Refused | None]:
    """Return the job's disruption budget, where it matters; or what was refused: no pod leans on it."""
    if not disruption.concerns(job):
        return None, None
    budget = memory.budget(job, now)
    if budget is None:
        try:
            found = await cluster.get(render.BUDGET, job.namespace, render.budget_name(job.name))
        except Refused as error:
            return None, error
        budget = budget_view(job, found)
        memory.keep_budget(job, budget, now)
    return budget, None


def _missing(job: Job, pods: JobPods, words: Iterable[PodView]) -> frozenset[str]:
    """Return the pods that were seen before, and nobody told of their end: what is known may be older than the job."""
    if job.spec.suspend or job.status.terminal:
        return frozenset()
    ended = {pod.name for pod in words if pod.job_uid == job.metadata.uid}
    whole = (entry for entry in job.status.replica_statuses if entry.state in UP)
    names = {name for entry in whole for name in _lacking(job, pods, entry)}
    if job.status.coordinator.pod_uid is not None:
        names |= {coordinator_name(job.name)} - _names(job, pods.replica(None))
    return frozenset(names - ended)


def _all_of(listed: Iterable[PodView], known: Iterable[PodView], words: Iterable[PodView]) -> Collection[PodView]:
    """Return the pods of a list together with what was told while it was under way.

    One that is not in the list, and known to be there, ends in a moment: then it is told how.
    """
    ended = {pod.uid for pod in words}
    return {pod.uid: pod for pod in (*listed, *known) if pod.uid not in ended}.values()


def _lacking(job: Job, pods: JobPods, entry: ReplicaStatus) -> Iterator[str]:
    """Yield the names of a replica's pods that are not known. Thousands mostly are, and that is seen at a glance."""
    there, numbers = pods.attempt(entry.index, entry.attempt), range(job.spec.pods_per_replica)
    stem = pod_name(job.name, entry.index, entry.named_after, 0).removesuffix("-0")
    if there.stems == {stem} and there.job_uids == {job.metadata.uid} and there.indices.issuperset(numbers):
        return
    known = _names(job, pods.replica(entry.index))
    names = (pod_name(job.name, entry.index, entry.named_after, number) for number in numbers)
    yield from (name for name in names if name not in known)


def _names(job: Job, pods: Iterable[PodView]) -> set[str]:
    return {pod.name for pod in pods if pod.job_uid == job.metadata.uid}


async def _write_status(cluster: Cluster, manifest: Mapping[str, Any], todo: Plan) -> Manifest | None:
    """Return the job as it stands there then; None when there was nothing to write."""
    status = todo.status.dump()
    if status == manifest.get("status"):
        return None
    metadata = manifest["metadata"]
    return await cluster.patch_status(
        metadata["namespace"], metadata["name"], status, resource_version=metadata["resourceVersion"]
    )


class _Course:
    """Whether a plan is still right, while what it creates is created.

    What happens to a replica does not wait until all pods of the others are there.
    """

    def __init__(
        self, cluster: Cluster, job: Job, observed: Observed, todo: Plan, *, changed: Callable[[], bool]
    ) -> None:
        """``changed`` says whether the job is another one by now."""
        self._cluster = cluster
        self._job = job
        self._changed = changed
        self._attempts = [(entry.index, entry.attempt) for entry in todo.status.replica_statuses]
        self._seen = self._count(observed.pods)
        self._next = asyncio.get_running_loop().time() + GLANCE
        self.left = False
        """It was not right any more."""

    def holds(self) -> bool:
        """Ask before each creation."""
        now = asyncio.get_running_loop().time()
        if not self.left and now >= self._next:
            self._next = now + GLANCE
            self.left = self._changed() or self._is_worse()
        return not self.left

    def _is_worse(self) -> bool:
        """Since the last glance some attempt, or the coordinator, has lost a pod, or one of them has ended."""
        known = JobPods.of(self._cluster.known_pods(self._job.namespace, self._job.name))
        before, self._seen = self._seen, self._count(as_restarted(self._job, known.of_job(self._job.metadata.uid)))
        pairs = zip(before, self._seen, strict=True)
        return any(there < were or leaving > left for (were, left), (there, leaving) in pairs)

    def _count(self, pods: Collection[PodView]) -> list[tuple[int, int]]:
        """Return how many pods the coordinator and each attempt have, and how many of those have ended or are to."""
        arranged = JobPods.of(pods)
        groups = [AttemptPods(arranged.replica(None)), *(arranged.attempt(*who) for who in self._attempts)]
        return [(len(pods), len(pods.leaving)) for pods in groups]


async def _act(cluster: Cluster, job: Job, todo: Plan, course: _Course, now: float) -> bool:
    """Do the actions, those of one stage side by side, then say what happened, even if one of them failed.

    Returns whether that was all: it is not when the plan is not right any more.
    """
    try:
        await _in_stages(cluster, job, todo, course)
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
    return not course.left


async def _in_stages(cluster: Cluster, job: Job, todo: Plan, course: _Course) -> None:
    """Do what a stage asks for once the one before is done; but pods are told what to run whatever failed before.

    Those launchers wait for it, and for a while only; what a quota refuses for one replica is not to cost another one.
    Nor is it to leave those that train without their disruption budget. And a pod that may not be deleted keeps nobody
    from coming back: no other one has its name.
    """
    trouble: ClusterError | None = None
    blocked = False
    for (kind, what), stage in groupby(_possible(cluster, job, todo), key=_stage):
        if blocked and kind is not Label and what != render.BUDGET:
            continue
        try:
            await _together(cluster, job, list(stage), course)
        except NamespaceEnding:
            raise
        except ClusterError as error:
            trouble = trouble or error
            blocked = blocked or kind is not Delete or not isinstance(error, Refused)
    if trouble is not None:
        raise trouble


def _possible(cluster: Cluster, job: Job, todo: Plan) -> list[Action]:
    """Return the actions without pods whose names others with our labels still have: we are told of their end."""
    known = JobPods.of(cluster.known_pods(job.namespace, job.name))
    taken = {pod.name for pod in known.not_of_job(job.metadata.uid)}
    return [action for action in todo.actions if _new_pod(action) not in taken]


def _new_pod(action: Action) -> str | None:
    if not isinstance(action, Create) or action.manifest["kind"] != "Pod":
        return None
    name: str = action.manifest["metadata"]["name"]
    return name


def _stage(action: Action) -> tuple[type[Action], str]:
    """A binding needs the role that it names, and pods need everything; nothing needs a disruption budget."""
    if isinstance(action, Delete):
        return Delete, render.BUDGET if action.kind == render.BUDGET else ""
    kind = action.manifest["kind"] if isinstance(action, Create) else ""
    return type(action), kind if kind in ("RoleBinding", "Pod", render.BUDGET) else ""


async def _together(cluster: Cluster, job: Job, actions: list[Action], course: _Course) -> None:
    turn, refused = asyncio.Semaphore(IN_FLIGHT), False

    async def one(action: Action) -> None:
        nonlocal refused
        async with turn:
            # A quota that is used up is used up for the thousands that follow as well.
            if isinstance(action, Create) and (refused or not course.holds()):
                return
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
        seen = None if there is None else view(there)
        # One that is labelled with the job's name is the job's, or in its way: the next look says so, and we are told
        # of its end. Nobody would tell us of another one.
        if there is not None and (seen is None or seen.job != job.name):
            raise ClusterError(
                f"Pod {name} is there already and not of this job: delete it, or give the job another name"
            ) from None
