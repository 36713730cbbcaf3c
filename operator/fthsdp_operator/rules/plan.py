"""The rules: what is to be done for a job, given what is there. Pure, and the only place that has them.

A plan is a status, actions and events, in this order: the executor writes the status first, and only when that write
succeeded does it act. So a restart is decided exactly once (the new attempt number is in the status before any pod of
the old one is deleted), and an operator that dies anywhere continues: everything that follows from a written status is
derived again from it and from what is there.

Everything is level-triggered. A replica is *Pending* while its pods are being created, and only while it is; from the
moment all of them were seen, a missing pod is one that somebody deleted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from fthsdp_operator.api import (
    KIND,
    MANAGER,
    Condition,
    EndReason,
    Job,
    JobState,
    JobStatus,
    ReplicaState,
    ReplicaStatus,
    SuccessPolicy,
    advice,
)
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import Observed, PodView
from fthsdp_operator.rules import deadlines, in_place, nodes, policy, replicas, run, taken
from fthsdp_operator.rules.actions import Action, Create, Delete, Event, Label, Plan, Step, Tell, delete, tell
from fthsdp_operator.rules.coordinator_pod import keep_coordinator
from fthsdp_operator.rules.disruption import keep_budget
from fthsdp_operator.rules.job_status import milestones, newest_failure, status_of
from fthsdp_operator.rules.pod_groups import with_groups
from fthsdp_operator.rules.roll import roll

__all__ = ["COORDINATOR_LINGER", "LONGEST_POLL", "POLL", "plan", "refuse"]

POLL = 2.0
"""Seconds after which a job that has pods is looked at again without any event: the coordinator's numbers move on."""
LONGEST_POLL = 10.0
"""The same, of a job whose coordinator has not answered for a while: what changes then is told by events."""
COORDINATOR_LINGER = 30.0
"""Seconds that a coordinator may take to exit by itself after the job is complete."""


def plan(job: Job, observed: Observed, now: float) -> Plan:
    """Return what to do for a job; ``now`` is Unix time in seconds. The same arguments give the same plan."""
    if job.metadata.deletion_timestamp is not None:
        return Plan(status=job.status)  # the garbage collector takes everything, through the owner references
    if job.spec.managed_by != MANAGER:
        return Plan(status=job.status)
    if job.status.terminal:
        return _after_the_end(job, observed, now)
    if job.spec.suspend:
        return _suspended(job, observed, now)
    return _running(job, observed, now)


# --- a job that should run ------------------------------------------------------------------------------------------


def _running(job: Job, observed: Observed, now: float) -> Plan:
    known = [replicas.entry_now(job, observed, index, now) for index in range(job.spec.groups)]
    entries = replicas.taken_back(job, known)
    over = run.run_is_over(observed) or any(entry.state is ReplicaState.FINISHED for entry in entries)
    expires_at = deadlines.expires_at(job)
    if now >= expires_at and not over:
        words = f"the job has not ended within {job.spec.deadlines.active_seconds} s (deadlines.activeSeconds)"
        others = (entry for entry in job.status.replica_statuses if entry.index >= job.spec.groups)
        return _ended(job, observed, (*entries, *others), now, JobState.FAILED, "DeadlineExceeded", words)
    failures = replicas.failures_of(job, observed, entries, now, over=over)
    ill = nodes.found_ill(job, observed, entries, failures, now)
    before, job = job, nodes.remembering(job, (*failures, *ill), now)
    groups = replicas.decide(job, observed, entries, failures, now, over=over)
    if not over and all(group.give_up is None for group in groups):
        groups = roll(job, observed, groups, now)
    removed = list(replicas.surplus(job, observed, groups, now))
    everything = tuple(group.entry for group in (*groups, *removed))
    hopeless = next((group.give_up for group in groups if group.give_up is not None), None)
    if hopeless is not None:
        assert hopeless.reason is not None
        return _ended(job, observed, everything, now, JobState.FAILED, hopeless.reason, hopeless.message)
    if over and not run.trains(observed, everything):
        unfinished = _unfinished(job, everything)
        if unfinished:
            return _ended(job, observed, everything, now, JobState.FAILED, "ReplicasUnfinished", unfinished)
        return _ended(job, observed, everything, now, JobState.COMPLETE, "RunFinished", "all training pods have ended")
    coordinator, keeper = keep_coordinator(job, observed, now, over=over)
    steps: list[Step] = [keeper, *groups, *removed]
    in_the_way = taken.in_the_way(observed, steps)
    names_taken = taken.said(in_the_way, now)
    status = status_of(job, observed, everything, now, over=over, coordinator=coordinator, names_taken=names_taken)
    return Plan(
        status=status,
        actions=(
            *with_groups(job, observed, _in_order(job, observed, steps, everything, in_the_way, now)),
            *keep_budget(job, observed),  # last: one that is refused stops nothing
        ),
        events=(
            *_advice(job),
            *milestones(job, status),
            *(event for step in steps for event in step.events),
            *nodes.news(before.status, status),
        ),
        wake_at=min(now + _poll(job, observed), math.inf if over else expires_at, *(step.wake_at for step in steps)),
    )


def _unfinished(job: Job, entries: Iterable[ReplicaStatus]) -> str:
    """Say who has begun and should have finished; empty when the run was a success."""
    fine = (ReplicaState.FINISHED, ReplicaState.ABANDONED, ReplicaState.REMOVED)
    lines = [_why_unfinished(entry) for entry in entries if entry.state not in fine and _has_begun(entry)]
    if job.spec.success.policy is SuccessPolicy.FIRST or not lines:
        return ""
    return f"the run is over, and these have not finished (success.policy is All): {', '.join(lines)}"


def _has_begun(entry: ReplicaStatus) -> bool:
    """It was there, or tried to be: not so one that was added when the run was about to end."""
    signs = (entry.ready_since, entry.away_since, entry.trains_since_step, entry.last_failure)
    return any(sign is not None for sign in signs)


def _why_unfinished(entry: ReplicaStatus) -> str:
    """Name its last failure only where it has not been back since."""
    failure, since = entry.last_failure, entry.ready_since or entry.away_since or -math.inf
    if failure is not None and failure.time >= since:
        return policy.failure_line(entry.index, failure)
    if entry.ready_since is not None or entry.trains_since_step is not None:
        return f"r{entry.index} still ran long after the others"
    return f"r{entry.index} was away, and not back by then"


def _advice(job: Job) -> tuple[Event, ...]:
    """Warn of what is most likely a mistake, when a job is seen for the first time or was changed."""
    if job.status.conditions and job.status.observed_generation == job.metadata.generation:
        return ()
    return tuple(Event(warning=True, reason="Questionable", message=sentence) for sentence in advice(job.spec))


def _poll(job: Job, observed: Observed) -> float:
    """Ask who answers often, and ever more rarely who does not: of many jobs, that is most of the work at rest."""
    often = POLL if job.spec.failure_policy.in_place is None else in_place.POLL
    return max(often, min(observed.silence / 4, LONGEST_POLL))


def _in_order(
    job: Job,
    observed: Observed,
    steps: Iterable[Step],
    entries: tuple[ReplicaStatus, ...],
    in_the_way: Iterable[PodView],
    now: float,
) -> Iterator[Action]:
    """Order the actions: tell, so that nobody waits; label; delete; create what pods lean on; create pods."""
    actions = [action for step in steps for action in step.actions]
    told = {action.message.replica for action in actions if isinstance(action, Tell)}
    actions += _unheard(job, observed, entries, told, now)
    yield from (action for action in actions if isinstance(action, Tell))
    yield from (action for action in actions if isinstance(action, Delete))
    yield from nodes.forced(job, observed, now)
    yield from taken.forced(job, observed, in_the_way, now)
    for manifest in render.support(job, key=observed.fresh_key):
        if (manifest["kind"], manifest["metadata"]["name"]) not in observed.support:
            yield Create(manifest=manifest)
    if not observed.foreign:  # else pods would find somebody else's key, or nobody under their names
        yield from (action for action in actions if isinstance(action, Create))
    yield from (action for action in actions if isinstance(action, Label))  # last: one that is refused stops nothing


def _unheard(
    job: Job, observed: Observed, entries: tuple[ReplicaStatus, ...], told: set[int], now: float
) -> Iterator[Tell]:
    """Tell what a coordinator has not heard: it still counts on an attempt that is history, or on a replica that is."""
    if observed.coordinator is None:
        return
    known = {*told, *observed.coordinator.abandoned}
    for gone in (entry for entry in entries if entry.state is ReplicaState.ABANDONED and entry.index not in known):
        if not run.can_leave(job, observed, gone.index, gone.attempt, now):
            yield tell(gone.index, gone.attempt, "it was abandoned", now, final=True)
    for member in observed.coordinator.replicas:
        entry = next((entry for entry in entries if entry.index == member.replica), None)
        if entry is None or member.attempt >= entry.attempt or member.role is None or member.replica in told:
            continue
        if not run.can_leave(job, observed, member.replica, member.attempt, now):
            yield tell(entry.index, member.attempt, "it was replaced by a newer attempt", now)


# --- suspended, complete, failed ------------------------------------------------------------------------------------


def _suspended(job: Job, observed: Observed, now: float) -> Plan:
    # Who has failed when the run seemed over gets another chance with all others; who has finished needs none.
    entries = tuple(
        entry
        if entry.state in (ReplicaState.FINISHED, ReplicaState.REMOVED)
        else replicas.at_rest(entry, ReplicaState.SUSPENDED)
        for entry in job.status.replica_statuses
    )
    # That it goes is somebody's wish: when the job is resumed it comes back at once.
    coordinator = job.status.coordinator.model_copy(update={"recent_starts": ()})
    status = status_of(job, observed, entries, now, state=JobState.SUSPENDED, coordinator=coordinator)
    stopped_by = run.stopped_by(observed, {pod.replica for pod in observed.trainers}, now)
    # Replicas leave at a boundary and write a checkpoint there, and it is the coordinator that lets them go.
    pods = observed.trainers if stopped_by > now else observed.pods
    stops = min(stopped_by, now + POLL) if stopped_by > now else math.inf
    speaks = math.inf if observed.coordinator is None else now + POLL  # it may have done a step since
    return Plan(
        status=status,
        actions=(
            *with_groups(job, observed, delete(pods, "spec.suspend is true")),
            *nodes.forced(job, observed, now),
        ),
        events=milestones(job, status),
        wake_at=min(stops, speaks, _waits_to_force(job, observed, now)),
    )


def _ended(
    job: Job,
    observed: Observed,
    entries: tuple[ReplicaStatus, ...],
    now: float,
    state: JobState,
    reason: EndReason,
    message: str,
) -> Plan:
    """Write the end into the status; cleaning up follows from it at the next look. Of a failed job nobody trains on."""
    if state is JobState.FAILED:
        settled = (*replicas.OUT, ReplicaState.REMOVED)
        entries = tuple(
            entry if entry.state in settled else replicas.at_rest(entry, ReplicaState.FAILED) for entry in entries
        )
    status = status_of(job, observed, entries, now, state=state, verdict=(reason, message), completion_time=now)
    event = Event(warning=state is JobState.FAILED, reason=reason, message=message)
    return Plan(status=status, events=(event,), wake_at=now)


def _after_the_end(job: Job, observed: Observed, now: float) -> Plan:
    """Leave ended pods for their logs, stop the others, and delete the job when its time is up."""
    ended, ttl = job.status.completion_time or now, job.spec.ttl_seconds_after_finished
    entries = policy.fitting(
        tuple(
            entry.model_copy(update={"last_failure": policy.with_exit_code(entry.last_failure, observed)})
            for entry in job.status.replica_statuses
        )
    )
    status = job.status.model_copy(update={"replica_statuses": entries, "last_failure": newest_failure(entries)})
    if ttl is not None and now >= ended + ttl:
        late = Delete(kind=KIND, name=job.name, uid=job.metadata.uid, why="its spec.ttlSecondsAfterFinished are over")
        return Plan(status=status, actions=(late,))
    linger = ended + COORDINATOR_LINGER if job.status.state is JobState.COMPLETE else ended
    keeper = observed.coordinator_pod
    useless = [pod for pod in observed.pods if not pod.over and (pod is not keeper or pod.ended or now >= linger)]
    waits = [linger] if keeper is not None and keeper.alive and now < linger else []
    waits += [ended + ttl] if ttl is not None else []
    return Plan(
        status=status,
        actions=(*with_groups(job, observed, delete(useless, "the job is over")), *nodes.forced(job, observed, now)),
        wake_at=min(*waits, _waits_to_force(job, observed, now), math.inf),
    )


def _waits_to_force(job: Job, observed: Observed, now: float) -> float:
    """Look again and again while pods are being deleted that may have to be removed by force."""
    going = job.spec.node_policy.force_delete and any(pod.deleted is not None for pod in observed.trainers)
    return now + POLL if going else math.inf


def refuse(manifest: Mapping[str, Any], message: str, now: float) -> Plan:
    """Return the plan for a job that cannot be understood: say so, and touch nothing that runs."""
    try:
        before = JobStatus.model_validate(manifest.get("status") or {})
    except ValidationError:
        before = JobStatus()
    generation = manifest["metadata"].get("generation")
    others = tuple(condition for condition in before.conditions if condition.type != "Accepted")
    known = next((condition for condition in before.conditions if condition.type == "Accepted"), None)
    since = known.last_transition_time if known is not None and known.status == "False" else now
    refused = Condition(
        type="Accepted",
        status="False",
        reason="InvalidSpec",
        message=message,
        last_transition_time=since,
        observed_generation=generation,
    )
    return Plan(status=before.model_copy(update={"conditions": (refused, *others), "observed_generation": generation}))
