"""How a changed template reaches replicas that run: one after the other, all at once, or as they restart.

Whatever has failed, waits or was abandoned gets the new template with its next attempt, under every policy; that is
decided with the replica itself (``replicas``). Here it is about replicas that nothing is wrong with. They are only ever
taken away as a planned leave at a step boundary, and only while it is known who trains.

A template has been seen to work when a replica has trained some steps with it (``minReadySteps``). Kubernetes counts
seconds for that. Here a step may take a tenth of a second or two minutes, and it is in steps that an update fails:
in its first one, or in the next, when all compare what they have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from fthsdp.coordinator.messages import Role
from fthsdp_operator.api import ConditionReason, Failure, Job, ReplicaState, ReplicaStatus, RuleAction, UpdateType
from fthsdp_operator.observed.observe import Observed
from fthsdp_operator.rules import replicas, run
from fthsdp_operator.rules.actions import delete
from fthsdp_operator.rules.replicas import AT_REST, READY, Group, is_outdated

__all__ = ["STALLED", "Progress", "current_revision", "progress", "roll"]

STALLED: Literal["RollStalled"] = "RollStalled"
"""Reason of the condition Progressing when a replica does not come up with the new template."""


def roll(job: Job, observed: Observed, groups: Sequence[Group], now: float) -> list[Group]:
    """Take the next step of a roll, where there is one; ``groups`` is what was decided about the replicas before."""
    entries = [group.entry for group in groups]
    kind = job.spec.update_policy.type
    outdated = [entry for entry in entries if is_outdated(job, entry)]
    chosen = {entry.index for entry in outdated if _is_not_running(job, observed, entry)}
    if kind is UpdateType.RECREATE and len(chosen) < len(outdated):
        return _recreated(job, observed, groups)
    if kind is UpdateType.ROLLING:
        chosen |= {entry.index for entry in _next_ones(job, observed, entries, outdated)}
    return [_replaced(job, observed, group, now) if group.entry.index in chosen else group for group in groups]


def _is_not_running(job: Job, observed: Observed, entry: ReplicaStatus) -> bool:
    """Some pod of it waits for a node or an image, or is not there: nothing is lost with the others."""
    pods = observed.group(entry.index, entry.attempt)
    running = sum(pod.phase == "Running" for pod in pods)
    return entry.state not in READY and running < job.spec.pods_per_replica


def _replaced(job: Job, observed: Observed, group: Group, now: float) -> Group:
    """Replace a replica, in the place of whatever else was to be done about it."""
    after = replicas.replaced(job, observed, group.entry, now)
    return dataclasses.replace(after, events=(*group.events, *after.events))


def _recreated(job: Job, observed: Observed, groups: Sequence[Group]) -> list[Group]:
    """Let all leave; they come back when the last pod has stopped (``replicas.entry_now``), from its checkpoint.

    A paused job is at a boundary. While nobody could let go those who run, at least nobody starts beside them.
    """
    all_leave = _is_known(job, observed, [group.entry for group in groups])
    return [
        _left(observed, group)
        if group.entry.state not in AT_REST and (all_leave or _is_not_running(job, observed, group.entry))
        else group
        for group in groups
    ]


def _left(observed: Observed, group: Group) -> Group:
    pods = (pod for pod in observed.pods_of(group.entry.index) if not pod.over)
    after = replicas.at_rest(group.entry, ReplicaState.SUSPENDED)
    return Group(entry=after, actions=delete(pods, "all replicas get the new template at once"), events=group.events)


def _is_known(job: Job, observed: Observed, entries: Sequence[ReplicaStatus]) -> bool:
    """It is known who has anything to lose: the members, or nobody so far. The job may be paused.

    A coordinator that has just been restarted has heard of nobody, of those either who have trained for weeks.
    """
    nobody = run.answers(job, observed) and all(entry.trains_since_step is None for entry in entries)
    return nobody or run.knows_the_members(job, observed)


# --- one after the other --------------------------------------------------------------------------------------------


def _next_ones(
    job: Job, observed: Observed, entries: Sequence[ReplicaStatus], outdated: Sequence[ReplicaStatus]
) -> Iterator[ReplicaStatus]:
    """Yield who is replaced now of those that run: all that do not train, and as many others as may be away."""
    if _is_known(job, observed, entries):
        yield from (entry for entry in outdated if _has_not_joined(observed, entry))
    if not run.knows_who_trains(job, observed):
        return
    yield from (entry for entry in outdated if _catches_up(observed, entry))
    if _broken(job, observed, entries):
        return
    ready = [entry for entry in entries if entry.state in READY]
    free = min(_room(job, observed, entries), len(ready) - job.spec.min_replicas)
    yield from sorted((entry for entry in outdated if entry.state in READY), key=_turn)[: max(free, 0)]


def _turn(entry: ReplicaStatus) -> tuple[bool, int]:
    """Spares first, whose absence costs no step its share; then the highest number, as a StatefulSet does it."""
    return entry.state is not ReplicaState.SPARE, -entry.index


def _has_not_joined(observed: Observed, entry: ReplicaStatus) -> bool:
    """The coordinator has not heard of it: it is about to begin, or hangs; but who was ready is to be heard again."""
    return entry.ready_since is None and observed.member(entry.index, entry.attempt) is None


def _catches_up(observed: Observed, entry: ReplicaStatus) -> bool:
    member = observed.member(entry.index, entry.attempt)
    return entry.state not in READY and member is not None and member.role is not Role.ACTIVE


def _room(job: Job, observed: Observed, entries: Sequence[ReplicaStatus]) -> int:
    """How many more may be away. Who was abandoned does not come back, and is not waited for."""
    return job.spec.update_policy.max_unavailable - len(_awaited(job, observed, entries))


def _awaited(job: Job, observed: Observed, entries: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    """Who is away, for whatever reason, or back with the new template and has not trained enough steps with it."""
    return [
        entry
        for entry in entries
        if entry.state not in (*READY, *replicas.OUT) or (_is_new(job, entry) and not _is_back(job, observed, entry))
    ]


def _is_new(job: Job, entry: ReplicaStatus) -> bool:
    return entry.revision == job.spec.revision and entry.state not in AT_REST


def _is_back(job: Job, observed: Observed, entry: ReplicaStatus) -> bool:
    """A spare does no step of its own: it has the state, and that is all that it can show."""
    return entry.state is ReplicaState.SPARE or _is_proven(job, observed, entry)


def _is_proven(job: Job, observed: Observed, entry: ReplicaStatus) -> bool:
    """It has trained enough steps with the template that it runs for anybody to say that this works."""
    steps = _steps(observed, entry)
    return entry.state is ReplicaState.ACTIVE and steps is not None and steps >= job.spec.update_policy.min_ready_steps


def _steps(observed: Observed, entry: ReplicaStatus) -> int | None:
    """Return how many it has trained; None while the coordinator, which is away or new, does not say how far it is."""
    member, since = observed.member(entry.index, entry.attempt), entry.trains_since_step
    return None if member is None or member.step is None or since is None else member.step - since


def _broken(job: Job, observed: Observed, entries: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    """Who has failed with the new template and is not back, unless it has been seen to work in another replica."""
    new = [entry for entry in entries if entry.revision == job.spec.revision]
    if any(_is_proven(job, observed, entry) for entry in new):
        return []
    return [entry for entry in new if entry.last_failure and _is_broken(observed, entry, entry.last_failure)]


def _is_broken(observed: Observed, entry: ReplicaStatus, failure: Failure) -> bool:
    """It has failed by itself with the template that it runs, and nothing has been seen since then that speaks for it.

    A fault of a machine says nothing of a template, and to stand by again nothing of a step.
    """
    if failure.revision != entry.revision or failure.action is RuleAction.RESTART_REPLICA_FREE:
        return False
    if entry.state is ReplicaState.ACTIVE:
        return _steps(observed, entry) is not None  # else nobody knows whether they are enough
    return entry.state is not ReplicaState.SPARE or failure.during is ReplicaState.ACTIVE


# --- in words -------------------------------------------------------------------------------------------------------

Progress = tuple[bool, ConditionReason, str]
"""Whether a roll goes on; a word that says why or why not; a sentence."""


def progress(job: Job, observed: Observed, entries: Sequence[ReplicaStatus]) -> Progress:
    """Say how far a changed template has come, given what was decided about the replicas."""
    old = [entry for entry in entries if is_outdated(job, entry)]
    policy, wanted = job.spec.update_policy, job.spec.revision
    back = [entry for entry in entries if entry.state is ReplicaState.SUSPENDED]
    if back:
        waits = f", as soon as {_names(old)} can be let go" if old else ""
        stops = f"{_names(back)} {_verb(back, 'stop')}, to start again with the template {wanted}"
        return True, "Recreating", stops + waits
    if not old and current_revision(job, observed, entries) == wanted:
        return False, "UpToDate", ""
    those = _old_ones(old, wanted)
    if policy.type is UpdateType.ON_RESTART and old:
        return False, "OnRestart", f"{those}, until the next restart (updatePolicy.type is OnRestart)"
    broken = _broken(job, observed, entries) if policy.type is UpdateType.ROLLING else []
    if broken:
        failure = broken[0].last_failure
        assert failure is not None
        failed = f"{failure.pod} {failure.reason}" + ("" if failure.exit_code is None else f" exit {failure.exit_code}")
        return False, STALLED, f"{those}: {_names(broken)} failed with it ({failed}): change the template"
    if not run.knows_who_trains(job, observed):
        return True, "Rolling", f"{those}; waits for the coordinator"
    awaited = _awaited(job, observed, entries)
    ready = sum(entry.state in READY for entry in entries)
    if not awaited and ready <= job.spec.min_replicas:
        least = job.spec.min_replicas
        advice = "lower minReplicas, add a replica or a spare, or suspend the job"
        return False, "NoRoom", f"{those}: {ready} can train and minReplicas is {least}, so none can go: {advice}"
    return True, "Rolling", those + (f"; waits for {_names(awaited)}" if awaited else "")


def current_revision(job: Job, observed: Observed, entries: Sequence[ReplicaStatus]) -> str:
    """Return the revision that all run; while a newer one is on its way to them, the one before."""
    there = [_is_new(job, entry) and _is_back(job, observed, entry) for entry in entries if entry.state not in AT_REST]
    return job.spec.revision if there and all(there) else job.status.current_revision or job.spec.revision


def _old_ones(old: Sequence[ReplicaStatus], wanted: str) -> str:
    if not old:
        return f"all have the template {wanted}"
    return f"{_names(old)} {_verb(old, 'run')} an older template than {wanted}"


def _verb(entries: Sequence[ReplicaStatus], verb: str) -> str:
    return verb if len(entries) > 1 else f"{verb}s"


def _names(entries: Sequence[ReplicaStatus]) -> str:
    numbers = [str(entry.index) for entry in entries[:8]] + (["…"] if len(entries) > 8 else [])
    return f"replica {numbers[0]}" if len(numbers) == 1 else f"replicas {', '.join(numbers)}"
