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
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fthsdp.coordinator import messages
from fthsdp.coordinator.messages import Exited
from fthsdp_operator import policy, render
from fthsdp_operator.api import (
    KIND,
    Condition,
    CoordinatorStatus,
    Failure,
    Job,
    JobState,
    JobStatus,
    ReplicaState,
    ReplicaStatus,
    RuleAction,
)
from fthsdp_operator.observe import Observed, PodView

__all__ = ["POLL", "Action", "Create", "Delete", "Event", "Plan", "Tell", "plan", "refuse"]

POLL = 2.0
"""Seconds after which a job that has pods is looked at again without any event: the coordinator's numbers move on."""
COORDINATOR_LINGER = 30.0
"""Seconds that a coordinator may take to exit by itself after the job is complete."""
STRAGGLER_GRACE = 20.0
"""Seconds for which training pods may still run after the coordinator has exited at the end of the run."""
OVERDUE = 2.0
"""Seconds past its grace period after which a coordinator's pod is removed by force: its node does not answer. Safe for
a coordinator, since two of them can never both write the epoch."""

_UP = (ReplicaState.STARTING, ReplicaState.CATCHING_UP, ReplicaState.ACTIVE, ReplicaState.SPARE)
_WAITING = (ReplicaState.PENDING, ReplicaState.BACKOFF)
_ENDED = (ReplicaState.FINISHED, ReplicaState.FAILED)
_OUT = (*_ENDED, ReplicaState.ABANDONED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create an object; that it exists is fine."""

    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete an object; that it is gone, or another one by now, is fine."""

    kind: str
    name: str
    uid: str
    grace_seconds: int | None = None
    """None: the object's own."""
    why: str = ""
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Tell the coordinator; that it does not listen is fine."""

    message: Exited


Action = Create | Delete | Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that people should be able to read in ``kubectl describe``."""

    warning: bool = False
    reason: str
    message: str
    replica: int | None = None
    """The replica that it speaks of, where it is one."""
    attempt: int | None = None

    @property
    def type(self) -> str:
        """What Kubernetes calls it: Normal or Warning."""
        return "Warning" if self.warning else "Normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do now."""

    status: JobStatus
    """To be written first, if it differs from what stands there."""
    actions: tuple[Action, ...] = ()
    """In this order."""
    events: tuple[Event, ...] = ()
    """To be recorded last."""
    wake_at: float = math.inf
    """Unix time in seconds at which to look again even if nothing happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What becomes of one part of a job: a replica, the coordinator."""

    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group(_Step):
    """What becomes of one replica."""

    entry: ReplicaStatus
    give_up: policy.Verdict | None = None
    """The job fails because of it."""


def plan(job: Job, observed: Observed, now: float) -> Plan:
    """Return what to do for a job; ``now`` is Unix time in seconds. The same arguments give the same plan."""
    if job.metadata.deletion_timestamp is not None:
        return Plan(status=job.status)  # the garbage collector takes everything, through the owner references
    if job.status.terminal:
        return _after_the_end(job, observed, now)
    if job.spec.suspend:
        return _suspended(job, observed, now)
    return _running(job, observed, now)


# --- a job that should run ------------------------------------------------------------------------------------------


def _running(job: Job, observed: Observed, now: float) -> Plan:
    entries = _taken_back(job, [_entry_now(job, observed, index) for index in range(job.spec.groups)])
    over = _run_is_over(observed) or any(entry.state is ReplicaState.FINISHED for entry in entries)
    groups = _groups(job, observed, entries, now, over=over)
    removed = list(_surplus(job, observed, groups, now))
    everything = tuple(group.entry for group in (*groups, *removed))
    hopeless = next((group.give_up for group in groups if group.give_up is not None), None)
    if hopeless is not None:
        return _ended(job, observed, everything, now, JobState.FAILED, hopeless.reason, hopeless.message)
    if over and not _trains(observed, everything):
        return _ended(job, observed, everything, now, JobState.COMPLETE, "RunFinished", "all training pods have ended")
    coordinator, keeper = _coordinator(job, observed, now, over=over)
    steps: list[_Step] = [keeper, *groups, *removed]
    status = _status(job, observed, everything, now, over=over, coordinator=coordinator)
    return Plan(
        status=status,
        actions=tuple(_in_order(job, observed, steps, everything, now)),
        events=(*_milestones(job, status), *(event for step in steps for event in step.events)),
        wake_at=min(now + POLL, *(step.wake_at for step in steps)),
    )


def _in_order(
    job: Job, observed: Observed, steps: Iterable[_Step], entries: tuple[ReplicaStatus, ...], now: float
) -> Iterator[Action]:
    """Order the actions: tell, so that nobody waits; delete; create what pods lean on; create pods."""
    actions = [action for step in steps for action in step.actions]
    told = {action.message.replica for action in actions if isinstance(action, Tell)}
    actions += _unheard(job, observed, entries, told, now)
    yield from (action for action in actions if isinstance(action, Tell))
    yield from (action for action in actions if isinstance(action, Delete))
    for manifest in render.support(job, key=observed.fresh_key):
        if (manifest["kind"], manifest["metadata"]["name"]) not in observed.support:
            yield Create(manifest=manifest)
    if not observed.foreign:  # else pods would find somebody else's key, or nobody under their names
        yield from (action for action in actions if isinstance(action, Create))


def _unheard(
    job: Job, observed: Observed, entries: tuple[ReplicaStatus, ...], told: set[int], now: float
) -> Iterator[Tell]:
    """Tell what a coordinator has not heard: it still counts on an attempt that is history, or on a replica that is."""
    if observed.coordinator is None:
        return
    known = {*told, *observed.coordinator.abandoned}
    for gone in (entry for entry in entries if entry.state is ReplicaState.ABANDONED and entry.index not in known):
        if not _can_leave(job, observed, gone.index, gone.attempt, now):
            yield _tell(gone.index, gone.attempt, "it was abandoned", now, final=True)
    for member in observed.coordinator.replicas:
        entry = next((entry for entry in entries if entry.index == member.replica), None)
        if entry is None or member.attempt >= entry.attempt or member.role is None or member.replica in told:
            continue
        if not _can_leave(job, observed, member.replica, member.attempt, now):
            yield _tell(entry.index, member.attempt, "it was replaced by a newer attempt", now)


def _can_leave(job: Job, observed: Observed, replica: int, attempt: int, now: float) -> bool:
    """All pods of an attempt run, though asked to stop: it leaves at a step boundary by itself, which stalls nobody.

    To tell the coordinator that it is gone would break the step in flight.
    """
    pods = observed.group(replica, attempt)
    running = [pod for pod in pods if pod.phase == "Running" and not pod.reason]
    return len(running) == job.spec.pods_per_replica and all(p.gone_by is None or now < p.gone_by for p in running)


def _tell(replica: int, attempt: int, reason: str, now: float, *, final: bool = False) -> Tell:
    return Tell(message=Exited(replica=replica, attempt=attempt, reason=reason, detected=now, final=final))


def _run_is_over(observed: Observed) -> bool:
    """The run has reached its last step: who fails now is not started again, into a run without anybody else."""
    pod = observed.coordinator_pod
    exited = pod is not None and pod.phase == "Succeeded" and pod.deleted is None
    return exited or (observed.coordinator is not None and observed.coordinator.finished)


def _trains(observed: Observed, entries: tuple[ReplicaStatus, ...]) -> bool:
    """Some pod still runs. One that is being deleted does not count: its node may never say that it stopped."""
    return any(
        pod.phase in ("Running", "Unknown") and pod.deleted is None
        for entry in entries
        if entry.state is not ReplicaState.REMOVED
        for pod in observed.group(entry.index, entry.attempt)
    )


# --- one replica ----------------------------------------------------------------------------------------------------


def _entry_now(job: Job, observed: Observed, index: int) -> ReplicaStatus:
    """Bring the recorded state of a replica up to what is there, as far as that costs nothing."""
    entry = job.status.replica(index) or ReplicaStatus(index=index)
    entry = entry.model_copy(update={"last_failure": policy.with_exit_code(entry.last_failure, observed)})
    if entry.state in (ReplicaState.SUSPENDED, ReplicaState.REMOVED):
        return _anew(entry)
    if entry.state in _ENDED and _waits_for_others(job, observed):  # the run is not over, as it had seemed
        return entry.model_copy(update={"state": ReplicaState.STARTING})
    if entry.state not in _OUT and _finished(job, observed, entry):
        return entry.model_copy(update={"state": ReplicaState.FINISHED})
    return entry


def _anew(entry: ReplicaStatus) -> ReplicaStatus:
    """A person has brought a replica back: it starts with its whole budget."""
    return entry.model_copy(
        update={
            "state": ReplicaState.PENDING,
            "attempt": entry.attempt + 1,
            "recent_restarts": (),
            "restarts_in_a_row": 0,
            "ready_since": None,
        }
    )


def _taken_back(job: Job, entries: list[ReplicaStatus]) -> list[ReplicaStatus]:
    """Take abandoned replicas back without which the job could never train: only a change of its spec leads there."""
    abandoned = [entry.index for entry in entries if entry.state is ReplicaState.ABANDONED]
    lacking = max(job.spec.min_replicas - (len(entries) - len(abandoned)), 0)
    return [_anew(entry) if entry.index in abandoned[:lacking] else entry for entry in entries]


def _finished(job: Job, observed: Observed, entry: ReplicaStatus) -> bool:
    """Whether a replica has done its part.

    A script that ends with 0 while nobody can train, or before anybody did, is not at the end of the run, unless all of
    them end so: then there was nothing to do.
    """
    if not _exited_well(job, observed, entry):
        return False
    trained = _step(job, observed) > 0 and not _waits_for_others(job, observed)
    return trained or _run_is_over(observed) or _all_exited_well(job, observed)


def _exited_well(job: Job, observed: Observed, entry: ReplicaStatus) -> bool:
    """All pods exited with 0. A replica that was asked to leave does so too, but one of its pods is being deleted."""
    pods = observed.group(entry.index, entry.attempt)
    good = [pod for pod in pods if pod.phase == "Succeeded" and pod.deleted is None]
    return len(good) == job.spec.pods_per_replica


def _all_exited_well(job: Job, observed: Observed) -> bool:
    entries = [job.status.replica(index) or ReplicaStatus(index=index) for index in range(job.spec.groups)]
    counted = [entry for entry in entries if entry.state is not ReplicaState.ABANDONED]
    return all(_exited_well(job, observed, entry) for entry in counted)


def _waits_for_others(job: Job, observed: Observed) -> bool:
    """The coordinator waits until enough replicas are back: somebody is missing who ended too early."""
    known = observed.coordinator
    return known is not None and known.paused and not known.finished and not _all_exited_well(job, observed)


def _groups(job: Job, observed: Observed, entries: list[ReplicaStatus], now: float, *, over: bool) -> list[_Group]:
    """Look at all replicas first, then decide about one after the other: many that fail at once are another matter."""
    failures = [_failure(job, observed, entry, now) for entry in entries]
    noted = [
        entry if failure is None else entry.model_copy(update={"last_failure": failure})
        for entry, failure in zip(entries, failures, strict=True)
    ]
    groups: list[_Group] = []
    for place, (entry, failure) in enumerate(zip(noted, failures, strict=True)):
        if failure is None:
            groups.append(_group(job, observed, entry, now, over=over))
            continue
        others = (*(group.entry for group in groups), *noted[place + 1 :])
        group = _failed(job, observed, entry, failure, others, now, over=over)
        if group.give_up is not None:
            return [_given_up(*one, group.give_up) for one in zip(noted, failures, strict=True)]
        groups.append(group)
    return groups


def _given_up(entry: ReplicaStatus, failure: Failure | None, verdict: policy.Verdict) -> _Group:
    """The job fails: those that failed with it are not restarted any more, whatever was decided about them before."""
    after = entry if failure is None else entry.model_copy(update={"state": ReplicaState.FAILED})
    return _Group(entry=after, give_up=verdict)


def _failure(job: Job, observed: Observed, entry: ReplicaStatus, now: float) -> Failure | None:
    if entry.state in _OUT:
        return None
    return policy.failure_of(job, observed, entry, now, complete=entry.state not in _WAITING)


def _group(job: Job, observed: Observed, entry: ReplicaStatus, now: float, *, over: bool) -> _Group:
    """A replica that has not failed now."""
    older = (pod for pod in observed.trainers if pod.replica == entry.index and pod.attempt < entry.attempt)
    stale = _delete(older, f"attempt {entry.attempt} has taken its place")
    if entry.state in _OUT:
        return _Group(entry=entry, actions=(*stale, *_useless(observed, entry)))
    if over and entry.state in _WAITING:
        return _Group(entry=entry.model_copy(update={"state": ReplicaState.FAILED, "next_restart_time": None}))
    if _too_late(observed, entry, now, over=over):
        late = entry.model_copy(update={"state": ReplicaState.FAILED})
        return _Group(entry=late, actions=(*stale, *_useless(observed, late)))
    if entry.next_restart_time is not None and entry.next_restart_time > now:
        return _Group(entry=entry, actions=stale, wake_at=entry.next_restart_time)
    return _growing(job, observed, entry, stale, now)


def _useless(observed: Observed, entry: ReplicaStatus) -> tuple[Delete, ...]:
    """Stop what a replica that is not started again has left, at every look: the first one may not live to do it."""
    if entry.state not in (ReplicaState.FAILED, ReplicaState.ABANDONED):
        return ()
    why = "its replica is abandoned" if entry.state is ReplicaState.ABANDONED else "the run is over"
    return _delete((pod for pod in observed.group(entry.index, entry.attempt) if not pod.over), why)


def _too_late(observed: Observed, entry: ReplicaStatus, now: float, *, over: bool) -> bool:
    """The coordinator left when all members had finished or were dead: who still runs is frozen, or came too late.

    Once the run is over, a coordinator that is gone is not replaced: who was not a member by then waits for nobody.
    """
    pod = observed.coordinator_pod
    if pod is None and over:
        return entry.state in (ReplicaState.STARTING, ReplicaState.CATCHING_UP)
    if pod is None or pod.phase != "Succeeded" or pod.exit is None or pod.exit.time is None:
        return False
    return now >= pod.exit.time + STRAGGLER_GRACE


def _growing(job: Job, observed: Observed, entry: ReplicaStatus, stale: tuple[Delete, ...], now: float) -> _Group:
    """A replica that nothing is wrong with: create what is missing, or see how far it got."""
    there = {pod.index for pod in observed.group(entry.index, entry.attempt)}
    missing = [index for index in range(job.spec.pods_per_replica) if index not in there]
    state = ReplicaState.PENDING if missing else _progress(job, observed, entry)
    exited = any(pod.phase == "Succeeded" for pod in observed.group(entry.index, entry.attempt))
    after = entry.model_copy(
        update={
            "state": state,
            "next_restart_time": None,
            "first_exit_time": (entry.first_exit_time or now) if exited else None,
            "ready_since": (entry.ready_since or now) if state in _READY else None,
        }
    )
    creates = tuple(
        Create(manifest=render.training_pod(job, replica=entry.index, attempt=entry.attempt, index=index))
        for index in missing
    )
    return _Group(entry=after, actions=(*stale, *creates), events=_news(entry, after))


def _progress(job: Job, observed: Observed, entry: ReplicaStatus) -> ReplicaState:
    """How far a replica got whose pods all exist. Only the coordinator knows who trains; silent, nothing changes."""
    before = entry.state if entry.state in _UP else ReplicaState.STARTING
    member = observed.member(entry.index, entry.attempt)
    if observed.coordinator is None or observed.coordinator.finished:
        return before
    if member is None:
        return ReplicaState.CATCHING_UP if before in _READY else ReplicaState.STARTING
    if member.role is messages.Role.ACTIVE:
        return ReplicaState.ACTIVE
    # A shadow that has the state trains from the next boundary on, unless enough others do. Who is a spare stays one
    # while the coordinator decides about somebody who is missing: it trains from that decision on.
    ready = member.role is messages.Role.SHADOW and member.step is not None
    spare = ready and (before is ReplicaState.SPARE or _all_train(job, observed.coordinator))
    return ReplicaState.SPARE if spare else ReplicaState.CATCHING_UP


def _all_train(job: Job, coordinator: messages.Status) -> bool:
    active = sum(member.role is messages.Role.ACTIVE for member in coordinator.replicas)
    return active >= job.spec.replicas


_READY = {ReplicaState.ACTIVE: ("ReplicaActive", "trains"), ReplicaState.SPARE: ("SpareReady", "is a ready spare")}


def _news(before: ReplicaStatus, after: ReplicaStatus) -> tuple[Event, ...]:
    if after.state not in _READY or before.state is after.state:
        return ()
    reason, words = _READY[after.state]
    message = f"replica {after.index} {words} (attempt {after.attempt})"
    return (Event(reason=reason, message=message, replica=after.index, attempt=after.attempt),)


def _failed(
    job: Job,
    observed: Observed,
    entry: ReplicaStatus,
    failure: Failure,
    others: tuple[ReplicaStatus, ...],
    now: float,
    *,
    over: bool,
) -> _Group:
    """Do what is right about a replica that failed; ``entry`` has the failure already."""
    if over:
        gone = entry.model_copy(update={"state": ReplicaState.FAILED})
        told = _told(job, observed, entry, failure, now)
        return _Group(entry=gone, actions=(*told, *_useless(observed, gone)))
    verdict = policy.judge(job, entry, others, now, trained=_step(job, observed) > 0)
    if verdict.action is RuleAction.FAIL_JOB:
        return _Group(entry=entry, give_up=verdict)
    if verdict.action is RuleAction.ABANDON_REPLICA:
        return _abandoned(job, observed, entry, failure, verdict, now)
    return _restarted(job, observed, entry, failure, verdict.restart_at, now)


def _told(
    job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure, now: float, *, final: bool = False
) -> tuple[Tell, ...]:
    if failure.reason == "PodDeleted" and _can_leave(job, observed, entry.index, entry.attempt, now):
        return ()
    return (_tell(entry.index, entry.attempt, _failure_line(entry.index, failure), now, final=final),)


def _abandoned(
    job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure, verdict: policy.Verdict, now: float
) -> _Group:
    """Let a replica go for good. Its pods that have ended stay, for their logs."""
    after = _at_rest(entry, ReplicaState.ABANDONED)
    told = _told(job, observed, entry, failure, now, final=True)
    event = Event(
        warning=True,
        reason="ReplicaAbandoned",
        message=f"{verdict.message}; the others train on",
        replica=entry.index,
        attempt=entry.attempt,
    )
    return _Group(entry=after, actions=(*told, *_useless(observed, after)), events=(event,))


def _restarted(
    job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure, restart_at: float, now: float
) -> _Group:
    """Restart a replica: the next attempt is counted here, and all the rest follows from that number."""
    told = _told(job, observed, entry, failure, now)
    after = _next_attempt(job, entry, restart_at, now)
    pods = (pod for pod in observed.trainers if pod.replica == entry.index)
    dead = _delete(pods, f"its replica failed, and starts again as attempt {after.attempt}")
    creates = _growing(job, observed, after, (), now).actions if after.state is ReplicaState.PENDING else ()
    return _Group(
        entry=after,
        actions=(*told, *dead, *creates),
        events=(_restart_event(after, failure, now),),
        wake_at=after.next_restart_time or math.inf,
    )


def _next_attempt(job: Job, entry: ReplicaStatus, restart_at: float, now: float) -> ReplicaStatus:
    waits = restart_at > now
    return policy.restarted(job, entry, now).model_copy(
        update={
            "state": ReplicaState.BACKOFF if waits else ReplicaState.PENDING,
            "attempt": entry.attempt + 1,
            "next_restart_time": restart_at if waits else None,
            "first_exit_time": None,
        }
    )


def _restart_event(entry: ReplicaStatus, failure: Failure, now: float) -> Event:
    wait = (entry.next_restart_time or now) - now
    when = f"in {wait:.0f} s" if wait > 0 else "now"
    detail = f": {policy.last_line(failure)}" if failure.message else ""
    cost = ", at no cost" if failure.action is RuleAction.RESTART_REPLICA_FREE else ""
    line = f"{_failure_line(entry.index, failure)}{detail}; attempt {entry.attempt} starts {when}{cost}"
    return Event(warning=True, reason="ReplicaFailed", message=line, replica=entry.index, attempt=entry.attempt - 1)


def _surplus(job: Job, observed: Observed, groups: Iterable[_Group], now: float) -> Iterator[_Group]:
    """Replicas beyond spec.replicas are taken away, but for those without which fewer than minReplicas would train.

    They stay until enough of the others are back: with the last that trains, the training state would be gone.
    """
    needed = job.spec.min_replicas - sum(group.entry.state in (*_READY, ReplicaState.FINISHED) for group in groups)
    for entry in (entry for entry in job.status.replica_statuses if entry.index >= job.spec.groups):
        trains = entry.state in _READY and policy.failure_of(job, observed, entry, now, complete=True) is None
        if trains and needed > 0:
            needed -= 1
            yield _Group(entry=entry)
        else:
            yield _removed(observed, entry)


def _removed(observed: Observed, entry: ReplicaStatus) -> _Group:
    """A replica beyond spec.replicas leaves at a step boundary: it is asked to, and the coordinator is not told."""
    pods = [pod for pod in observed.trainers if pod.replica == entry.index]
    after = _at_rest(entry, ReplicaState.REMOVED)
    return _Group(entry=after, actions=_delete(pods, "the job was scaled below its replica"))


def _at_rest(entry: ReplicaStatus, state: ReplicaState) -> ReplicaStatus:
    """Return the entry of a replica that has no pods to wait for: abandoned, removed or suspended."""
    times = {"next_restart_time": None, "first_exit_time": None, "ready_since": None}
    return entry.model_copy(update={"state": state, **times})


def _delete(pods: Iterable[PodView], why: str) -> tuple[Delete, ...]:
    return tuple(Delete(kind="Pod", name=pod.name, uid=pod.uid, why=why) for pod in pods if pod.deleted is None)


def _failure_line(replica: int, failure: Failure) -> str:
    """Say in one short line what happened to a replica."""
    return f"r{replica} {policy.short(failure)}"


# --- the coordinator's pod ------------------------------------------------------------------------------------------


def _coordinator(job: Job, observed: Observed, now: float, *, over: bool) -> tuple[CoordinatorStatus, _Step]:
    """Keep the coordinator's pod there. Its loss is nobody's failure: training goes on without it."""
    before, pod = job.status.coordinator, observed.coordinator_pod
    if pod is None:
        return (before, _Step()) if over else _start_coordinator(job, observed, now)
    return before.model_copy(update={"pod_uid": pod.uid}), _keep_coordinator(job, observed, pod, now, over=over)


def _keep_coordinator(job: Job, observed: Observed, pod: PodView, now: float, *, over: bool) -> _Step:
    if pod.over and not over:
        return _Step(actions=(_by_force(pod, "it has ended, and the run has not"),), wake_at=now)
    if pod.gone_by is not None:
        overdue = pod.gone_by + OVERDUE
        lost = _by_force(pod, "it should have ended by now, and its node says nothing")
        return _Step(actions=(lost,)) if now >= overdue else _Step(wake_at=overdue)
    outdated = pod.config != render.coordinator_config(job) and not _leaving(job, observed)
    return _Step(actions=_delete([pod], "it was started with other settings") if outdated else ())


def _by_force(pod: PodView, why: str) -> Delete:
    return Delete(kind="Pod", name=pod.name, uid=pod.uid, grace_seconds=0, why=why)


def _leaving(job: Job, observed: Observed) -> bool:
    """Replicas that were scaled away are still there; a coordinator that knows them not would not let them leave."""
    return any(pod.replica >= job.spec.groups for pod in observed.trainers)


def _start_coordinator(job: Job, observed: Observed, now: float) -> tuple[CoordinatorStatus, _Step]:
    before, rules = job.status.coordinator, job.spec.failure_policy
    create = Create(manifest=render.coordinator_pod(job, image=observed.coordinator_image))
    if before.starts and before.pod_uid is None:
        return before, _Step(actions=(create,))  # that start was counted, and its pod never seen
    starts = policy.recent(before.recent_starts, rules.per_replica.window_seconds, now)
    allowed_at = starts[-1] + policy.wait_before(len(starts) - 1, rules.backoff) if starts else now
    if allowed_at > now:
        return before, _Step(wake_at=allowed_at)
    after = CoordinatorStatus(starts=before.starts + 1, recent_starts=(*starts, now))
    lost = Event(warning=True, reason="CoordinatorReplaced", message=f"start {after.starts} of the coordinator's pod")
    return after, _Step(actions=(create,), events=(lost,) if before.starts else ())


# --- suspended, complete, failed ------------------------------------------------------------------------------------


def _suspended(job: Job, observed: Observed, now: float) -> Plan:
    entries = tuple(
        entry if entry.state in (*_ENDED, ReplicaState.REMOVED) else _at_rest(entry, ReplicaState.SUSPENDED)
        for entry in job.status.replica_statuses
    )
    status = _status(job, observed, entries, now, state=JobState.SUSPENDED)
    return Plan(status=status, actions=_delete(observed.pods, "spec.suspend is true"), events=_milestones(job, status))


def _ended(
    job: Job,
    observed: Observed,
    entries: tuple[ReplicaStatus, ...],
    now: float,
    state: JobState,
    reason: str,
    message: str,
) -> Plan:
    """Write the end into the status; cleaning up follows from it at the next look."""
    status = _status(job, observed, entries, now, state=state, verdict=(reason, message), completion_time=now)
    event = Event(warning=state is JobState.FAILED, reason=reason, message=message)
    return Plan(status=status, events=(event,), wake_at=now)


def _after_the_end(job: Job, observed: Observed, now: float) -> Plan:
    """Leave ended pods for their logs, stop the others, and delete the job when its time is up."""
    ended, ttl = job.status.completion_time or now, job.spec.ttl_seconds_after_finished
    entries = tuple(
        entry.model_copy(update={"last_failure": policy.with_exit_code(entry.last_failure, observed)})
        for entry in job.status.replica_statuses
    )
    status = job.status.model_copy(update={"replica_statuses": entries, "last_failure": _last_failure(entries)})
    if ttl is not None and now >= ended + ttl:
        late = Delete(kind=KIND, name=job.name, uid=job.metadata.uid, why="its spec.ttlSecondsAfterFinished are over")
        return Plan(status=status, actions=(late,))
    linger = ended + COORDINATOR_LINGER if job.status.state is JobState.COMPLETE else ended
    keeper = observed.coordinator_pod
    useless = [pod for pod in observed.pods if not pod.over and (pod is not keeper or now >= linger)]
    waits = [linger] if keeper is not None and keeper.alive and now < linger else []
    waits += [ended + ttl] if ttl is not None else []
    return Plan(status=status, actions=_delete(useless, "the job is over"), wake_at=min(waits, default=math.inf))


# --- status ---------------------------------------------------------------------------------------------------------


def _status(
    job: Job,
    observed: Observed,
    entries: tuple[ReplicaStatus, ...],
    now: float,
    *,
    over: bool = False,
    coordinator: CoordinatorStatus | None = None,
    state: JobState | None = None,
    verdict: tuple[str, str] = ("", ""),
    completion_time: float | None = None,
) -> JobStatus:
    before, wanted = job.status, job.spec.replicas
    # A spare trains from the decision on that takes out somebody else, and at the end it has finished too.
    there = sum(entry.state in (*_READY, ReplicaState.FINISHED) for entry in entries)
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
        selector=render.selector(job.name),
        restarts=sum(entry.restarts for entry in entries),
        step=_step(job, observed),
        loss=_loss(job, observed),
        last_failure=_last_failure(entries),
        conditions=_conditions(job, observed, entries, state, ready, verdict, now),
        replica_statuses=entries,
        coordinator=coordinator or before.coordinator,
        start_time=start_time,
        completion_time=completion_time,
    )


def _has_pods(observed: Observed, entry: ReplicaStatus) -> bool:
    """Those that an abandoned replica has left behind do not count."""
    return entry.state is not ReplicaState.ABANDONED and bool(observed.group(entry.index, entry.attempt))


def _step(job: Job, observed: Observed) -> int:
    """The newest final step; a coordinator that has just started has seen none yet."""
    return (observed.coordinator.step if observed.coordinator is not None else 0) or job.status.step


def _loss(job: Job, observed: Observed) -> float | None:
    """The newest loss. JSON has no NaN: a run that diverged shows none."""
    known = observed.coordinator
    loss = job.status.loss if known is None or not known.step else known.loss
    return loss if loss is not None and math.isfinite(loss) else None


def _state(job: Job, observed: Observed, ready: int, *, over: bool, started: bool) -> JobState:
    if over:
        return JobState.RUNNING
    if not started:
        return JobState.STARTING if any(pod.node for pod in observed.trainers) else JobState.PENDING
    if ready < job.spec.min_replicas or (observed.coordinator is not None and observed.coordinator.paused):
        return JobState.PAUSED
    return JobState.RUNNING if ready >= job.spec.replicas else JobState.DEGRADED


def _last_failure(entries: tuple[ReplicaStatus, ...]) -> str | None:
    failures = [(entry.last_failure.time, entry.index, entry.last_failure) for entry in entries if entry.last_failure]
    if not failures:
        return None
    _, index, failure = max(failures, key=lambda item: item[0])
    return _failure_line(index, failure)


def _conditions(
    job: Job,
    observed: Observed,
    entries: tuple[ReplicaStatus, ...],
    state: JobState,
    ready: int,
    verdict: tuple[str, str],
    now: float,
) -> tuple[Condition, ...]:
    wanted, least = job.spec.replicas, job.spec.min_replicas
    away = ", ".join(f"replica {e.index} is {e.state}" for e in entries if e.state not in _CALM)
    enough = ready >= least and state not in (JobState.PAUSED, JobState.SUSPENDED, JobState.FAILED)
    training = f"{ready} of {wanted} replicas train, minReplicas is {least}"
    short = state in (JobState.DEGRADED, JobState.PAUSED)
    rows = (
        ("Accepted", not observed.foreign, *_acceptance(observed)),
        ("Available", enough, "EnoughReplicas" if enough else "TooFewReplicas", training),
        ("Degraded", short, "ReplicasMissing" if short else "NoneMissing", away if short else ""),
        ("Suspended", state is JobState.SUSPENDED, "SuspendIsTrue" if job.spec.suspend else "SuspendIsFalse", ""),
        ("Complete", state is JobState.COMPLETE, *_ending(state, JobState.COMPLETE, verdict)),
        ("Failed", state is JobState.FAILED, *_ending(state, JobState.FAILED, verdict)),
    )
    return tuple(_condition(job, *row, now=now) for row in rows)


def _acceptance(observed: Observed) -> tuple[str, str]:
    if not observed.foreign:
        return "Valid", ""
    taken = ", ".join(f"{kind} {name}" for kind, name in sorted(observed.foreign))
    return "NameTaken", f"{taken}: there already and not of this job; delete it, or give the job another name"


_CALM = (ReplicaState.ACTIVE, ReplicaState.SPARE, ReplicaState.FINISHED, ReplicaState.REMOVED)


def _ending(state: JobState, end: JobState, verdict: tuple[str, str]) -> tuple[str, str]:
    return verdict if state is end else ("NotEnded", "")


def _condition(job: Job, kind: str, holds: bool, reason: str, message: str, *, now: float) -> Condition:
    before = next((condition for condition in job.status.conditions if condition.type == kind), None)
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


def _milestones(job: Job, status: JobStatus) -> tuple[Event, ...]:
    """Events that follow from how the job's state moved."""
    if job.status.state is status.state:
        return ()
    training = f"{status.ready} replicas train"
    if status.state is JobState.RUNNING:
        return (Event(reason="Running", message=training),)
    if status.state is JobState.PAUSED:
        return (Event(warning=True, reason="Paused", message=f"{training}, minReplicas is {job.spec.min_replicas}"),)
    if status.state is JobState.SUSPENDED:
        return (Event(reason="Suspended", message="spec.suspend is true: all pods are deleted"),)
    return ()


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
