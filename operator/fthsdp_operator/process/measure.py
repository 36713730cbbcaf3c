"""What one look at a job says in numbers: replicas and time, failures, how long each stage of a recovery took. Pure.

Stages are told apart by what successive looks see, all by the operator's own clock. So a stage is known as exactly as
looks are frequent: a change of a pod leads to one at once, who trains is asked for every two seconds, and a stage that
begins and ends between two looks counts to the one before it. Only *detect* needs a time of somebody else's clock, and
is left out where nobody noted one. A recovery that was under way while the operator started is not measured: nobody
saw its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fthsdp_operator.api import COMING, Failure, Job, JobState, JobStatus, ReplicaState, ReplicaStatus, RuleAction
from fthsdp_operator.api.reasons import REASONS, meanings
from fthsdp_operator.observed.observe import Observed
from fthsdp_operator.rules.actions import Plan
from fthsdp_operator.rules.replicas import READY, is_outdated

__all__ = ["LONGEST_GAP", "ROLLS", "Measured", "Recovery", "Stage", "Tally", "measure"]

LONGEST_GAP = 60.0
"""Seconds between two looks above which nobody can say what happened between them: such a time is not counted."""


ROLLS: tuple[str, ...] = tuple(meanings(REASONS["Progressing"]))
"""How a changed template may stand: the reasons of the condition Progressing."""


class Stage(StrEnum):
    """A part of a recovery."""

    DETECT = "detect"
    """From the first pod's end, or its deletion, to the look that counted the failure."""
    EVICT = "evict"
    """From there until every pod of the failed attempt was asked to stop."""
    SCHEDULE = "schedule"
    """From the creation of the new pods until all have a node; what was waited for by choice (backoff) is before it."""
    START = "start"
    """From there until all run."""
    JOIN = "join"
    """From there until the replica trains, or is a ready spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A replica on its way back. Times are Unix times in seconds."""

    attempt: int
    failed: float
    """When the first failure since it trained last was counted."""
    evicting: float | None
    """When its eviction began; None when it is over."""
    stage: Stage | None = None
    """Schedule, start or join; None before its pods are created."""
    since: float = 0.0
    """When that stage began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What is known of a job after a look, and needed at the next."""

    seen: float
    """When it was looked at, Unix time in seconds."""
    state: JobState
    step: int
    replicas: Mapping[ReplicaState, int]
    """Replicas in each state."""
    roll: str
    """How a changed template stands: the reason of its condition Progressing."""
    outdated: int
    """Replicas that run another template than the spec's."""
    runs: bool
    """It is meant to run: neither suspended, nor ended, nor being deleted."""
    available: int
    """Replicas that train."""
    desired: int
    """Replicas that should."""
    avoided: int = 0
    """Nodes that its new pods keep away from."""
    cornered: int = 0
    """Replicas with pods on such nodes."""
    available_seconds: float = 0.0
    desired_seconds: float = 0.0
    """Sums over the time in which it was meant to run; how long it waits to begin counts as well."""
    recoveries: Mapping[int, Recovery] = field(default_factory=dict)
    """Of the replicas that are on their way back, by index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a look added."""

    tally: Tally
    failures: tuple[tuple[str, str], ...] = ()
    """Reason of each failure that was noticed, and what came of it: an action of failurePolicy, or None when the
    run was over."""
    stages: tuple[tuple[Stage, float], ...] = ()
    """Stages that ended, with the seconds that they took."""
    outages: tuple[float, ...] = ()
    """Seconds from a failure until the replica trained again, backoff and further failures included."""


def measure(before: Tally | None, job: Job, observed: Observed, todo: Plan, now: float) -> Measured:
    """Return what changed from the status that ``job`` has to the one of its plan.

    To be called when that status was written, once for each. ``before``: of the look before; None at the first.
    """
    known = before.recoveries if before is not None else {}
    failures = tuple(_failures(job, todo))
    stages: list[tuple[Stage, float]] = []
    outages: list[float] = []
    recoveries: dict[int, Recovery] = {}
    for entry in todo.status.replica_statuses:
        recovery, failed = known.get(entry.index), _new_failure(job, entry)
        if failed is not None:
            stages += _detected(observed, failed, now)
        if _restarted(job, entry):
            recovery = _begin(recovery, observed, entry, now)
        if recovery is None or recovery.attempt != entry.attempt or entry.state not in (*COMING, *READY):
            continue
        after, ended = _advance(job, recovery, observed, entry, now)
        stages += ended
        if entry.state in READY:
            outages.append(now - recovery.failed)
        else:
            recoveries[entry.index] = after
    tally = _count(before, job, observed, todo, now, recoveries)
    return Measured(tally=tally, failures=failures, stages=tuple(stages), outages=tuple(outages))


# --- failures -------------------------------------------------------------------------------------------------------


def _failures(job: Job, todo: Plan) -> Iterator[tuple[str, str]]:
    for entry in todo.status.replica_statuses:
        failure = _new_failure(job, entry)
        if failure is not None:
            yield _word(failure.reason), _action(job, todo, entry)


def _new_failure(job: Job, entry: ReplicaStatus) -> Failure | None:
    """Return the failure of a replica that its status before did not have; an exit code that came later is no other."""
    before = job.status.replica(entry.index)
    known = before.last_failure if before is not None else None
    failure = entry.last_failure
    return failure if failure is not None and (known is None or known.time != failure.time) else None


def _action(job: Job, todo: Plan, entry: ReplicaStatus) -> str:
    """Say what was done, which is not always what a rule asked for."""
    if _restarted(job, entry):
        asked = entry.last_failure.action if entry.last_failure is not None else None
        return str(RuleAction.RESTART_REPLICA if asked is None else asked)
    if entry.state is ReplicaState.ABANDONED:
        return str(RuleAction.ABANDON_REPLICA)
    return str(RuleAction.FAIL_JOB) if todo.status.state is JobState.FAILED else "None"


def _restarted(job: Job, entry: ReplicaStatus) -> bool:
    before = job.status.replica(entry.index)
    return entry.restarts > (before.restarts if before is not None else 0)


def _word(reason: str) -> str:
    """Some reasons are a kubelet's or anybody's: what is no word would make a series for each text."""
    return reason if re.fullmatch(r"[A-Za-z]{1,40}", reason) else "Other"


def _detected(observed: Observed, failure: Failure, now: float) -> Iterator[tuple[Stage, float]]:
    pod = observed.last_seen(failure.pod)
    if pod is None:
        return
    times = [pod.deleted, pod.exit.time if pod.exit is not None else None]
    known = [time for time in times if time is not None]
    if known:
        yield Stage.DETECT, max(0.0, now - min(known))


# --- recoveries -----------------------------------------------------------------------------------------------------


def _begin(before: Recovery | None, observed: Observed, entry: ReplicaStatus, now: float) -> Recovery:
    failed = before.failed if before is not None else now
    evicting = None if _evicted(observed, entry) else now
    return Recovery(attempt=entry.attempt, failed=failed, evicting=evicting)


def _evicted(observed: Observed, entry: ReplicaStatus) -> bool:
    return all(pod.deleted is not None or pod.over for pod in observed.older(entry.index, entry.attempt))


def _advance(
    job: Job, recovery: Recovery, observed: Observed, entry: ReplicaStatus, now: float
) -> tuple[Recovery, list[tuple[Stage, float]]]:
    ended: list[tuple[Stage, float]] = []
    if recovery.evicting is not None and _evicted(observed, entry):
        ended.append((Stage.EVICT, now - recovery.evicting))
        recovery = replace(recovery, evicting=None)
    if recovery.stage is None and entry.state is not ReplicaState.BACKOFF:
        recovery = replace(recovery, stage=Stage.SCHEDULE, since=now)
    for stage, over in _progress(job, observed, entry):
        if recovery.stage is stage and over:
            ended.append((stage, now - recovery.since))
            recovery = replace(recovery, stage=_NEXT.get(stage, stage), since=now)
    return recovery, ended


_NEXT = {Stage.SCHEDULE: Stage.START, Stage.START: Stage.JOIN}


def _progress(job: Job, observed: Observed, entry: ReplicaStatus) -> Iterator[tuple[Stage, bool]]:
    """Yield the stages in their order, and whether each is over; who trains has done all of them."""
    pods, back = observed.group(entry.index, entry.attempt), entry.state in READY
    complete = len(pods) == job.spec.pods_per_replica
    yield Stage.SCHEDULE, back or (complete and all(pod.node for pod in pods))
    yield Stage.START, back or (complete and all(pod.phase == "Running" for pod in pods))
    yield Stage.JOIN, back


# --- replicas and time ----------------------------------------------------------------------------------------------


def _count(
    before: Tally | None, job: Job, observed: Observed, todo: Plan, now: float, recoveries: Mapping[int, Recovery]
) -> Tally:
    status = todo.status
    counts = dict.fromkeys(ReplicaState, 0)
    for entry in status.replica_statuses:
        counts[entry.state] += 1
    runs = not (status.terminal or status.state is JobState.SUSPENDED or job.metadata.deletion_timestamp is not None)
    avoided = {node.name for node in status.avoided_nodes if now < node.until} if runs else set()
    gap = _gap(before, now)
    return Tally(
        seen=now,
        state=status.state,
        step=status.step,
        replicas=counts,
        roll=_roll(status),
        outdated=sum(is_outdated(job, entry) for entry in status.replica_statuses),
        runs=runs,
        available=0 if status.state is JobState.PAUSED else status.ready_replicas,
        desired=job.spec.replicas,
        avoided=len(avoided),
        cornered=_cornered(observed, avoided),
        available_seconds=before.available_seconds + before.available * gap if before is not None else 0.0,
        desired_seconds=before.desired_seconds + before.desired * gap if before is not None else 0.0,
        recoveries=recoveries,
    )


def _cornered(observed: Observed, avoided: Collection[str]) -> int:
    """Count the replicas on nodes that are avoided: they had come before, or there was no room anywhere else."""
    if not avoided:
        return 0
    return len({pod.replica for pod in observed.trainers if pod.alive and pod.node in avoided})


def _roll(status: JobStatus) -> str:
    """A job whose spec was never understood has no such condition."""
    return next((it.reason for it in status.conditions if it.type == "Progressing"), "NotRunning")


def _gap(before: Tally | None, now: float) -> float:
    """Return the seconds since the look before, 0 if what it saw does not count or may not have lasted."""
    if before is None or not before.runs:
        return 0.0
    gap = now - before.seen
    return gap if 0 <= gap <= LONGEST_GAP else 0.0
