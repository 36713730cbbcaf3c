"""What the operator sees: raw pods become small views, everything else that a plan needs stands beside them.

The pods are those that ``cache`` knows at this moment. What they cannot show is how a pod ended that is already gone:
those *last words* are pods as they were seen last, and they only ever add an exit code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from sys import intern
from types import MappingProxyType
from typing import Any

from fthsdp.coordinator.messages import ReplicaStatus as MemberStatus
from fthsdp.coordinator.messages import Status
from fthsdp_operator.api import (
    ATTEMPT_LABEL,
    CONFIG_ANNOTATION,
    JOB_LABEL,
    JOB_UID_LABEL,
    KIND,
    POD_INDEX_LABEL,
    REPLICA_LABEL,
    ROLE_LABEL,
    Job,
    ReplicaStatus,
    Role,
    coordinator_name,
    pod_name,
)
from fthsdp_operator.observed.containers import (
    ENDED,
    Exit,
    exit_of,
    exits_of,
    main_container,
    phase_of,
    seconds,
    still_runs,
)
from fthsdp_operator.observed.known import AttemptPods, JobPods, KnownNodes, NodeKind

__all__ = [
    "BudgetView",
    "Exit",
    "Hold",
    "JobKey",
    "Name",
    "NodeView",
    "Observed",
    "PodView",
    "as_restarted",
    "budget_view",
    "node_view",
    "observe",
    "owned",
    "view",
]

Manifest = Mapping[str, Any]
JobKey = tuple[str, str]
"""Namespace and name of a job."""
Name = tuple[str, str]
"""Kind and name of an object."""


@dataclass(frozen=True, slots=True)
class Hold:
    """What keeps a pod, or a container of it, from starting: who has to act says so."""

    reason: str
    """Unschedulable or SchedulingGated, or the kubelet's, as in ImagePullBackOff."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """The part of a pod that rules look at."""

    name: str
    uid: str
    namespace: str = ""
    job: str = ""
    """Name of its job, or of an earlier one of that name."""
    job_uid: str = ""
    """The job that made it. Empty for one that only has the labels of a job's pod, as a copy of one has."""
    role: Role
    replica: int
    """-1 for the coordinator."""
    attempt: int
    """The one that it runs, or is to run."""
    index: int
    phase: str
    """That of its main container, the one that trains, as soon as that has ended."""
    lingers: bool = False
    """Containers beside the main one still run, though that has ended."""
    main: str = ""
    """Name of its main container."""
    label: int | None = None
    """The attempt that its label names, where it was restarted in place and the label does not say so yet."""
    node: str | None = None
    address: str = ""
    """Of a coordinator's pod, once it has one."""
    config: str = ""
    """What a coordinator was started with."""
    reason: str = ""
    """The kubelet's or the disruption's reason, where there is one."""
    message: str = ""
    deleted: float | None = None
    """Unix time at which its deletion was asked for; None while nobody did."""
    gone_by: float | None = None
    """Unix time at which its grace period ends."""
    exits: tuple[Exit, ...] = ()
    """How its containers ended, as far as they have; of init containers only those that failed are here."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """Type and status of each condition in its status."""
    created: float | None = None
    """Unix time at which its object was created."""
    placed: float | None = None
    """Unix time at which it got its node, where a scheduler says so."""
    hold: Hold | None = None
    """What keeps it from starting; None when that just takes its time, as the first pull of an image does."""
    finalizers: tuple[str, ...] = ()
    """Who has something to do before its object may go."""

    @property
    def exit(self) -> Exit | None:
        """How the main container ended; else the first one that failed, else the first one that ended."""
        return exit_of(self.exits, self.main)

    @property
    def ended(self) -> bool:
        """Its main container does not run any more."""
        return self.phase in ENDED

    @property
    def over(self) -> bool:
        """No container of it runs any more."""
        return self.ended and not self.lingers

    @property
    def alive(self) -> bool:
        """It may run, and nobody asked it to stop."""
        return not self.ended and self.deleted is None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The part of a node that rules look at: nothing of it changes with a heartbeat."""

    name: str
    ready: str = "Unknown"
    """Status of its condition Ready: "True", "False", or "Unknown" when its kubelet is not heard or says nothing."""
    not_ready_since: float | None = None
    """Unix time since which ``ready`` has been what it is; None while it is "True", and where nobody knows."""
    unschedulable: bool = False
    """Somebody cordoned it."""
    taints: frozenset[tuple[str, str, str]] = frozenset()
    """Key, value and effect of each."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """Type and status of each condition in its status."""

    @property
    def kind(self) -> NodeKind:
        """What it is judged by."""
        return NodeKind(self.unschedulable, self.conditions, self.taints)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """What has the name of the job's disruption budget."""

    uid: str = ""
    """Empty where nothing has."""
    foreign: bool = False
    """It is not the job's."""
    going: bool = False
    """Somebody deleted it, and a finalizer keeps it."""
    min_available: int | str | None = None
    """Pods, as the operator writes it; people may write a share of them, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything outside the job's own object that a plan depends on."""

    pods: Collection[PodView] = ()
    """Pods of this job: not those of an earlier job of the same name."""
    others: Collection[PodView] = ()
    """Pods with its labels that are not its own: of an earlier job of its name, or copies."""
    support: frozenset[Name] = frozenset()
    """The other objects of the job that exist."""
    foreign: frozenset[Name] = frozenset()
    """Those whose names are taken by objects that are not the job's: an earlier job's that are on their way out, or a
    user's."""
    budget: BudgetView | None = None
    """Its disruption budget; None where nobody has looked, or may look."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    """By name: the nodes of the cluster. Those of which nothing is known are not here: they are gone, or the operator
    may not look at nodes, and then it is empty."""
    coordinator: Status | None = None
    """What the coordinator says; None when it did not answer."""
    silence: float = 0.0
    """Seconds for which the coordinator's pod has been asked in vain."""
    last_words: Mapping[str, PodView]
    """By name: pods as a watch event showed them last. They may be gone by now."""
    trouble: str = ""
    """What the API server refused when the job was looked at last; empty when it did all that it was asked."""
    fresh_key: str
    """Randomness: the job's key, should it have to be made now."""
    coordinator_image: str
    """Image for coordinators of jobs that name none."""

    _index: _Index = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", _index(self.pods, self.nodes, self.coordinator))

    @property
    def coordinator_pod(self) -> PodView | None:
        """The coordinator's pod."""
        return next(iter(self._index.pods.replica(None)), None)

    @property
    def trainers(self) -> tuple[PodView, ...]:
        """All training pods, of every attempt."""
        return tuple(self._index.pods.of_replicas())

    @property
    def kinds_of_nodes(self) -> Mapping[NodeKind, Collection[str]]:
        """Names of the known nodes, by what they are judged by."""
        return self._index.nodes.kinds

    def pods_of(self, replica: int) -> tuple[PodView, ...]:
        """Pods of every attempt of one replica."""
        return self._index.pods.replica(replica)

    def older(self, replica: int, attempt: int) -> Iterator[PodView]:
        """Pods of the attempts of one replica before this one."""
        return self._index.pods.older(replica, attempt)

    def group(self, replica: int, attempt: int) -> AttemptPods:
        """Pods of one attempt of one replica."""
        return self._index.pods.attempt(replica, attempt)

    def member(self, replica: int, attempt: int) -> MemberStatus | None:
        """What the coordinator says of this attempt of a replica."""
        return self._index.members.get((replica, attempt))

    def last_seen(self, name: str) -> PodView | None:
        """A pod as it is now, or as it was seen last."""
        return self._index.pods.named(name) or self.last_words.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """Where to find what: a plan asks for each of hundreds of replicas, of thousands of pods."""

    pods: JobPods
    nodes: KnownNodes
    members: Mapping[tuple[int, int], MemberStatus]
    """By replica and attempt."""


def _index(pods: Collection[PodView], nodes: Mapping[str, NodeView], coordinator: Status | None) -> _Index:
    members = coordinator.replicas if coordinator is not None else ()
    return _Index(
        pods=JobPods.of(pods),
        nodes=nodes if isinstance(nodes, KnownNodes) else KnownNodes(nodes.values()),
        members={(member.replica, member.attempt): member for member in reversed(members)},
    )


def observe(
    job: Job,
    pods: Iterable[PodView],
    *,
    last_words: Iterable[PodView] = (),
    support: Mapping[Name, bool] = MappingProxyType({}),
    budget: BudgetView | None = None,
    nodes: Mapping[str, NodeView] = MappingProxyType({}),
    coordinator: Status | None = None,
    trouble: str = "",
    fresh_key: str,
    coordinator_image: str,
) -> Observed:
    """Put together what a plan needs; pods that belong to another job of the same name stand apart.

    ``support``: the other objects that exist, and whether each is the job's own.
    """
    known = JobPods.of(pods)
    return Observed(
        pods=as_restarted(job, known.of_job(job.metadata.uid)),
        others=tuple(known.not_of_job(job.metadata.uid)),
        last_words={pod.name: pod for pod in last_words if pod.job_uid == job.metadata.uid},
        support=frozenset(support),
        foreign=frozenset(name for name, ours in support.items() if not ours),
        budget=budget,
        nodes=nodes,
        coordinator=coordinator,
        trouble=trouble,
        fresh_key=fresh_key,
        coordinator_image=coordinator_image,
    )


def owned(job: Job, manifest: Manifest) -> bool:
    """Whether an object is this job's own."""
    owners = manifest["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid", "") == job.metadata.uid for owner in owners)


def as_restarted(job: Job, pods: Iterable[PodView]) -> JobPods:
    """Pods of a replica that was restarted in place are of the attempt that the status names, whatever their label is.

    The status is written before the labels are: an operator that died in between has restarted it all the same.
    """
    stayed = {entry.index: entry for entry in job.status.replica_statuses if entry.pods_attempt is not None}
    known = JobPods.of(pods)
    if not any(replica in stayed and attempt < stayed[replica].attempt for replica, attempt in known.attempts):
        return known
    return JobPods.of(_as_restarted(job, pod, stayed[pod.replica]) if pod.replica in stayed else pod for pod in known)


def _as_restarted(job: Job, pod: PodView, entry: ReplicaStatus) -> PodView:
    name = pod_name(job.name, entry.index, entry.named_after, pod.index)
    if pod.name != name or pod.attempt >= entry.attempt:
        return pod
    return replace(pod, attempt=entry.attempt, label=pod.attempt if pod.label is None else pod.label)


def view(pod: Manifest) -> PodView | None:
    """Turn a pod into a view; None for a pod whose labels are not those of a job's pod.

    Whose it is stands in its labels, its owner and its name: copies of pods, made to look into them, have the labels.

    Strings that many pods have in common are kept once: there may be 12,500 of them.
    """
    labels, metadata = _labels(pod), pod["metadata"]
    try:
        role = Role(labels.get(ROLE_LABEL, ""))
        trainer = role is Role.TRAINER
        replica, attempt, index = (
            int(labels[label]) if trainer else -1 for label in (REPLICA_LABEL, ATTEMPT_LABEL, POD_INDEX_LABEL)
        )
    except (KeyError, ValueError):
        return None
    status = pod.get("status") or {}
    disruption = _disruption(status)
    gone_by = seconds(metadata.get("deletionTimestamp"))
    job_uid = labels.get(JOB_UID_LABEL, "")
    made_for_it = _has_owner(metadata, job_uid) and _fits(metadata["name"], labels, role, replica, attempt, index)
    main = main_container(pod)
    phase = phase_of(pod, main, lasting=not trainer)
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        namespace=intern(metadata.get("namespace") or ""),
        job=intern(labels.get(JOB_LABEL, "")),
        job_uid=intern(job_uid) if made_for_it else "",
        role=role,
        replica=replica,
        attempt=attempt,
        index=index,
        phase=intern(phase),
        lingers=phase in ENDED and status.get("phase") not in ENDED and still_runs(pod),
        main=intern(main),
        node=intern((pod.get("spec") or {}).get("nodeName") or "") or None,
        address="" if trainer else status.get("podIP") or "",
        config=intern((metadata.get("annotations") or {}).get(CONFIG_ANNOTATION, "")),
        reason=intern(status.get("reason") or disruption[0]),
        message=status.get("message") or disruption[1],
        deleted=None if gone_by is None else gone_by - (metadata.get("deletionGracePeriodSeconds") or 0),
        gone_by=gone_by,
        exits=exits_of(pod),
        conditions=_conditions(status),
        created=seconds(metadata.get("creationTimestamp")),
        placed=_placed(status),
        hold=_hold(status),
        finalizers=tuple(metadata.get("finalizers") or ()),
    )


def _has_owner(metadata: Manifest, job_uid: str) -> bool:
    """Whether an object is controlled by the job with this uid."""
    owners = metadata.get("ownerReferences") or ()
    return any(it.get("controller") and (it.get("kind"), it.get("uid")) == (KIND, job_uid) for it in owners)


def _fits(name: str, labels: Mapping[str, str], role: Role, replica: int, attempt: int, index: int) -> bool:
    """Whether a pod with these labels has this name; one that was restarted in place is named after an earlier one."""
    job = labels.get(JOB_LABEL, "")
    if role is Role.COORDINATOR:
        return name == coordinator_name(job)
    if name == pod_name(job, replica, attempt, index):
        return True
    number = name.removeprefix(f"{job}-r{replica}-a").removesuffix(f"-{index}")
    return number.isdecimal() and int(number) < attempt and name == pod_name(job, replica, int(number), index)


def node_view(node: Manifest) -> NodeView:
    """Turn a node into a view."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    conditions = status.get("conditions") or ()
    told: Manifest = next((it for it in conditions if it.get("type") == "Ready"), {})
    ready = told.get("status") or "Unknown"
    return NodeView(
        name=node["metadata"]["name"],
        ready=ready,
        not_ready_since=None if ready == "True" else seconds(told.get("lastTransitionTime")),
        unschedulable=bool(spec.get("unschedulable")),
        taints=frozenset(
            (it.get("key", ""), it.get("value") or "", it.get("effect", "")) for it in spec.get("taints") or ()
        ),
        conditions=_conditions(status),
    )


def budget_view(job: Job, budget: Manifest | None) -> BudgetView:
    """Turn what has the name of the job's disruption budget into a view; None: nothing has."""
    if budget is None:
        return BudgetView()
    metadata = budget["metadata"]
    return BudgetView(
        uid=metadata.get("uid", ""),
        foreign=not owned(job, budget),
        going="deletionTimestamp" in metadata,
        min_available=(budget.get("spec") or {}).get("minAvailable"),
    )


def _conditions(status: Manifest) -> frozenset[tuple[str, str]]:
    return _shared(tuple((it.get("type", ""), it.get("status", "")) for it in status.get("conditions") or ()))


@lru_cache(maxsize=1024)
def _shared(conditions: tuple[tuple[str, str], ...]) -> frozenset[tuple[str, str]]:
    """Thousands of pods have the same few conditions: one set of each is enough."""
    return frozenset(conditions)


def _labels(pod: Manifest) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _disruption(status: Manifest) -> tuple[str, str]:
    """Why Kubernetes itself took the pod away (condition DisruptionTarget)."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return condition.get("reason") or "", condition.get("message") or ""
    return "", ""


def _placed(status: Manifest) -> float | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "True":
            return seconds(condition.get("lastTransitionTime"))
    return None


_TAKES_ITS_TIME = ("ContainerCreating", "PodInitializing")


def _hold(status: Manifest) -> Hold | None:
    """The scheduler comes first; then containers in the order in which they start."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            gated = condition.get("reason") == "SchedulingGated"
            return Hold("SchedulingGated" if gated else "Unschedulable", condition.get("message") or "")
    for part in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(part) or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") and waiting["reason"] not in _TAKES_ITS_TIME:
                words = waiting.get("message") or container.get("image") or ""
                return Hold(waiting["reason"], f"container {container['name']}: {waiting['reason']}: {words}")
    return None
