"""The rules for one replica after the other: how far it got, whether it failed, and what is done about that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fthsdp.coordinator import messages
from fthsdp_operator.api import UP, EventReason, Failure, Job, ReplicaState, ReplicaStatus, RuleAction, UpdateType
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import Observed, PodView
from fthsdp_operator.rules import deadlines, in_place, nodes, policy, run
from fthsdp_operator.rules.actions import Create, Delete, Event, Step, Tell, delete, tell

__all__ = [
    "AT_REST",
    "OUT",
    "READY",
    "STRAGGLER_GRACE",
    "Failures",
    "Group",
    "at_rest",
    "decide",
    "entry_now",
    "failures_of",
    "is_outdated",
    "replaced",
    "surplus",
    "taken_back",
]

Failures = list[Failure | None]
"""Why each replica cannot go on where it is, in the order of the replicas; None for those that can."""

STRAGGLER_GRACE = 20.0
"""Seconds for which training pods may still run after the coordinator has exited at the end of the run."""


_WAITING = (ReplicaState.PENDING, ReplicaState.BACKOFF)
_ENDED = (ReplicaState.FINISHED, ReplicaState.FAILED)
OUT = (*_ENDED, ReplicaState.ABANDONED)
AT_REST = (ReplicaState.SUSPENDED, ReplicaState.REMOVED, *OUT)
"""Without pods that could be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Step):
    """What becomes of one replica."""

    entry: ReplicaStatus
    give_up: policy.Verdict | None = None
    """The job fails because of it."""


def entry_now(job: Job, observed: Observed, index: int, now: float) -> ReplicaStatus:
    """Bring the recorded state of a replica up to what is there, as far as that costs nothing."""
    entry = job.status.replica(index) or ReplicaStatus(index=index)
    known = {"last_failure": policy.with_exit_code(entry.last_failure, observed)}
    entry = entry.model_copy(update={"revision": entry.revision or job.spec.revision, **known})
    entry = nodes.forgiven(observed, entry)
    if entry.state is ReplicaState.SUSPENDED and (_still_stopping(job, observed, now) or _still_mixed(job)):
        return entry
    if entry.state in (ReplicaState.SUSPENDED, ReplicaState.REMOVED):
        away = now if entry.state is ReplicaState.SUSPENDED else None
        # What was before says nothing of it now.
        return _anew(job, entry).model_copy(update={"last_failure": None, "away_since": away})
    if _has_hope(job, entry):
        return _anew(job, entry)
    if entry.state in _ENDED and run.waits_for_others(job, observed):  # the run is not over, as it had seemed
        return entry.model_copy(update={"state": ReplicaState.STARTING})
    if entry.state not in OUT and _finished(job, observed, entry):
        return _over(entry, ReplicaState.FINISHED)
    return entry


def _still_stopping(job: Job, observed: Observed, now: float) -> bool:
    """Who starts from a checkpoint waits for those who may be writing it."""
    if job.spec.checkpoint is None:
        return False
    resting = {it.index for it in job.status.replica_statuses if it.state is ReplicaState.SUSPENDED}
    return run.stopped_by(observed, resting, now) > now


def _still_mixed(job: Job) -> bool:
    """Under Recreate nobody starts beside those who run an older template, and are to stay."""
    if job.spec.update_policy.type is not UpdateType.RECREATE:
        return False
    return any(is_outdated(job, it) for it in job.status.replica_statuses if it.index < job.spec.groups)


def is_outdated(job: Job, entry: ReplicaStatus) -> bool:
    """It has, or is to have, pods of another template."""
    return entry.state not in AT_REST and entry.revision not in (None, job.spec.revision)


def _has_hope(job: Job, entry: ReplicaStatus) -> bool:
    """It failed, and since then its template was changed: that may be the remedy, and is tried at once."""
    return entry.state in (ReplicaState.BACKOFF, ReplicaState.ABANDONED) and entry.revision != job.spec.revision


def _anew(job: Job, entry: ReplicaStatus) -> ReplicaStatus:
    """A person has brought a replica back, or changed what it runs: it starts with its whole budget."""
    return entry.model_copy(
        update={
            "state": ReplicaState.PENDING,
            "attempt": entry.attempt + 1,
            "revision": job.spec.revision,
            "pods_attempt": None,
            "recent_restarts": (),
            "restarts_in_a_row": 0,
            "ready_since": None,
            "trains_since_step": None,
            "next_restart_time": None,
            "first_exit_time": None,
            "waiting": None,
        }
    )


def taken_back(job: Job, entries: list[ReplicaStatus]) -> list[ReplicaStatus]:
    """Take abandoned replicas back without which the job could never train: only a change of its spec leads there."""
    abandoned = [entry.index for entry in entries if entry.state is ReplicaState.ABANDONED]
    lacking = max(job.spec.min_replicas - (len(entries) - len(abandoned)), 0)
    return [_anew(job, entry) if entry.index in abandoned[:lacking] else entry for entry in entries]


def _finished(job: Job, observed: Observed, entry: ReplicaStatus) -> bool:
    """Whether a replica has done its part.

    A script that ends with 0 while nobody can train, or before anybody did, is not at the end of the run, unless all of
    them end so: then there was nothing to do.
    """
    if not run.exited_well(job, observed, entry):
        return False
    trained = run.step(job, observed) > 0 and not run.waits_for_others(job, observed)
    return trained or run.run_is_over(observed) or run.all_exited_well(job, observed)


def failures_of(job: Job, observed: Observed, entries: list[ReplicaStatus], now: float, *, over: bool) -> Failures:
    """Return who has failed; where nobody has, who had better leave its node."""
    failures = [_failure(job, observed, entry, now, over=over) for entry in entries]
    wished = [] if over or any(failures) else nodes.wishes(job, observed, entries, now)
    if not wished:
        return failures
    ready = {it.index for it in entries if it.state in UP and _progress(job, observed, it) in READY}
    leaves = nodes.move(job, observed, entries, wished, now, ready=ready)
    return failures if leaves is None else [_of_revision(leaves[1], it) if it is leaves[0] else None for it in entries]


def decide(
    job: Job, observed: Observed, entries: list[ReplicaStatus], failures: Failures, now: float, *, over: bool
) -> list[Group]:
    """Decide about one replica after the other, with all failures known: many at once are another matter."""
    noted = [
        entry if failure is None else entry.model_copy(update={"last_failure": failure})
        for entry, failure in zip(entries, failures, strict=True)
    ]
    groups: list[Group] = []
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


def _given_up(entry: ReplicaStatus, failure: Failure | None, verdict: policy.Verdict) -> Group:
    """The job fails: those that failed with it are not restarted any more, whatever was decided about them before."""
    after = entry if failure is None else _over(entry, ReplicaState.FAILED)
    return Group(entry=after, give_up=verdict)


def _failure(job: Job, observed: Observed, entry: ReplicaStatus, now: float, *, over: bool) -> Failure | None:
    if entry.state in (*OUT, ReplicaState.SUSPENDED):
        return None
    failure = policy.failure_of(job, observed, entry, now, complete=entry.state not in _WAITING)
    if failure is None and not over:
        failure = deadlines.overdue(job, observed, entry, now)
    failure = failure or nodes.lost(job, observed, entry, now)
    return None if failure is None else in_place.judged(job, observed, entry, _of_revision(failure, entry))


def _of_revision(failure: Failure, entry: ReplicaStatus) -> Failure:
    return failure.model_copy(update={"revision": entry.revision})


def _group(job: Job, observed: Observed, entry: ReplicaStatus, now: float, *, over: bool) -> Group:
    """A replica that has not failed now."""
    stale = delete(_older(job, observed, entry), f"attempt {entry.attempt} has taken its place")
    if entry.state in OUT:
        return Group(entry=entry, actions=(*stale, *_useless(observed, entry)))
    if over and entry.state in (*_WAITING, ReplicaState.SUSPENDED):
        away = now if entry.state is ReplicaState.SUSPENDED else entry.away_since
        never = {"state": ReplicaState.FAILED, "next_restart_time": None, "away_since": away}
        return Group(entry=entry.model_copy(update=never))
    if entry.state is ReplicaState.SUSPENDED:
        running = (pod for pod in observed.pods_of(entry.index) if not pod.over)
        return Group(entry=entry, actions=delete(running, "its replica starts again when all have stopped"))
    if _too_late(observed, entry, now, over=over):
        late = _over(entry, ReplicaState.FAILED)
        return Group(entry=late, actions=(*stale, *_useless(observed, late)))
    if entry.next_restart_time is not None and entry.next_restart_time > now:
        return Group(entry=entry, actions=stale, wake_at=entry.next_restart_time)
    return _growing(job, observed, entry, stale, now, over=over)


def _older(job: Job, observed: Observed, entry: ReplicaStatus) -> Iterator[PodView]:
    """Yield the pods of earlier attempts, but for those whose logs tell how the last of them failed."""
    older = list(observed.older(entry.index, entry.attempt))
    failed = sorted({pod.attempt for pod in older if pod.phase == "Failed" and pod.deleted is None})
    kept = failed[len(failed) - min(job.spec.retain_failed_pods, len(failed)) :]
    yield from (pod for pod in older if not (pod.over and pod.attempt in kept))


def _useless(observed: Observed, entry: ReplicaStatus) -> tuple[Delete, ...]:
    """Stop what a replica that is not started again has left, at every look: the first one may not live to do it."""
    if entry.state not in (ReplicaState.FAILED, ReplicaState.ABANDONED):
        return ()
    why = "its replica is abandoned" if entry.state is ReplicaState.ABANDONED else "the run is over"
    return delete((pod for pod in observed.group(entry.index, entry.attempt) if not pod.over), why)


def _too_late(observed: Observed, entry: ReplicaStatus, now: float, *, over: bool) -> bool:
    """The coordinator left when all members had finished or were dead: who still runs is frozen, or came too late.

    Once the run is over, a coordinator that is gone is not replaced: who was not a member by then waits for nobody.
    """
    pod = observed.coordinator_pod
    if pod is None and over and entry.state in (ReplicaState.STARTING, ReplicaState.CATCHING_UP):
        return True  # it was never a member
    return over and deadlines.is_late(entry, now, STRAGGLER_GRACE)


def _growing(
    job: Job, observed: Observed, entry: ReplicaStatus, stale: tuple[Delete, ...], now: float, *, over: bool
) -> Group:
    """A replica that nothing is wrong with: create what is missing, or see how far it got."""
    there = observed.group(entry.index, entry.attempt)
    missing = there.missing(job.spec.pods_per_replica)
    state = ReplicaState.PENDING if missing else _progress(job, observed, entry)
    exited = any(pod.phase == "Succeeded" for pod in there.leaving)
    after = entry.model_copy(
        update={
            "state": state,
            "next_restart_time": None,
            "first_exit_time": (entry.first_exit_time or now) if exited else None,
            "ready_since": entry.ready_since or (now if state in READY else None),
            "trains_since_step": _trains_since_step(observed, entry, state),
            "waiting": deadlines.waiting(job, observed, entry, now, over=over),
        }
    )
    who = {"replica": entry.index, "attempt": entry.attempt, "generation": entry.generation}
    pods = render.training_pods(job, **who, indices=missing) if missing else ()
    creates = tuple(Create(manifest=pod) for pod in pods)
    labels = in_place.labels_to_set(observed, after)
    return Group(entry=after, actions=(*stale, *labels, *creates), events=_news(entry, after))


def _progress(job: Job, observed: Observed, entry: ReplicaStatus) -> ReplicaState:
    """How far a replica got whose pods all exist. Only the coordinator knows who trains; silent, nothing changes."""
    before = entry.state if entry.state in UP else ReplicaState.STARTING
    member = observed.member(entry.index, entry.attempt)
    if observed.coordinator is None or observed.coordinator.finished:
        return before
    if member is None:
        return ReplicaState.CATCHING_UP if before in READY else ReplicaState.STARTING
    if member.role is messages.Role.ACTIVE:
        return ReplicaState.ACTIVE
    # A shadow that has the state trains from the next boundary on, unless enough others do. Who is a spare stays one
    # while the coordinator decides about somebody who is missing: it trains from that decision on.
    ready = member.role is messages.Role.SHADOW and member.step is not None
    spare = ready and (before is ReplicaState.SPARE or _all_train(job, observed.coordinator))
    return ReplicaState.SPARE if spare else ReplicaState.CATCHING_UP


def _trains_since_step(observed: Observed, entry: ReplicaStatus, state: ReplicaState) -> int | None:
    """The first that was seen, or an earlier one where a run has gone back to a checkpoint."""
    member, known = observed.member(entry.index, entry.attempt), entry.trains_since_step
    if state is not ReplicaState.ACTIVE or member is None or member.step is None:
        return known
    return member.step if known is None else min(known, member.step)


def _all_train(job: Job, coordinator: messages.Status) -> bool:
    active = sum(member.role is messages.Role.ACTIVE for member in coordinator.replicas)
    return active >= job.spec.replicas


READY: dict[ReplicaState, tuple[EventReason, str]] = {
    ReplicaState.ACTIVE: ("ReplicaActive", "trains"),
    ReplicaState.SPARE: ("SpareReady", "is a ready spare"),
}


def _news(before: ReplicaStatus, after: ReplicaStatus) -> tuple[Event, ...]:
    if after.state not in READY or before.state is after.state:
        return ()
    reason, words = READY[after.state]
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
) -> Group:
    """Do what is right about a replica that failed; ``entry`` has the failure already."""
    if over:
        gone = _over(entry, ReplicaState.FAILED)
        told = _told(job, observed, entry, failure, now)
        return Group(entry=gone, actions=(*told, *_useless(observed, gone)))
    verdict = policy.judge(job, entry, others, now, trained=run.step(job, observed) > 0)
    if verdict.action is RuleAction.FAIL_JOB:
        return Group(entry=entry, give_up=verdict)
    if verdict.action is RuleAction.ABANDON_REPLICA:
        return _abandoned(job, observed, entry, failure, verdict, now)
    return _restarted(job, observed, entry, failure, verdict.restart_at, now)


def _told(
    job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure, now: float, *, final: bool = False
) -> tuple[Tell, ...]:
    if failure.reason in ("PodDeleted", *nodes.PLANNED) and run.can_leave(
        job, observed, entry.index, entry.attempt, now
    ):
        return ()
    return (tell(entry.index, entry.attempt, policy.failure_line(entry.index, failure), now, final=final),)


def _abandoned(
    job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure, verdict: policy.Verdict, now: float
) -> Group:
    """Let a replica go for good. Its pods that have ended stay, for their logs."""
    after = at_rest(entry, ReplicaState.ABANDONED)
    told = _told(job, observed, entry, failure, now, final=True)
    event = Event(
        warning=True,
        reason="ReplicaAbandoned",
        message=f"{verdict.message}; the others train on",
        replica=entry.index,
        attempt=entry.attempt,
    )
    return Group(entry=after, actions=(*told, *_useless(observed, after)), events=(event,))


def _restarted(
    job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure, restart_at: float, now: float
) -> Group:
    """Restart a replica: the next attempt is counted here, and all the rest follows from that number."""
    told = _told(job, observed, entry, failure, now)
    if in_place.is_possible(job, observed, entry, failure, now):
        return _restarted_in_place(job, observed, entry, failure, told, now)
    after = _next_attempt(job, entry, restart_at, now)
    dead = delete(_older(job, observed, after), f"its replica failed, and starts again as attempt {after.attempt}")
    creates = _growing(job, observed, after, (), now, over=False).actions if after.state is ReplicaState.PENDING else ()
    return Group(
        entry=after,
        actions=(*told, *dead, *creates),
        events=(_restart_event(after, failure, now),),
        wake_at=after.next_restart_time or math.inf,
    )


def _restarted_in_place(
    job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure, told: tuple[Tell, ...], now: float
) -> Group:
    """Restart a replica in the pods that it has: the number is all that they are told."""
    after = _next_attempt(job, entry, now, now).model_copy(
        update={
            "state": ReplicaState.STARTING,
            "pods_attempt": entry.named_after,
            "restarts_in_place": entry.restarts_in_place + 1,
        }
    )
    labels = in_place.labels(observed.group(entry.index, entry.attempt), after.attempt)
    event = _restart_event(after, failure, now, where=" in its pods")
    return Group(entry=after, actions=(*told, *labels), events=(event,))


def _next_attempt(job: Job, entry: ReplicaStatus, restart_at: float, now: float) -> ReplicaStatus:
    waits = restart_at > now
    failure, backoff = entry.last_failure, job.spec.failure_policy.backoff
    planned = failure is not None and failure.reason in nodes.PLANNED
    still_away = not planned and policy.in_a_row(entry, backoff, now) > 0
    return policy.restarted(job, entry, now).model_copy(
        update={
            "state": ReplicaState.BACKOFF if waits else ReplicaState.PENDING,
            "attempt": entry.attempt + 1,
            "revision": job.spec.revision,
            "pods_attempt": None,
            "trains_since_step": None,
            "away_since": (entry.away_since or now) if still_away else now,
            "next_restart_time": restart_at if waits else None,
            "first_exit_time": None,
            "waiting": None,
        }
    )


def _restart_event(entry: ReplicaStatus, failure: Failure, now: float, *, where: str = "") -> Event:
    wait = (entry.next_restart_time or now) - now
    when = f"in {wait:.0f} s" if wait > 0 else "now"
    detail = f": {policy.last_line(failure)}" if failure.message else ""
    cost = ", at no cost" if failure.action is RuleAction.RESTART_REPLICA_FREE else ""
    line = f"{policy.failure_line(entry.index, failure)}{detail}; attempt {entry.attempt} starts {when}{where}{cost}"
    failed = failure.reason not in nodes.PLANNED
    reason: EventReason = "ReplicaFailed" if failed else "ReplicaMoved"
    return Event(warning=failed, reason=reason, message=line, replica=entry.index, attempt=entry.attempt - 1)


def replaced(job: Job, observed: Observed, entry: ReplicaStatus, now: float) -> Group:
    """Replace a replica because its template was changed: it leaves at a step boundary, as when a pod is deleted."""
    after = _anew(job, entry).model_copy(update={"away_since": now})
    old = delete(
        _older(job, observed, after),
        f"the template was changed, and its replica starts again as attempt {after.attempt}",
    )
    event = Event(
        reason="ReplicaReplaced",
        message=f"replica {entry.index} gets the changed template: attempt {after.attempt}, revision {after.revision}",
        replica=entry.index,
        attempt=after.attempt,
    )
    creates = _growing(job, observed, after, (), now, over=False).actions
    return Group(entry=after, actions=(*old, *creates), events=(event,))


def surplus(job: Job, observed: Observed, groups: Iterable[Group], now: float) -> Iterator[Group]:
    """Replicas beyond spec.replicas are taken away, but for those without which fewer than minReplicas would train.

    They stay until enough of the others are back: with the last that trains, the training state would be gone.
    """
    needed = job.spec.min_replicas - sum(group.entry.state in (*READY, ReplicaState.FINISHED) for group in groups)
    for entry in (entry for entry in job.status.replica_statuses if entry.index >= job.spec.groups):
        trains = entry.state in UP and _progress(job, observed, entry) in READY
        if trains and needed > 0 and policy.failure_of(job, observed, entry, now, complete=True) is None:
            needed -= 1
            yield _growing(job, observed, entry, (), now, over=False)
        else:
            yield _removed(observed, entry)


def _removed(observed: Observed, entry: ReplicaStatus) -> Group:
    """A replica beyond spec.replicas leaves at a step boundary: it is asked to, and the coordinator is not told."""
    pods = observed.pods_of(entry.index)
    after = at_rest(entry, ReplicaState.REMOVED)
    return Group(entry=after, actions=delete(pods, "the job was scaled below its replica"))


def _over(entry: ReplicaStatus, state: ReplicaState) -> ReplicaStatus:
    """Return the entry of a replica that waits for nothing any more."""
    return entry.model_copy(update={"state": state, "waiting": None})


def at_rest(entry: ReplicaStatus, state: ReplicaState) -> ReplicaStatus:
    """Return the entry of a replica that has no pods to wait for: abandoned, removed or suspended."""
    times = ("next_restart_time", "first_exit_time", "ready_since", "away_since")
    return entry.model_copy(update={"state": state, "waiting": None, "trains_since_step": None, **dict.fromkeys(times)})
