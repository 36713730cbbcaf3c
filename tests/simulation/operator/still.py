"""Time stands still: what a plan leads to when nothing happens but what it does itself.

Carried out again and again, plans have to come to a point at which there is nothing more to do; and to the same one,
wherever the operator is killed between two calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from fthsdp_operator.api import Job, JobStatus, Role
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import BudgetView, Observed, PodView, as_restarted, budget_view, view
from fthsdp_operator.rules import plan as rules
from fthsdp_operator.rules.actions import Action, Create, Delete, Label, Plan, Tell

__all__ = ["complaint"]

ROUNDS = 10
"""Plans after which there has to be nothing more to do."""
GRACE = 30.0
MOST = 8
"""Points at which the operator is killed, of those that a plan has."""


def complaint(job: Job, observed: Observed, now: float, random: Random) -> str:
    """Say what is wrong with where plans lead from here; empty when nothing is."""
    first = rules.plan(job, observed, now)
    if first != rules.plan(job, observed, now):
        return "the same question has two answers"
    whole = Still(job, observed, now)
    words = whole.settle()
    if words:
        return words
    points = range(len(first.actions))
    for done in sorted(random.sample(points, min(MOST, len(points)))):
        killed = Still(job, observed, now)
        killed.write(first.status)
        killed.act(first.actions[:done])
        words = killed.settle()
        if words or killed.picture() != whole.picture():
            acts = ", ".join(map(_words, first.actions))
            ends = words or f"{killed.picture()}, instead of {whole.picture()}"
            return f"killed after {done} of ({acts}), it comes to another end: {ends}"
    return whole.nothing_becomes_due()


class Still:
    """A job and what is there, in which only plans change anything."""

    def __init__(self, job: Job, observed: Observed, now: float) -> None:
        self._job: Job | None = job
        self._observed = observed
        self._now = now
        self._made = 0

    def settle(self) -> str:
        """Carry out plans until there is nothing more to do; return a complaint if that never comes."""
        for _ in range(ROUNDS):
            if self._job is None:
                return ""
            todo = rules.plan(self._job, self._observed, self._now)
            if self._is_nothing(todo):
                return ""
            self.write(todo.status)
            self.act(todo.actions)
        acts = ", ".join(map(_words, todo.actions))
        return f"nothing happens, and still there is something to do after {ROUNDS} plans: {acts or 'a new status'}"

    def _is_nothing(self, todo: Plan) -> bool:
        assert self._job is not None
        return not todo.actions and _read(todo.status) == _read(self._job.status)

    def nothing_becomes_due(self) -> str:
        """Say what becomes due while nobody looks: neither now and then, nor at a time that the plan names."""
        if self._job is None:
            return ""
        wake_at = rules.plan(self._job, self._observed, self._now).wake_at
        if wake_at <= self._now + rules.POLL:
            return ""
        end = self._now + 86_400.0 if math.isinf(wake_at) else wake_at
        for share in (0.01, 0.5, 0.99):
            then = self._now + share * (end - self._now)
            todo = rules.plan(self._job, self._observed, then)
            if not self._is_nothing(todo):
                acts = ", ".join(map(_words, todo.actions))
                due = f"after {then - self._now:.1f} s there is to do: {acts or 'a new status'}"
                return f"nobody looks for {wake_at - self._now:.1f} s, and {due}"
        return ""

    def picture(self) -> object:
        """What counts about how it ended."""
        if self._job is None:
            return "gone"
        status = self._job.status
        entries = [(it.index, str(it.state), it.attempt, it.restarts) for it in status.replica_statuses]
        pods = sorted((pod.name, pod.deleted is not None) for pod in self._observed.pods)
        return str(status.state), status.ready, status.coordinator.starts, entries, pods

    # --- what a cluster does ---

    def write(self, status: JobStatus) -> None:
        """The status is written, and read again as it stands there."""
        assert self._job is not None
        self._job = self._job.model_copy(update={"status": _read(status)})
        self._observed = replace(self._observed, pods=as_restarted(self._job, self._observed.pods))

    def act(self, actions: Iterable[Action]) -> None:
        """Carry out these."""
        for action in actions:
            match action:
                case Create():
                    self._create(action)
                case Delete(kind="Pod"):
                    self._delete(action)
                case Delete(kind=render.BUDGET):
                    self._observed = replace(self._observed, budget=BudgetView())
                case Delete():
                    self._job = None
                case Label():
                    pods = (replace(it, label=None) if it.uid == action.uid else it for it in self._observed.pods)
                    self._observed = replace(self._observed, pods=tuple(pods))
                case Tell():
                    self._tell(action)

    def _create(self, action: Create) -> None:
        self._made += 1
        metadata = action.manifest["metadata"]
        made = {**action.manifest, "metadata": {**metadata, "uid": f"still-{self._made}"}}
        if made["kind"] == render.BUDGET:
            assert self._job is not None
            self._observed = replace(self._observed, budget=budget_view(self._job, made))
            return
        if made["kind"] != "Pod":
            known = self._observed.support | {(made["kind"], metadata["name"])}
            self._observed = replace(self._observed, support=known)
            return
        pod = view(made)
        assert pod is not None
        if pod.name not in {other.name for other in self._observed.pods}:
            self._observed = replace(self._observed, pods=(*self._observed.pods, pod))

    def _delete(self, action: Delete) -> None:
        kept = (self._stop(pod, action) if pod.uid == action.uid else pod for pod in self._observed.pods)
        self._observed = replace(self._observed, pods=tuple(pod for pod in kept if pod is not None))
        if self._observed.coordinator_pod is None:
            self._observed = replace(self._observed, coordinator=None)

    def _stop(self, pod: PodView, action: Delete) -> PodView | None:
        if pod.over or pod.node is None or action.grace_seconds == 0:
            return None
        grace = 5.0 if pod.role is Role.COORDINATOR else GRACE
        return replace(pod, deleted=self._now, gone_by=self._now + grace) if pod.deleted is None else pod

    def _tell(self, action: Tell) -> None:
        known, gone = self._observed.coordinator, action.message
        if known is not None:
            left = (it for it in known.replicas if it.replica != gone.replica or it.attempt > gone.attempt)
            abandoned = {*known.abandoned, gone.replica} if gone.final else known.abandoned
            heard = known.model_copy(update={"replicas": tuple(left), "abandoned": tuple(sorted(abandoned))})
            self._observed = replace(self._observed, coordinator=heard)


def _read(status: JobStatus) -> JobStatus:
    return JobStatus.model_validate(status.dump())


def _words(action: Action) -> str:
    match action:
        case Create():
            return f"create {action.manifest['kind']} {action.manifest['metadata']['name']}"
        case Delete():
            return f"delete {action.kind} {action.name}"
        case Label():
            return f"label {action.name}"
        case Tell():
            return f"tell of replica {action.message.replica} attempt {action.message.attempt}"
