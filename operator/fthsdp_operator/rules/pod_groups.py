"""Groups come before their pods and go with them: what is done about pods decides what is done about groups. Pure.

Nobody has to look which groups there are. Each has a name of its own attempt, so that what exists may be created again
and what is gone deleted again. One that an operator, killed in the right moment, leaves behind is deleted when the next
attempt starts, and with the job in any case. A replica that is restarted in its pods keeps their group, whose name is
that of an older attempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from fthsdp_operator.api import ATTEMPT_LABEL, REPLICA_LABEL, ROLE_LABEL, Job, Role
from fthsdp_operator.manifests import gang, render
from fthsdp_operator.observed.observe import Observed
from fthsdp_operator.rules.actions import Action, Create, Delete, Label, Tell

__all__ = ["with_groups"]

Attempt = tuple[int, int]
"""Replica and number."""
_ATTEMPT = re.compile(r"-a(\d+)-\d+$")


def with_groups(job: Job, observed: Observed, actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return the actions, and with them those that the groups of their pods need."""
    planned = tuple(actions)
    if job.spec.gang.provider not in gang.GROUP_API:
        return planned
    made = list(dict.fromkeys(_created(planned)))
    older = (attempt for replica, number in made for attempt in _before(job, replica, number))
    gone = dict.fromkeys([*_deleted(observed, planned), *older])
    groups: list[Action] = [_without(job, *attempt) for attempt in gone]
    groups += [Create(manifest=render.pod_group(job, replica=replica, attempt=number)) for replica, number in made]
    return tuple(sorted([*planned, *groups], key=_turn))


def _turn(action: Action) -> int:
    """Tell, so that nobody waits; delete, groups first: while a pod is left, they are found; create, pods last."""
    if isinstance(action, Tell):
        return 0
    if isinstance(action, Label):
        return 5
    if isinstance(action, Delete):
        return 2 if action.kind == "Pod" else 1
    return 4 if action.manifest["kind"] == "Pod" else 3


def _created(actions: Sequence[Action]) -> Iterator[Attempt]:
    for action in actions:
        if isinstance(action, Create) and action.manifest["kind"] == "Pod":
            labels = action.manifest["metadata"]["labels"]
            if labels[ROLE_LABEL] == Role.TRAINER:
                yield int(labels[REPLICA_LABEL]), int(labels[ATTEMPT_LABEL])


def _before(job: Job, replica: int, attempt: int) -> Iterator[Attempt]:
    """Yield the attempts of a replica whose groups may be left when pods of this one are created.

    The one before; and the one after which the pods were named with which it failed last: it may have been restarted
    in them many times.
    """
    entry = job.status.replica(replica)
    failed = entry.last_failure if entry is not None else None
    born = _ATTEMPT.search(failed.pod) if failed is not None else None
    numbers = {attempt - 1, *([int(born[1])] if born is not None else [])}
    yield from ((replica, number) for number in sorted(numbers) if 0 <= number < attempt)


def _deleted(observed: Observed, actions: Sequence[Action]) -> Iterator[Attempt]:
    """Whoever deletes one pod of an attempt is through with it. Its name says with which one it was created."""
    replicas = {pod.name: pod.replica for pod in observed.trainers}
    for action in actions:
        if isinstance(action, Delete) and action.kind == "Pod" and action.name in replicas:
            born = _ATTEMPT.search(action.name)
            if born is not None:
                yield replicas[action.name], int(born[1])


def _without(job: Job, replica: int, attempt: int) -> Delete:
    name = gang.group_name(job, replica, attempt)
    return Delete(
        kind=gang.group_kind(job.spec.gang.provider), name=name, uid="", why="its pods are not needed any more"
    )
