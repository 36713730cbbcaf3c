"""The rules for the coordinator's pod: it is kept there, and its loss is nobody's failure."""

from __future__ import annotations

import math

from fthsdp_operator.api import CoordinatorStatus, Job
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import Observed, PodView
from fthsdp_operator.rules import deadlines, nodes, policy
from fthsdp_operator.rules.actions import Create, Event, Step, by_force, delete

__all__ = ["keep_coordinator"]


def keep_coordinator(job: Job, observed: Observed, now: float, *, over: bool) -> tuple[CoordinatorStatus, Step]:
    """Keep the coordinator's pod there. Its loss is nobody's failure: training goes on without it."""
    before, pod = job.status.coordinator, observed.coordinator_pod
    if pod is None:
        return (before, Step()) if over else _start(job, observed, now)
    seen = {"pod_uid": pod.uid, "recent_starts": () if _is_outdated(job, pod) else before.recent_starts}
    return before.model_copy(update=seen), _keep(job, observed, pod, now, over=over)


def _is_outdated(job: Job, pod: PodView) -> bool:
    """It was started with other settings: that it goes is somebody's wish, and spaces out no further start."""
    return pod.config != render.coordinator_config(job)


def _keep(job: Job, observed: Observed, pod: PodView, now: float, *, over: bool) -> Step:
    if pod.ended and not over:
        # Somebody's finalizer may keep it there.
        wake_at = now if pod.deleted is None else now + nodes.OVERDUE
        return Step(actions=(by_force(pod, "it has ended, and the run has not"),), wake_at=wake_at)
    if pod.gone_by is not None:
        overdue = pod.gone_by + nodes.OVERDUE  # by force: two coordinators can never both write the epoch
        lost = by_force(pod, "it should have ended by now, and its node says nothing")
        return Step(actions=(lost,)) if now >= overdue else Step(wake_at=overdue)
    if observed.coordinator is None and nodes.is_dead(job, observed.nodes.get(pod.node or ""), now):
        return Step(actions=delete([pod], "it does not answer, and its node has not been Ready for too long"))
    if _is_outdated(job, pod) and not _leaving(job, observed, now):
        return Step(actions=delete([pod], "it was started with other settings"))
    said_at = math.inf if pod.created is None or pod.phase != "Pending" else pod.created + deadlines.STALLED
    return Step(wake_at=said_at if said_at > now else math.inf)


def _leaving(job: Job, observed: Observed, now: float) -> bool:
    """Replicas that were scaled away are still there; a coordinator that knows them not would not let them leave.

    One whose node does not answer is not waited for: its pod may never go.
    """
    surplus = (pod for pod in observed.trainers if pod.replica >= job.spec.groups)
    return any(not pod.ended and (pod.gone_by is None or now < pod.gone_by + nodes.OVERDUE) for pod in surplus)


def _start(job: Job, observed: Observed, now: float) -> tuple[CoordinatorStatus, Step]:
    before, rules = job.status.coordinator, job.spec.failure_policy
    create = Create(manifest=render.coordinator_pod(job, image=observed.coordinator_image))
    if before.starts and before.pod_uid is None:
        return before, Step(actions=(create,))  # that start was counted, and its pod never seen
    starts = policy.recent(before.recent_starts, rules.per_replica.window_seconds, now)
    allowed_at = starts[-1] + policy.wait_before(len(starts) - 1, rules.backoff) if starts else now
    if allowed_at > now:
        return before, Step(wake_at=allowed_at)
    after = CoordinatorStatus(starts=before.starts + 1, recent_starts=(*starts, now))
    lost = Event(warning=True, reason="CoordinatorReplaced", message=f"start {after.starts} of the coordinator's pod")
    return after, Step(actions=(create,), events=(lost,) if before.starts else ())
