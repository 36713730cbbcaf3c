"""What the operator would do for a job and why, in words: its own rules, on objects from files instead of a cluster.

What only a cluster knows is taken for granted, and said: that the objects are there which a job that was seen before
has, that its coordinator does not answer, and that nothing is wrong with nodes that are not given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fthsdp.errors import ConfigError
from fthsdp_operator.api import (
    ATTEMPT_LABEL,
    JOB_LABEL,
    KIND,
    POD_INDEX_LABEL,
    REPLICA_LABEL,
    Condition,
    Job,
    JobStatus,
    ReplicaStatus,
    format_time,
    parse_job,
)
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import (
    BudgetView,
    NodeView,
    PodView,
    budget_view,
    node_view,
    observe,
    owned,
    view,
)
from fthsdp_operator.rules import disruption
from fthsdp_operator.rules.actions import Action, Create, Delete, Label, Plan
from fthsdp_operator.rules.plan import plan

__all__ = ["Preview", "preview"]

Manifest = Mapping[str, Any]

_KEY = "made at random when it is created"
"""In place of the job's key."""
_UID = "read when it is looked at"
"""In place of the uid of what is taken to be there."""
_LISTS = ("conditions", "replicaStatuses", "avoidedNodes", "nodeFaults")
"""Fields of a status whose changes are told in other words: the last two by events."""
_LONGEST_LIST = 4
"""Names in a line; of more the first and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What would be done, at which Unix time."""

    job: Job
    todo: Plan
    now: float
    assumed: tuple[str, ...]
    """Sentences about what is taken for granted."""

    def data(self) -> dict[str, Any]:
        """Return it for programs, of the same names as in the objects."""
        wakes = math.isfinite(self.todo.wake_at)
        return {
            "job": {"namespace": self.job.namespace, "name": self.job.name, "uid": self.job.metadata.uid},
            "time": format_time(self.now),
            "assumed": list(self.assumed),
            "status": {"before": self.job.status.dump(), "after": self.todo.status.dump()},
            "actions": [_action(action) for action in self.todo.actions],
            "events": [{"type": it.type, "reason": it.reason, "message": it.message} for it in self.todo.events],
            "lookAgain": format_time(self.todo.wake_at) if wakes else None,
        }

    def words(self) -> Iterator[str]:
        """Yield it for people, line by line."""
        before, after = self.job.status, self.todo.status
        yield f"Job {self.job.namespace}/{self.job.name}, {before.state}, as of {format_time(self.now)}"
        yield from (f"  {sentence}" for sentence in self.assumed)
        yield from _block("Status", "The status stays as it is.", list(_changes(before, after)))
        steps = [f"{number}. {step}" for number, step in enumerate(_steps(self.todo.actions), 1)]
        yield from _block("Then, in this order", "Nothing is to be done.", steps)
        events = [f"{it.type} {it.reason}: {it.message}" for it in self.todo.events]
        yield from _block("Events", "There is nothing to tell.", events)
        yield ""
        yield _wakes(self.todo.wake_at - self.now)


def preview(objects: Sequence[Manifest], now: float, *, coordinator_image: str, with_pods: bool) -> Preview:
    """Return what the operator would do for the one job among the objects at Unix time ``now``; raises ConfigError.

    ``with_pods``: the objects are all that there is of the job, also when no pod is among them.
    """
    jobs = [it for it in objects if it["kind"] == KIND]
    if len(jobs) != 1:
        raise ConfigError(f"there are {len(jobs)} objects of kind {KIND}: give one")
    job = parse_job(jobs[0])
    expected: dict[tuple[str, str], Manifest] = {
        (it["kind"], it["metadata"]["name"]): it for it in render.support(job, key=_KEY)
    }
    there = {(it["kind"], it["metadata"]["name"]): it for it in objects if it["kind"] not in (KIND, "Pod", "Node")}
    _check_kinds(there, [*expected, (render.BUDGET, "")])
    known = job.status.observed_generation is not None
    budget = there.pop((render.BUDGET, render.budget_name(job.name)), None)
    granted = known and not there
    if granted:
        there = expected
    pods = [it for it in objects if it["kind"] == "Pod"]
    if known and not pods and not with_pods:
        raise ConfigError(
            f"{KIND} {job.name} has a status, so it has had pods: give those there are as well, as"
            f" 'kubectl get pods -l {JOB_LABEL}={job.name} -o yaml' prints them"
        )
    mine, nodes = list(_of_job(job, pods)), _nodes(it for it in objects if it["kind"] == "Node")
    places = {pod.node for pod in mine if pod.node is not None}
    observed = observe(
        job,
        mine,
        support={name: owned(job, there[name]) for name in expected if name in there},
        budget=_budget(job, budget),
        nodes={name: nodes[name] for name in places & nodes.keys()},
        coordinator=None,
        fresh_key=_KEY,
        coordinator_image=coordinator_image,
    )
    foreign, unknown = len(pods) - len(observed.pods), sorted(places - nodes.keys())
    assumed = _assumptions(job, granted=granted, budget=budget is not None, foreign=foreign, unknown=unknown)
    return Preview(job=job, todo=plan(job, observed, now), now=now, assumed=tuple(assumed))


def _budget(job: Job, given: Manifest | None) -> BudgetView | None:
    """Return the job's disruption budget as it is given, else as the status has it."""
    if not disruption.concerns(job):
        return None
    recorded = job.status.disruption_budget
    if given is None and recorded is not None:
        return BudgetView(uid=_UID, min_available=recorded)
    return budget_view(job, given)


def _check_kinds(there: Iterable[tuple[str, str]], expected: Iterable[tuple[str, str]]) -> None:
    kinds = sorted({kind for kind, _ in expected})
    for kind, name in there:
        if kind not in kinds:
            raise ConfigError(
                f"{kind} {name}: give a {KIND}, its pods, and if you like nodes and its {', '.join(kinds)}"
            )


def _of_job(job: Job, pods: Iterable[Manifest]) -> Iterator[PodView]:
    """Yield what the operator would see of the job's pods; raises ConfigError for what is no pod of Kubernetes."""
    for pod in pods:
        name = pod["metadata"]["name"]
        try:
            labels, namespace = pod["metadata"].get("labels") or {}, pod["metadata"].get("namespace")
            if labels.get(JOB_LABEL) != job.name or namespace not in (None, job.namespace):
                continue
            seen = view(pod)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Pod {name} is not as 'kubectl get pods -o yaml' prints one: {type(error).__name__}: {error}"
            ) from error
        if not job.metadata.uid:
            raise ConfigError(
                f"{KIND} {job.name} has no metadata.uid, so no pod is its own: give it as"
                f" 'kubectl get fthsdp {job.name} -o yaml' prints it"
            )
        if seen is not None:
            yield seen


def _nodes(nodes: Iterable[Manifest]) -> dict[str, NodeView]:
    """Return what the operator would see of nodes, by name; raises ConfigError for what is no node of Kubernetes."""
    found = {}
    for node in nodes:
        name = node["metadata"]["name"]
        try:
            found[name] = node_view(node)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Node {name} is not as 'kubectl get nodes -o yaml' prints one: {type(error).__name__}: {error}"
            ) from error
    return found


def _assumptions(job: Job, *, granted: bool, budget: bool, foreign: int, unknown: Sequence[str]) -> Iterator[str]:
    if foreign:
        pods = "1 pod is" if foreign == 1 else f"{foreign} pods are"
        yield f"{pods} not of this job: passed over."
    if granted:
        yield "Its Secret, ConfigMap, Service, ServiceAccount and Role are taken to be there."
    if disruption.concerns(job) and job.status.disruption_budget is not None and not budget:
        yield f"Its {render.BUDGET} is taken to be there, with minAvailable {job.status.disruption_budget}."
    if job.status.start_time is not None and not job.status.terminal:
        yield "Its coordinator is not asked: what it said last stands in the status."
    if unknown and not job.status.terminal:
        yield f"Nothing is known of node {_listed(unknown)}: what follows from the state of nodes is left out."


# --- status ---------------------------------------------------------------------------------------------------------


def _changes(before: JobStatus, after: JobStatus) -> Iterator[str]:
    """Yield a line for each aspect that changes: the conditions, the replicas, and everything else by its field."""
    for new in after.conditions:
        old = next((it for it in before.conditions if it.type == new.type), None)
        if (old is None and (new.status == "True" or new.message)) or (old and _said(old) != _said(new)):
            why = f"{new.reason}: {new.message}" if new.message else new.reason
            yield f"condition {new.type}: {_change(old.status if old else None, new.status)} ({why})"
    for entry in after.replica_statuses:
        known = before.replica(entry.index)
        leaves = list(_leaves(_dump(known) if known else {}, _dump(entry)))
        if leaves:
            yield f"replica {entry.index}: {', '.join(leaves)}"
    old_fields, new_fields = before.dump(), after.dump()
    for listed in _LISTS:
        old_fields.pop(listed, None)
        new_fields.pop(listed, None)
    yield from _leaves(old_fields, new_fields)


def _dump(entry: ReplicaStatus) -> dict[str, Any]:
    return entry.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"index"})


def _said(condition: Condition) -> tuple[str, str, str]:
    return condition.status, condition.reason, condition.message


def _leaves(before: Manifest, after: Manifest, path: str = "") -> Iterator[str]:
    """Yield each field that changes, with both values."""
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) or isinstance(new, Mapping):
            yield from _leaves(old or {}, new or {}, f"{path}{name}.")
        elif old != new and (old or new or new == 0):
            yield f"{path}{name} {_change(old, new)}"


def _change(before: object, after: object) -> str:
    return _show(after) if before in (None, "", []) else f"{_show(before)} -> {_show(after)}"


def _show(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value in (None, "") else str(value)


# --- actions --------------------------------------------------------------------------------------------------------


def _action(action: Action) -> dict[str, Any]:
    if isinstance(action, Create):
        return {"create": action.manifest}
    if isinstance(action, Delete):
        grace = {} if action.grace_seconds is None else {"gracePeriodSeconds": action.grace_seconds}
        return {"delete": {"kind": action.kind, "name": action.name, "uid": action.uid, **grace, "why": action.why}}
    if isinstance(action, Label):
        return {"label": {"kind": "Pod", "name": action.name, "uid": action.uid, "labels": dict(action.labels)}}
    return {"tell": action.message.model_dump(mode="json", exclude={"kind"})}


def _steps(actions: Iterable[Action]) -> Iterator[str]:
    """Yield a line for each action; those that differ only in their pod share one."""
    for (words, why), together in groupby(actions, key=_words):
        names = [name for action in together if (name := _name(action))]
        yield f"{words} {_listed(names)}{f': {why}' if why else ''}" if names else words


def _words(action: Action) -> tuple[str, str]:
    if isinstance(action, Create):
        labels = action.manifest["metadata"]["labels"]
        if POD_INDEX_LABEL in labels:
            return "create Pod", f"attempt {labels[ATTEMPT_LABEL]} of replica {labels[REPLICA_LABEL]} lacks it"
        return f"create {action.manifest['kind']}", "the job needs it"
    if isinstance(action, Delete):
        return f"delete {'by force ' if action.grace_seconds == 0 else ''}{action.kind}", action.why
    if isinstance(action, Label):
        return "label Pod", action.why
    told = action.message
    return f"tell the coordinator that attempt {told.attempt} of replica {told.replica} is gone: {told.reason}", ""


def _name(action: Action) -> str:
    if isinstance(action, Create):
        return str(action.manifest["metadata"]["name"])
    return action.name if isinstance(action, Delete | Label) else ""


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _LONGEST_LIST:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)} of them)"


def _block(title: str, otherwise: str, lines: Sequence[str]) -> Iterator[str]:
    yield ""
    yield f"{title}:" if lines else otherwise
    yield from (f"  {line}" for line in lines)


def _wakes(seconds: float) -> str:
    if math.isinf(seconds):
        return "It looks again when something happens."
    if seconds <= 0:
        return "It looks again at once."
    return f"It looks again when something happens, and in {seconds:.1f} s in any case."
