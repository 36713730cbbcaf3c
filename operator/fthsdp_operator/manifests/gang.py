"""How schedulers are told that the pods of a replica belong together. Pure.

One group for each attempt of a replica: a group that was placed once counts as placed, whatever becomes of its pods,
so the next attempt needs one of its own; and one over all replicas would keep them from training while one is away.
Each provider has a row in the tables here, and nothing else knows them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from fthsdp_operator.api import POD_INDEX_LABEL, GangProvider, Job

__all__ = ["GROUP_API", "group_kind", "group_name", "group_spec", "join"]

Manifest = dict[str, Any]

GROUP_API: Mapping[GangProvider, str] = {
    GangProvider.NATIVE: "scheduling.k8s.io/v1beta1",
    GangProvider.VOLCANO: "scheduling.volcano.sh/v1beta1",
    GangProvider.COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
}
"""API version of the PodGroup of those that have one. Kueue makes a group of the pods' labels."""


def group_kind(provider: GangProvider) -> str:
    """Return what the kind of a provider's groups is called here, since several have one of the same name."""
    return f"PodGroup.{GROUP_API[provider].partition('/')[0]}"


def group_name(job: Job, replica: int, attempt: int) -> str:
    """Return the name of an attempt's group: no longer than a label, and another one for each job of the same name.

    Else the pods of a job would join the group that an earlier one has left, and lose it to the garbage collector.
    """
    whose = hashlib.blake2b(job.metadata.uid.encode(), digest_size=3).hexdigest()
    return f"{job.name}-{whose}-r{replica}-a{attempt}"


def group_spec(job: Job) -> Manifest:
    """Return the spec of a group of the job's provider, which has one."""
    return _SPECS[job.spec.gang.provider](job)


def join(spec: Manifest, labels: Manifest, annotations: Manifest, job: Job, *, replica: int, attempt: int) -> None:
    """Make a pod a member of its attempt's group: its spec, labels and annotations are changed in place."""
    member = _MEMBERS.get(job.spec.gang.provider)
    if member is not None:
        member(spec, labels, annotations, job, group_name(job, replica, attempt))


# --- the groups -----------------------------------------------------------------------------------------------------


def _native_group(job: Job) -> Manifest:
    # Half of a replica is of no use to anybody, so one of its pods is only preempted together with the others.
    policy = {"gang": {"minCount": job.spec.pods_per_replica}}
    return {"schedulingPolicy": policy, "disruptionMode": {"all": {}}, **_priority(job)}


def _volcano_group(job: Job) -> Manifest:
    queue = {} if job.spec.gang.queue is None else {"queue": job.spec.gang.queue}
    return {"minMember": job.spec.pods_per_replica, **queue, **_priority(job)}


def _coscheduling_group(job: Job) -> Manifest:
    limit = job.spec.gang.schedule_timeout_seconds
    wait = {} if limit is None else {"scheduleTimeoutSeconds": limit}
    return {"minMember": job.spec.pods_per_replica, **wait}


def _priority(job: Job) -> Manifest:
    """A group has the priority of its pods."""
    name = job.spec.template["spec"].get("priorityClassName")
    return {"priorityClassName": name} if name else {}


_SPECS: Mapping[GangProvider, Callable[[Job], Manifest]] = {
    GangProvider.NATIVE: _native_group,
    GangProvider.VOLCANO: _volcano_group,
    GangProvider.COSCHEDULING: _coscheduling_group,
}

# --- their members --------------------------------------------------------------------------------------------------


def _native_member(spec: Manifest, labels: Manifest, annotations: Manifest, job: Job, group: str) -> None:
    spec["schedulingGroup"] = {"podGroupName": group}


def _volcano_member(spec: Manifest, labels: Manifest, annotations: Manifest, job: Job, group: str) -> None:
    annotations["scheduling.k8s.io/group-name"] = group
    spec.setdefault("schedulerName", "volcano")


def _coscheduling_member(spec: Manifest, labels: Manifest, annotations: Manifest, job: Job, group: str) -> None:
    labels["scheduling.x-k8s.io/pod-group"] = group
    spec.setdefault("schedulerName", "scheduler-plugins-scheduler")


def _kueue_member(spec: Manifest, labels: Manifest, annotations: Manifest, job: Job, group: str) -> None:
    """The pods of an attempt are alike, so the first of them tells Kueue all; and none of them is ever replaced, so the
    group gives its quota back when they have ended, instead of waiting for others."""
    labels |= {"kueue.x-k8s.io/queue-name": str(job.spec.gang.queue), "kueue.x-k8s.io/pod-group-name": group}
    annotations |= {
        "kueue.x-k8s.io/pod-group-total-count": str(job.spec.pods_per_replica),
        "kueue.x-k8s.io/pod-group-fast-admission": "true",
        "kueue.x-k8s.io/pod-group-pod-index-label": POD_INDEX_LABEL,
        "kueue.x-k8s.io/retriable-in-group": "false",
    }


_MEMBERS: Mapping[GangProvider, Callable[[Manifest, Manifest, Manifest, Job, str], None]] = {
    GangProvider.NATIVE: _native_member,
    GangProvider.VOLCANO: _volcano_member,
    GangProvider.COSCHEDULING: _coscheduling_member,
    GangProvider.KUEUE: _kueue_member,
}
