"""How a changed template reaches replicas that run: one after the other, all at once, or as they restart.

Whatever has failed, waits or was abandoned gets the new template with its next attempt, under every policy; that is
decided with the replica itself (``replicas``). Here it is about replicas that nothing is wrong with. They are only ever
taken away as a planned leave at a step boundary, and only while it is known who trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from fthsdp.coordinator.messages import Role
from fthsdp_operator.api import ConditionReason, Job, ReplicaState, ReplicaStatus, RuleAction, UpdateType
from fthsdp_operator.observed.observe import Observed
from fthsdp_operator.rules import deadlines, replicas, run
from fthsdp_operator.rules.actions import delete
from fthsdp_operator.rules.replicas import READY, Group

__all__ = ["STALLED", "Progress", "current_revision", "progress", "roll"]

STALLED: Literal["RollStalled"] = "RollStalled"
"""Reason of the condition Progressing when a replica does not come up with the new template."""
_AT_REST = (ReplicaState.SUSPENDED, ReplicaState.REMOVED, *replicas.OUT)
"""Without pods that could be replaced."""


def roll(job: Job, observed: Observed, groups: Sequence[Group], now: float) -> list[Group]:
    """Take the next step of a roll, where there is one; ``groups`` is what was decided about the replicas before."""
    entries = [group.entry for group in groups]
    kind = job.spec.update_policy.type
    outdated = [entry for entry in entries if _is_outdated(job, entry)]
    if outdated and kind is UpdateType.RECREATE and run.knows_who_trains(job, observed):
        return _recreated(job, observed, groups)
    chosen = {entry.index for entry in outdated if _takes_no_part(job, observed, entry)}
    if kind is UpdateType.ROLLING:
        chosen |= {entry.index for entry in _next_ones(job, observed, entries, outdated)}
    return [_replaced(job, observed, group, now) if group.entry.index in chosen else group for group in groups]


def _is_outdated(job: Job, entry: ReplicaStatus) -> bool:
    """It has, or is to have, pods of another template."""
    return entry.state not in _AT_REST and entry.revision != job.spec.revision


def _takes_no_part(job: Job, observed: Observed, entry: ReplicaStatus) -> bool:
    """Some pod of it waits for a node or an image, or is not there, or none has joined: nothing is lost with them."""
    if deadlines.has_not_joined(entry):
        return True
    pods = observed.group(entry.index, entry.attempt)
    running = sum(pod.phase == "Running" for pod in pods)
    return entry.state not in READY and running < job.spec.pods_per_replica


def _replaced(job: Job, observed: Observed, group: Group, now: float) -> Group:
    """Replace a replica, in the place of whatever else was to be done about it."""
    after = replicas.replaced(job, observed, group.entry, now)
    return dataclasses.replace(after, events=(*group.events, *after.events))


def _recreated(job: Job, observed: Observed, groups: Sequence[Group]) -> list[Group]:
    """Let all leave; they come back when the last pod has stopped (``replicas.entry_now``), from its checkpoint."""
    return [_left(observed, group) if group.entry.state not in _AT_REST else group for group in groups]


def _left(observed: Observed, group: Group) -> Group:
    pods = (pod for pod in observed.pods_of(group.entry.index) if not pod.over)
    after = replicas.at_rest(group.entry, ReplicaState.SUSPENDED)
    return Group(entry=after, actions=delete(pods, "all replicas get the new template at once"), events=group.events)


# --- one after the other --------------------------------------------------------------------------------------------


def _next_ones(
    job: Job, observed: Observed, entries: Sequence[ReplicaStatus], outdated: Sequence[ReplicaStatus]
) -> Iterator[ReplicaStatus]:
    """Yield who is replaced now of those that run: all that do not train, and as many others as may be away."""
    if not run.knows_who_trains(job, observed):
        return
    yield from (entry for entry in outdated if entry.state not in READY and not _is_active(observed, entry))
    if _broken(job, entries):
        return
    ready = [entry for entry in entries if entry.state in READY]
    free = min(_room(job, entries), len(ready) - job.spec.min_replicas)
    yield from sorted((entry for entry in outdated if entry.state in READY), key=_turn)[: max(free, 0)]


def _turn(entry: ReplicaStatus) -> tuple[bool, int]:
    """Spares first, whose absence costs no step its share; then the highest number, as a StatefulSet does it."""
    return entry.state is not ReplicaState.SPARE, -entry.index


def _is_active(observed: Observed, entry: ReplicaStatus) -> bool:
    member = observed.member(entry.index, entry.attempt)
    return member is not None and member.role is Role.ACTIVE


def _room(job: Job, entries: Sequence[ReplicaStatus]) -> int:
    """How many more may be away. Who was abandoned does not come back, and is not waited for."""
    away = sum(entry.state not in (*READY, *replicas.OUT) for entry in entries)
    return job.spec.update_policy.max_unavailable - away


def _broken(job: Job, entries: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    """Who has failed with the new template and is not back, unless it has been seen to work in another replica."""
    wanted = job.spec.revision
    new = [entry for entry in entries if entry.revision == wanted]
    if any(entry.state in READY for entry in new):
        return []
    return [entry for entry in new if _failed_by_itself(entry) and _failed_with(entry, wanted)]


def _failed_by_itself(entry: ReplicaStatus) -> bool:
    """It was no fault of a machine, which says nothing of a template."""
    return entry.last_failure is not None and entry.last_failure.action is not RuleAction.RESTART_REPLICA_FREE


def _failed_with(entry: ReplicaStatus, revision: str) -> bool:
    return entry.last_failure is not None and entry.last_failure.revision == revision


# --- in words -------------------------------------------------------------------------------------------------------

Progress = tuple[bool, ConditionReason, str]
"""Whether a roll goes on; a word that says why or why not; a sentence."""


def progress(job: Job, observed: Observed, entries: Sequence[ReplicaStatus]) -> Progress:
    """Say how far a changed template has come, given what was decided about the replicas."""
    old = [entry for entry in entries if _is_outdated(job, entry)]
    policy, wanted = job.spec.update_policy, job.spec.revision
    back = [entry for entry in entries if entry.state is ReplicaState.SUSPENDED]
    if back:
        return True, "Recreating", f"{_names(back)} stop, to start again with the template {wanted}"
    if not old and current_revision(job, entries) == wanted:
        return False, "UpToDate", ""
    those = _old_ones(old, wanted)
    if policy.type is UpdateType.ON_RESTART and old:
        return False, "OnRestart", f"{those}, until the next restart (updatePolicy.type is OnRestart)"
    broken = _broken(job, entries) if policy.type is UpdateType.ROLLING else []
    if broken:
        failure = broken[0].last_failure
        assert failure is not None
        failed = f"{failure.pod} {failure.reason}" + ("" if failure.exit_code is None else f" exit {failure.exit_code}")
        return False, STALLED, f"{those}: {_names(broken)} failed with it ({failed}): change the template"
    if not run.knows_who_trains(job, observed):
        return True, "Rolling", f"{those}; waits for the coordinator"
    away = [entry for entry in entries if entry.state not in (*READY, *replicas.OUT)]
    ready = sum(entry.state in READY for entry in entries)
    if not away and ready <= job.spec.min_replicas:
        least = job.spec.min_replicas
        advice = "lower minReplicas, add a replica or a spare, or suspend the job"
        return False, "NoRoom", f"{those}: {ready} can train and minReplicas is {least}, so none can go: {advice}"
    return True, "Rolling", those + (f"; waits for {_names(away)}" if away else "")


def current_revision(job: Job, entries: Sequence[ReplicaStatus]) -> str:
    """Return the revision that all run; while a newer one is on its way to them, the one before."""
    wanted = job.spec.revision
    there = [entry.revision == wanted and entry.state in READY for entry in entries if entry.state not in _AT_REST]
    return wanted if there and all(there) else job.status.current_revision or wanted


def _old_ones(old: Sequence[ReplicaStatus], wanted: str) -> str:
    if not old:
        return f"all have the template {wanted}"
    return f"{_names(old)} {'run' if len(old) > 1 else 'runs'} an older template than {wanted}"


def _names(entries: Sequence[ReplicaStatus]) -> str:
    numbers = [str(entry.index) for entry in entries[:8]] + (["…"] if len(entries) > 8 else [])
    return f"replica {numbers[0]}" if len(numbers) == 1 else f"replicas {', '.join(numbers)}"
