"""The rules about time: what keeps a replica from training, and when that has lasted too long. Pure.

What a replica waits for stands in the status with the time at which that began, by our own clock: others may be minutes
off, and an operator that is restarted goes on counting. While the coordinator does not answer nothing is counted.
"""

from __future__ import annotations

import math

from fthsdp_operator.api import Failure, Job, ReplicaState, ReplicaStatus, RuleAction, Waiting
from fthsdp_operator.observed.observe import Hold, Observed, PodView
from fthsdp_operator.rules import failure_rules

__all__ = [
    "HELD",
    "LONGEST",
    "STALLED",
    "coordinator_waits",
    "expires_at",
    "held",
    "is_late",
    "kept_by_finalizers",
    "overdue",
    "stalled",
    "waiting",
]

STALLED = 300.0
"""Seconds after which what a replica waits for is said to need somebody: machines that are ordered come in minutes."""
HELD = 10.0
"""Seconds past its grace period after which a coordinator's pod is said not to go: it was removed by force by then."""
_SLOW_SCHEDULER = 10.0
"""Seconds in which a scheduler has said something about a new pod."""
_IMAGE = (
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RegistryUnavailable",
    "SignatureValidationFailed",
)
_JOINED = (ReplicaState.CATCHING_UP, ReplicaState.ACTIVE, ReplicaState.SPARE)
_CRASHES, _CREATING = "CrashLoopBackOff", "ContainerCreating"
_UNSCHEDULABLE, _IMAGE_PULL_FAILED = "Unschedulable", "ImagePullFailed"
_GATED, _NOT_JOINED, _RUN_IS_OVER = "SchedulingGated", "NotJoined", "RunIsOver"
LONGEST = 256
"""Characters of a message that are kept."""
_LONGEST_LIST = 4
"""Replicas that a sentence speaks of."""


# --- what a replica waits for ---------------------------------------------------------------------------------------


def waiting(job: Job, observed: Observed, entry: ReplicaStatus, now: float, *, over: bool) -> Waiting | None:
    """Return what keeps a replica from training, and since when; None where it just takes its time, or trains."""
    if over:
        found = _over(observed, entry)
    elif _has_joined(observed, entry):
        return None
    else:
        found = _held(observed, entry, now) or _unknown(job, observed, entry)
    if found is None:
        return None
    pod, reason, message = found
    before, began = entry.waiting, now - STALLED if reason == _CREATING else now  # that is only seen after so long
    since = before.since if before is not None and before.reason == reason else began
    return Waiting(reason=reason, message=message[:LONGEST], pod=pod.name, since=since)


def _has_joined(observed: Observed, entry: ReplicaStatus) -> bool:
    """The coordinator knows it, or has known it and does not answer: with an image of a sidecar missing a pod stays
    Pending whose training container trains."""
    if observed.coordinator is None and entry.state in _JOINED:
        return True
    return observed.member(entry.index, entry.attempt) is not None


_Found = tuple[PodView, str, str]
"""A pod, what it waits for, and a sentence about that."""


def _over(observed: Observed, entry: ReplicaStatus) -> _Found | None:
    """All others have finished, and with the coordinator gone nobody will ever miss this one."""
    if observed.coordinator_pod is not None and observed.coordinator_pod.phase != "Succeeded":
        return None
    pod = next((pod for pod in observed.group(entry.index, entry.attempt) if pod.alive), None)
    return None if pod is None else (pod, _RUN_IS_OVER, f"{pod.name} is still there")


def _held(observed: Observed, entry: ReplicaStatus, now: float) -> _Found | None:
    """Once a pod runs, a container of it that waits is the kubelet's business: it restarts sidecars."""
    pods = observed.group(entry.index, entry.attempt).pending
    held = [(pod, pod.hold) for pod in pods if pod.hold is not None]
    held.sort(key=lambda one: one[1].reason == _CRASHES)  # what has an end comes first
    held += [(pod, _FORGOTTEN) for pod in pods if _is_forgotten(pod, now)]
    held += [(pod, _SLOW) for pod in pods if _is_slow(pod, now)]
    return next(((pod, _name(hold.reason), f"{pod.name}: {hold.message}") for pod, hold in held), None)


_FORGOTTEN = Hold(_UNSCHEDULABLE, "no scheduler has said anything about it")


def _is_forgotten(pod: PodView, now: float) -> bool:
    """A scheduler says at once why it has no place; when nobody does, there may be none of that name."""
    old = pod.created is not None and now - pod.created >= _SLOW_SCHEDULER
    return old and pod.node is None


_SLOW = Hold(
    _CREATING,
    "its containers do not start: a Secret or volume that cannot be mounted, a large image, an init container;"
    " kubectl describe pod says which",
)


def _is_slow(pod: PodView, now: float) -> bool:
    """It has had a node for long, and no kubelet says what keeps it from starting: that stands in events alone."""
    since = pod.created if pod.placed is None else pod.placed
    waits = pod.phase == "Pending" and pod.node is not None and pod.hold is None
    return waits and since is not None and now - since >= STALLED


def _name(reason: str) -> str:
    """Kubelets change between two words for one thing."""
    return _IMAGE_PULL_FAILED if reason in _IMAGE else reason


def _unknown(job: Job, observed: Observed, entry: ReplicaStatus) -> _Found | None:
    pods = observed.group(entry.index, entry.attempt)
    known = observed.coordinator
    if known is None or known.finished:
        return None
    if len(pods) < job.spec.pods_per_replica or not pods.all_run:
        return None
    leader = min(pods, key=lambda pod: pod.index)
    return leader, _NOT_JOINED, "all its pods run, and the coordinator has not heard of it"


# --- what has lasted too long ---------------------------------------------------------------------------------------


def overdue(job: Job, observed: Observed, entry: ReplicaStatus, now: float) -> Failure | None:
    """Return the failure of a replica that has waited for too long."""
    found = waiting(job, observed, entry, now, over=False)
    limit = None if found is None else _limit(job, found.reason)
    if found is None or limit is None or now - found.since < limit[1]:
        return None
    field, seconds = limit
    pod = next(pod for pod in observed.group(entry.index, entry.attempt) if pod.name == found.pod)
    failure = Failure(
        pod=pod.name,
        node=pod.node,
        reason="StartTimeout" if found.reason == _NOT_JOINED else found.reason,
        message=f"{found.message} (for {seconds} s, which is deadlines.{field})",
        time=now,
        during=entry.state,
    )
    failure = failure_rules.apply(job.spec.failure_policy.rules, failure, pod)
    return None if _gains_nothing(observed, entry, failure) else failure


def _limit(job: Job, reason: str) -> tuple[str, int] | None:
    """Return name and seconds of the deadline for what a replica waits for."""
    limits = job.spec.deadlines
    if reason == _UNSCHEDULABLE:
        return None if limits.schedule_seconds is None else ("scheduleSeconds", limits.schedule_seconds)
    return None if reason in (_GATED, _CREATING) else ("startSeconds", limits.start_seconds)


def _gains_nothing(observed: Observed, entry: ReplicaStatus, failure: Failure) -> bool:
    """To create pods anew that hold no node only sends them to the end of the scheduler's queue.

    And a sidecar that crashes while the others wait for it is started again by its kubelet: new pods would have the
    same one, and each would cost budget though the training has done nothing wrong.
    """
    if failure.rule is not None:
        return False
    if failure.reason == _CRASHES:
        return True
    placed = any(pod.node is not None for pod in observed.group(entry.index, entry.attempt))
    return failure.action is RuleAction.RESTART_REPLICA_FREE and failure.reason == _UNSCHEDULABLE and not placed


def is_late(entry: ReplicaStatus, now: float, grace: float) -> bool:
    """Whether a replica is still there so long after the run and its coordinator have ended, by our own clock."""
    waits = entry.waiting
    return waits is not None and waits.reason == _RUN_IS_OVER and now - waits.since >= grace


def expires_at(job: Job) -> float:
    """Return the Unix time at which the job has taken too long; infinity where it may take as long as it takes."""
    seconds, began = job.spec.deadlines.active_seconds, job.status.start_time
    return math.inf if seconds is None or began is None else began + seconds


def stalled(entries: tuple[ReplicaStatus, ...], now: float) -> str:
    """Return a sentence about replicas that wait for something that does not come by itself; empty for none."""
    stuck = [(it.index, it.waiting) for it in entries if it.waiting is not None and now - it.waiting.since >= STALLED]
    words = [f"replica {index}: {it.reason}: {it.message}" for index, it in stuck[:_LONGEST_LIST]]
    more = [f"and {len(stuck) - _LONGEST_LIST} more"] if len(stuck) > _LONGEST_LIST else []
    return "; ".join((*words, *more))


def coordinator_waits(observed: Observed, now: float) -> str:
    """Return a sentence about a coordinator's pod that has not started for long: all replicas wait for it.

    One that has run is restarted by its kubelet, and counts when it has not answered for as long. Empty for none.
    """
    pod = observed.coordinator_pod
    if pod is None or not pod.alive or pod.created is None or now < pod.created + STALLED:
        return ""
    if observed.coordinator is not None or (pod.phase != "Pending" and observed.silence < STALLED):
        return ""
    hold = pod.hold or (_FORGOTTEN if pod.phase == "Pending" and pod.node is None else None)
    hold = hold or (_SLOW if _is_slow(pod, now) else None)
    return "" if hold is None else f"{pod.name}: {_name(hold.reason)}: {hold.message}"[:LONGEST]


def held(observed: Observed, now: float) -> str:
    """Return a sentence about a coordinator's pod that does not go, and so keeps another one from being started.

    Their name is the same. Even removed by force, a pod stays until nobody's finalizer is left. Empty for none.
    """
    pod = observed.coordinator_pod
    if pod is None or pod.gone_by is None or now < pod.gone_by + HELD:
        return ""
    why = kept_by_finalizers(pod) or "removing it by force has not helped"
    return f"{pod.name} does not go, so no other coordinator can be started: {why}"[:LONGEST]


def kept_by_finalizers(pod: PodView) -> str:
    """Say which finalizers keep a pod; empty for none."""
    return f"its finalizers keep it: {', '.join(pod.finalizers)}" if pod.finalizers else ""
