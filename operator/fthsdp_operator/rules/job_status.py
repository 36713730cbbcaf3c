"""What a job's status says, given how its replicas stand: numbers, one word, conditions, milestones."""

from __future__ import annotations

from typing import Any, Literal

from fthsdp_operator.api import (
    COMING,
    Condition,
    ConditionReason,
    ConditionType,
    CoordinatorStatus,
    EndReason,
    Job,
    JobState,
    JobStatus,
    ReplicaState,
    ReplicaStatus,
)
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import Observed
from fthsdp_operator.rules import deadlines, disruption, policy, run
from fthsdp_operator.rules.actions import Event
from fthsdp_operator.rules.replicas import READY
from fthsdp_operator.rules.roll import STALLED, current_revision, progress

__all__ = ["PROGRESS", "milestones", "newest_failure", "status_of"]

HELD: Literal["CoordinatorHeld"] = "CoordinatorHeld"
"""Reason of the condition Stalled when the coordinator's pod does not go."""
WAITS: Literal["CoordinatorWaits"] = "CoordinatorWaits"
"""Reason of the condition Stalled when the coordinator's pod does not start."""
TAKEN: Literal["PodNameTaken"] = "PodNameTaken"
"""Reason of the condition Stalled when a pod that is not the job's has the name of one that is to be created."""
PROGRESS = 10.0
"""Seconds from one look at the numbers that change with every step to the next that is written down."""


def status_of(
    job: Job,
    observed: Observed,
    entries: tuple[ReplicaStatus, ...],
    now: float,
    *,
    over: bool = False,
    coordinator: CoordinatorStatus | None = None,
    names_taken: str = "",
    state: JobState | None = None,
    verdict: tuple[EndReason, str] | None = None,
    completion_time: float | None = None,
) -> JobStatus:
    """Return the status of a job whose replicas stand like this; ``state`` where it does not follow from them.

    ``names_taken``: a sentence about pods of others in the way of its own.
    """
    before, wanted = job.status, job.spec.replicas
    # A spare trains from the decision on that takes out somebody else, and at the end it has finished too.
    there = sum(entry.state in (*READY, ReplicaState.FINISHED) for entry in entries)
    ready = min(there, wanted)
    start_time = before.start_time if before.start_time is not None or not ready else now
    state = state or _state(job, observed, ready, over=over, started=start_time is not None)
    return JobStatus(
        observed_generation=job.metadata.generation,
        state=state,
        ready=f"{ready}/{wanted}",
        spares=f"{min(there - ready, job.spec.spares)}/{job.spec.spares}" if job.spec.spares else None,
        replicas=min(sum(_has_pods(observed, entry) for entry in entries), wanted),
        ready_replicas=ready,
        abandoned_replicas=sum(entry.state is ReplicaState.ABANDONED for entry in entries),
        restarting_replicas=sum(entry.state in COMING and entry.attempt > 0 for entry in entries),
        selector=render.selector(job.name),
        current_revision=current_revision(job, observed, entries),
        update_revision=job.spec.revision,
        updated_replicas=sum(entry.revision == job.spec.revision and _has_pods(observed, entry) for entry in entries),
        restarts=sum(entry.restarts for entry in entries),
        **_progress(job, observed, now, moved=(state, f"{ready}/{wanted}") != (before.state, before.ready)),
        last_failure=newest_failure(entries),
        conditions=_conditions(job, observed, entries, state, ready, names_taken, verdict, now),
        replica_statuses=policy.fitting(entries),
        coordinator=coordinator or before.coordinator,
        disruption_budget=disruption.recorded(job, observed),
        avoided_nodes=before.avoided_nodes,
        node_faults=before.node_faults,
        start_time=start_time,
        completion_time=completion_time,
    )


def _progress(job: Job, observed: Observed, now: float, *, moved: bool) -> dict[str, Any]:
    """Return the numbers that change with every step. Written each time, they alone would keep an API server busy."""
    before = job.status
    due = before.progress_time is None or now - before.progress_time >= PROGRESS
    step = run.step(job, observed)
    newest = {
        "step": step,
        "loss": run.loss(job, observed),
        "samples_per_second": run.samples_per_second(observed),
        "tokens_per_second": run.tokens_per_second(job, observed),
        "effective_training_time": run.effective_training_time(job, observed),
    }
    known = {name: getattr(before, name) for name in newest}
    first = not before.step and step > 0
    final = observed.coordinator is not None and observed.coordinator.finished
    if newest == known or observed.coordinator is None or not (due or moved or first or final):
        return known | {"progress_time": before.progress_time}
    return newest | {"progress_time": now}


def _has_pods(observed: Observed, entry: ReplicaStatus) -> bool:
    """Those that an abandoned replica has left behind do not count."""
    return entry.state is not ReplicaState.ABANDONED and bool(observed.group(entry.index, entry.attempt))


def _state(job: Job, observed: Observed, ready: int, *, over: bool, started: bool) -> JobState:
    if over:
        return JobState.RUNNING
    if not started:
        return JobState.STARTING if any(pod.node and not pod.over for pod in observed.trainers) else JobState.PENDING
    if ready < job.spec.min_replicas or (observed.coordinator is not None and observed.coordinator.paused):
        return JobState.PAUSED
    return JobState.RUNNING if ready >= job.spec.replicas else JobState.DEGRADED


def newest_failure(entries: tuple[ReplicaStatus, ...]) -> str | None:
    """Say in one line what failed last."""
    failures = [(entry.last_failure.time, entry.index, entry.last_failure) for entry in entries if entry.last_failure]
    if not failures:
        return None
    _, index, failure = max(failures, key=lambda item: item[0])
    return policy.failure_line(index, failure)


def _conditions(
    job: Job,
    observed: Observed,
    entries: tuple[ReplicaStatus, ...],
    state: JobState,
    ready: int,
    names_taken: str,
    verdict: tuple[EndReason, str] | None,
    now: float,
) -> tuple[Condition, ...]:
    wanted, least = job.spec.replicas, job.spec.min_replicas
    away = ", ".join(f"replica {e.index} is {e.state}" for e in entries if e.state not in _CALM)
    enough = ready >= least and state not in (JobState.PAUSED, JobState.SUSPENDED, JobState.FAILED)
    training = f"{ready} of {wanted} replicas train, minReplicas is {least}"
    short = state in (JobState.DEGRADED, JobState.PAUSED)
    stall = _stall(job, observed, entries, names_taken, now, rests=state in _AT_REST)
    rows: tuple[tuple[ConditionType, bool, ConditionReason, str], ...] = (
        ("Accepted", not observed.foreign, *_acceptance(observed)),
        ("Available", enough, "EnoughReplicas" if enough else "TooFewReplicas", training),
        ("Progressing", *_rolling(job, observed, entries, state)),
        ("Degraded", short, "ReplicasMissing" if short else "NoneMissing", away if short else ""),
        ("Stalled", stall[0] != "NobodyWaits", *stall),
        ("Suspended", state is JobState.SUSPENDED, *_suspension(job, observed)),
        ("Complete", state is JobState.COMPLETE, *_ending(state, JobState.COMPLETE, verdict)),
        ("Failed", state is JobState.FAILED, *_ending(state, JobState.FAILED, verdict)),
    )
    return tuple(_condition(job, *row, now=now) for row in rows)


def _suspension(job: Job, observed: Observed) -> tuple[ConditionReason, str]:
    if not job.spec.suspend:
        return "SuspendIsFalse", ""
    if job.spec.checkpoint is not None:
        return "SuspendIsTrue", "the job goes on from its newest checkpoint when it is resumed"
    lost = f"no checkpoint is set, so its state of step {run.step(job, observed)} is gone"
    return "SuspendIsTrue", f"{lost}: the job begins anew when it is resumed" if run.step(job, observed) else ""


def _rolling(
    job: Job, observed: Observed, entries: tuple[ReplicaStatus, ...], state: JobState
) -> tuple[bool, ConditionReason, str]:
    if state in _AT_REST:
        return False, "NotRunning", ""
    return progress(job, observed, entries)


def _acceptance(observed: Observed) -> tuple[ConditionReason, str]:
    if not observed.foreign:
        return "Valid", ""
    taken = ", ".join(f"{kind} {name}" for kind, name in sorted(observed.foreign))
    return "NameTaken", f"{taken}: there already and not of this job; delete it, or give the job another name"


def _stall(
    job: Job, observed: Observed, entries: tuple[ReplicaStatus, ...], names_taken: str, now: float, *, rests: bool
) -> tuple[ConditionReason, str]:
    """Return what is said first where several things are to be said: what keeps most others from going on."""
    quota = "exceeded quota" in observed.trouble
    found: tuple[tuple[ConditionReason, str], ...] = (
        (HELD, "" if rests else deadlines.held(observed, now)),
        (TAKEN, names_taken),
        ("QuotaExceeded" if quota else "CallRefused", observed.trouble),
        (WAITS, "" if rests else deadlines.coordinator_waits(observed, now)),
        ("ReplicasWait", deadlines.stalled(entries, now)),
        ("BudgetNameTaken", disruption.taken(job, observed)),
    )
    return next((one for one in found if one[1]), ("NobodyWaits", ""))


_AT_REST = (JobState.SUSPENDED, JobState.COMPLETE, JobState.FAILED)
"""States of a job that needs no coordinator."""
_CALM = (ReplicaState.ACTIVE, ReplicaState.SPARE, ReplicaState.FINISHED, ReplicaState.REMOVED)


def _ending(state: JobState, end: JobState, verdict: tuple[EndReason, str] | None) -> tuple[ConditionReason, str]:
    return verdict if verdict is not None and state is end else ("NotEnded", "")


def _condition(
    job: Job, kind: ConditionType, holds: bool, reason: ConditionReason, message: str, *, now: float
) -> Condition:
    before = _condition_of(job.status, kind)
    status = "True" if holds else "False"
    since = before.last_transition_time if before is not None and before.status == status else now
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=since,
        observed_generation=job.metadata.generation,
    )


def milestones(job: Job, status: JobStatus) -> tuple[Event, ...]:
    """Events that follow from how the job's state moved, its roll, and what keeps its pods."""
    return (*_news_of_the_state(job, status), *_news_of_the_roll(job, status), *_news_of_the_pods(job, status))


def _news_of_the_pods(job: Job, status: JobStatus) -> tuple[Event, ...]:
    before, after = (_condition_of(it, "Stalled") for it in (job.status, status))
    known = None if before is None else before.reason
    news = [reason for reason in (HELD, TAKEN, WAITS) if after is not None and after.reason == reason != known]
    return tuple(Event(warning=True, reason=reason, message=after.message) for reason in news if after is not None)


def _news_of_the_roll(job: Job, status: JobStatus) -> tuple[Event, ...]:
    before, after = (_condition_of(it, "Progressing") for it in (job.status, status))
    if before is None or after is None or before.reason == after.reason:
        return ()
    if after.reason == STALLED:
        return (Event(warning=True, reason=STALLED, message=after.message),)
    if after.reason == "NoRoom":
        return (Event(warning=True, reason="NoRoom", message=after.message),)
    if after.reason == "UpToDate" and before.reason in (STALLED, "NoRoom", "Rolling", "Recreating"):
        return (
            Event(reason="RolledOut", message=f"all replicas run the template of revision {status.update_revision}"),
        )
    return ()


def _condition_of(status: JobStatus, kind: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == kind), None)


def _news_of_the_state(job: Job, status: JobStatus) -> tuple[Event, ...]:
    if job.status.state is status.state:
        return ()
    training = f"{status.ready} replicas train"
    if status.state is JobState.RUNNING:
        return (Event(reason="Running", message=training),)
    if status.state is JobState.PAUSED:
        return (Event(warning=True, reason="Paused", message=f"{training}, minReplicas is {job.spec.min_replicas}"),)
    if status.state is JobState.SUSPENDED:
        suspended = Event(reason="Suspended", message="spec.suspend is true: all pods are deleted")
        lost = job.spec.checkpoint is None and status.step > 0
        condition = _condition_of(status, "Suspended")
        message = "" if condition is None else condition.message
        return (suspended, *([Event(warning=True, reason="StateLost", message=message)] if lost else []))
    return ()
