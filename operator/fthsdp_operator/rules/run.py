"""What pods and coordinator say of the run as a whole: how far it is, whether it is over, who still takes part."""

from __future__ import annotations

import math
from collections.abc import Container

from fthsdp.coordinator.messages import Role
from fthsdp_operator.api import Job, ReplicaState, ReplicaStatus
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import Observed, PodView

__all__ = [
    "STOP_SLACK",
    "all_exited_well",
    "answers",
    "can_leave",
    "effective_training_time",
    "exited_well",
    "knows_the_members",
    "knows_who_trains",
    "loss",
    "run_is_over",
    "samples_per_second",
    "step",
    "stopped_by",
    "tokens_per_second",
    "trains",
    "waits_for_others",
]


def can_leave(job: Job, observed: Observed, replica: int, attempt: int, now: float) -> bool:
    """All pods of an attempt run, though asked to stop: it leaves at a step boundary by itself, which stalls nobody.

    To tell the coordinator that it is gone would break the step in flight.
    """
    pods = observed.group(replica, attempt)
    running = [pod for pod in pods if pod.phase == "Running" and not pod.reason]
    return len(running) == job.spec.pods_per_replica and all(p.gone_by is None or now < p.gone_by for p in running)


STOP_SLACK = 2.0
"""Seconds past its grace period after which a pod counts as stopped: its node does not answer, and may never."""


def stopped_by(observed: Observed, replicas: Container[int], now: float) -> float:
    """Return the Unix time at which the last training pod of these replicas counts as stopped; 0 when none runs.

    So do pods of other replicas that were asked to stop: of those that left together, any may write the checkpoint.
    """
    pods = (pod for pod in observed.trainers if pod.replica in replicas or pod.deleted is not None)
    return max((_stops_at(pod, now) for pod in pods), default=0.0)


def _stops_at(pod: PodView, now: float) -> float:
    if pod.ended:
        return 0.0
    at = math.inf if pod.gone_by is None else pod.gone_by + STOP_SLACK
    return at if at > now else 0.0


def answers(job: Job, observed: Observed) -> bool:
    """The coordinator answers, and has the job's present numbers."""
    pod = observed.coordinator_pod
    if pod is None or observed.coordinator is None:
        return False
    return pod.alive and pod.config == render.coordinator_config(job)


def knows_the_members(job: Job, observed: Observed) -> bool:
    """Beyond that the run has begun, though it may be paused: who is no member has nothing that could be lost."""
    known = observed.coordinator
    return known is not None and answers(job, observed) and any(it.role is Role.ACTIVE for it in known.replicas)


def knows_who_trains(job: Job, observed: Observed) -> bool:
    """Beyond that enough train for the coordinator to let somebody go at a boundary."""
    known = observed.coordinator
    return known is not None and not known.paused and knows_the_members(job, observed)


def run_is_over(observed: Observed) -> bool:
    """The run has reached its last step: who fails now is not started again, into a run without anybody else."""
    pod = observed.coordinator_pod
    exited = pod is not None and pod.phase == "Succeeded" and pod.deleted is None
    return exited or (observed.coordinator is not None and observed.coordinator.finished)


def trains(observed: Observed, entries: tuple[ReplicaStatus, ...]) -> bool:
    """Some pod still runs. One that is being deleted does not count: its node may never say that it stopped."""
    return any(
        pod.phase in ("Running", "Unknown") and pod.deleted is None
        for entry in entries
        if entry.state is not ReplicaState.REMOVED
        for pod in observed.group(entry.index, entry.attempt)
    )


def exited_well(job: Job, observed: Observed, entry: ReplicaStatus) -> bool:
    """All pods exited with 0. A replica that was asked to leave does so too, but one of its pods is being deleted."""
    ended = observed.group(entry.index, entry.attempt).leaving
    good = [pod for pod in ended if pod.phase == "Succeeded" and pod.deleted is None]
    return len(good) == job.spec.pods_per_replica


def all_exited_well(job: Job, observed: Observed) -> bool:
    """All replicas that were not abandoned exited with 0."""
    entries = [job.status.replica(index) or ReplicaStatus(index=index) for index in range(job.spec.groups)]
    counted = [entry for entry in entries if entry.state is not ReplicaState.ABANDONED]
    return all(exited_well(job, observed, entry) for entry in counted)


def waits_for_others(job: Job, observed: Observed) -> bool:
    """The coordinator waits until enough replicas are back: somebody is missing who ended too early."""
    known = observed.coordinator
    return known is not None and known.paused and not known.finished and not all_exited_well(job, observed)


def step(job: Job, observed: Observed) -> int:
    """The newest final step; a coordinator that has just started has seen none yet."""
    return (observed.coordinator.step if observed.coordinator is not None else 0) or job.status.step


def loss(job: Job, observed: Observed) -> float | None:
    """The newest loss. JSON has no NaN: a run that diverged shows none."""
    known = observed.coordinator
    return _finite(job.status.loss if known is None or not known.step else known.loss)


def samples_per_second(observed: Observed) -> float | None:
    """What the coordinator counts."""
    counted = observed.coordinator.samples_per_second if observed.coordinator is not None else None
    return None if counted is None else round(counted, 3)


def tokens_per_second(job: Job, observed: Observed) -> float | None:
    """The same in tokens, where the job says how many a sample has."""
    samples, tokens = samples_per_second(observed), job.spec.tokens_per_sample
    return None if samples is None or tokens is None else round(samples * tokens, 3)


def effective_training_time(job: Job, observed: Observed) -> float | None:
    """The newest figure; a coordinator that has just started has none yet."""
    known = observed.coordinator.effective_training_time if observed.coordinator is not None else None
    return job.status.effective_training_time if known is None else known


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
