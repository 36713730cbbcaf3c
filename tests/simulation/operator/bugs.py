"""The operator with one rule broken: each of these has to be noticed, else the checks are worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fthsdp_operator import execute
from fthsdp_operator.api import Job, JobStatus, ReplicaState, ReplicaStatus
from fthsdp_operator.cluster import Cluster, Conflict
from fthsdp_operator.manifests import render
from fthsdp_operator.observed import observe
from fthsdp_operator.observed.observe import Observed, PodView
from fthsdp_operator.rules import coordinator_pod, deadlines, nodes, policy, replicas, roll, run
from fthsdp_operator.rules import plan as rules
from fthsdp_operator.rules.actions import Create, Delete, Plan, Tell, delete, tell

__all__ = ["ABOUT_MACHINES", "BUGS", "Bug"]

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]


def acts_before_the_status_is_written(patch: Patch) -> None:
    """Pods of the new attempt are there before its number is."""
    write, act = execute._write_status, execute._act

    async def keep(cluster: Cluster, manifest: Mapping[str, Any], todo: Plan) -> None:
        patch.setattr(execute, "_act", lambda *rest: act_and_write(cluster, manifest, *rest))

    async def act_and_write(cluster: Cluster, manifest: Mapping[str, Any], *rest: Any) -> None:
        await act(*rest)
        await write(cluster, manifest, rest[2])

    patch.setattr(execute, "_write_status", keep)


def goes_on_after_a_conflict(patch: Patch) -> None:
    """A plan is carried out although somebody else has changed the job."""
    write = execute._write_status

    async def careless(cluster: Cluster, manifest: Mapping[str, Any], todo: Plan) -> None:
        try:
            await write(cluster, manifest, todo)
        except Conflict:
            return

    patch.setattr(execute, "_write_status", careless)


def counts_a_restart_twice(patch: Patch) -> None:
    """A restart costs two of the budget."""
    original = replicas._next_attempt

    def twice(*arguments: Any) -> ReplicaStatus:
        entry = original(*arguments)
        times = entry.recent_restarts
        return entry.model_copy(update={"recent_restarts": (*times, *times[-1:])})

    patch.setattr(replicas, "_next_attempt", twice)


def forgets_restarts(patch: Patch) -> None:
    """The budget counts nothing but the newest restart."""
    patch.setattr(policy, "recent", lambda *_: ())


def takes_a_pod_that_was_not_created_for_deleted(patch: Patch) -> None:
    """A missing pod of a Pending replica is a failure."""
    original = policy.failure_of
    patch.setattr(policy, "failure_of", lambda *some, complete: original(*some, complete=True))


def creates_deleted_pods_again(patch: Patch) -> None:
    """A pod that somebody deleted comes back under the same attempt."""
    original = policy.failure_of
    patch.setattr(policy, "failure_of", lambda *some, complete: original(*some, complete=False))


def starts_finished_replicas_again(patch: Patch) -> None:
    """A replica that has finished is taken for one that came back."""
    original = replicas.entry_now

    def entry_now(job: Job, observed: Observed, index: int, now: float) -> ReplicaStatus:
        entry = original(job, observed, index, now)
        known = job.status.replica(index)
        if known is None or known.state is not ReplicaState.FINISHED:
            return entry
        return entry.model_copy(update={"state": ReplicaState.PENDING, "attempt": known.attempt + 1})

    patch.setattr(replicas, "entry_now", entry_now)


def forgets_stale_pods(patch: Patch) -> None:
    """The pods of an attempt that failed are left alone."""

    def without_deletions(original: Callable[..., Any]) -> Callable[..., Any]:
        def decide(*arguments: Any, **options: Any) -> Any:
            it = original(*arguments, **options)
            return replace(it, actions=tuple(action for action in it.actions if not isinstance(action, Delete)))

        return decide

    patch.setattr(replicas, "_failed", without_deletions(replicas._failed))
    patch.setattr(replicas, "_group", without_deletions(replicas._group))


def is_not_woken_after_a_wait(patch: Patch) -> None:
    """Nobody looks at a replica in Backoff until the next event."""
    original = rules.plan
    patch.setattr(rules, "plan", lambda *some: replace(original(*some), wake_at=float("inf")))


def does_not_wait(patch: Patch) -> None:
    """The pods of the next attempt are created at once, whatever the status says."""
    original = replicas._group

    def group(job: Job, observed: Observed, entry: ReplicaStatus, *rest: Any, **options: Any) -> Any:
        it = original(job, observed, entry, *rest, **options)
        if it.entry.state is not ReplicaState.BACKOFF:
            return it
        creates = tuple(
            Create(manifest=render.training_pod(job, replica=entry.index, attempt=it.entry.attempt, index=index))
            for index in range(job.spec.pods_per_replica)
        )
        return replace(it, actions=(*it.actions, *creates))

    patch.setattr(replicas, "_group", group)


def scales_down_from_the_lowest(patch: Patch) -> None:
    """The replicas that go are those with the lowest numbers."""
    original = replicas._removed

    def removed(observed: Observed, entry: ReplicaStatus) -> Any:
        lowest = [pod for pod in observed.trainers if pod.replica == 0]
        return replace(original(observed, entry), actions=delete(lowest, ""))

    patch.setattr(replicas, "_removed", removed)


def restarts_all_for_one(patch: Patch) -> None:
    """As elsewhere: when one replica fails, all are started again."""
    original = replicas._failed

    def failed(job: Job, observed: Observed, *rest: Any, **options: Any) -> Any:
        it = original(job, observed, *rest, **options)
        return replace(it, actions=(*it.actions, *delete(observed.trainers, "")))

    patch.setattr(replicas, "_failed", failed)


def believes_old_verdicts(patch: Patch) -> None:
    """What the coordinator said of an attempt counts for the next one too."""
    original = policy._verdict

    def verdict(job: Job, observed: Observed, entry: ReplicaStatus, now: float) -> Any:
        said = observed.coordinator.verdicts if observed.coordinator else ()
        attempt = max((it.attempt for it in said if it.replica == entry.index), default=entry.attempt)
        return original(job, observed, entry.model_copy(update={"attempt": attempt}), now)

    patch.setattr(policy, "_verdict", verdict)


def tells_of_the_next_attempt(patch: Patch) -> None:
    """The coordinator is told that the attempt is gone which is only being started."""

    def next_one(replica: int, attempt: int, *some: Any, **how: Any) -> Tell:
        return tell(replica, attempt + 1, *some, **how)

    patch.setattr(rules, "tell", next_one)
    patch.setattr(replicas, "tell", next_one)


def leaves_failed_replicas_alone(patch: Patch) -> None:
    """What a replica has left that is not started again is stopped at the first look, or never."""
    patch.setattr(replicas, "_useless", lambda *_: ())


def replaces_a_silent_coordinator(patch: Patch) -> None:
    """A coordinator that does not answer is deleted."""
    original = coordinator_pod._keep

    def keep(job: Job, observed: Observed, pod: PodView, *rest: Any, **options: Any) -> Any:
        step = original(job, observed, pod, *rest, **options)
        return step if observed.coordinator else replace(step, actions=delete([pod], ""))

    patch.setattr(coordinator_pod, "_keep", keep)


def leaves_the_end(patch: Patch) -> None:
    """A job that has ended is looked at as if it had not."""
    patch.setattr(JobStatus, "terminal", False)


def stops_nothing_at_the_end(patch: Patch) -> None:
    """Pods of a job that has failed run on."""
    original = rules._after_the_end

    def after(*arguments: Any) -> Plan:
        todo = original(*arguments)
        kept = tuple(action for action in todo.actions if isinstance(action, Delete) and action.kind != "Pod")
        return replace(todo, actions=kept)

    patch.setattr(rules, "_after_the_end", after)


def ends_with_the_first(patch: Patch) -> None:
    """The job is Complete as soon as one replica is, and the others are stopped in their last step."""
    patch.setattr(run, "trains", lambda *_: False)
    patch.setattr(run, "run_is_over", lambda observed: any(pod.phase == "Succeeded" for pod in observed.pods))


def forgets_the_time_to_live(patch: Patch) -> None:
    """An ended job is looked at again only when something happens to it."""
    original = rules._after_the_end
    patch.setattr(rules, "_after_the_end", lambda *some: replace(original(*some), wake_at=float("inf")))


def takes_what_is_late_for_deleted(patch: Patch) -> None:
    """Pods that another operator saw, and of which nobody has told this one yet, count as gone."""
    patch.setattr(execute, "_missing", lambda *_: frozenset())


def rolls_all_at_once(patch: Patch) -> None:
    """A changed template takes as many away as minReplicas leaves."""
    patch.setattr(roll, "_room", lambda *_: 99)


def replaces_who_has_the_template_already(patch: Patch) -> None:
    """A roll begins with all replicas, and is not over for those that have had their turn."""
    patch.setattr(roll, "is_outdated", lambda job, entry: entry.state not in replicas.AT_REST)


def rolls_on_before_a_step_is_done(patch: Patch) -> None:
    """A template works that a replica trains with: what comes of its first step nobody waits for."""
    patch.setattr(roll, "_is_proven", lambda job, observed, entry: entry.state is ReplicaState.ACTIVE)


def recreates_one_after_the_other(patch: Patch) -> None:
    """Under Recreate who is down gets the new template while others wait with the old one."""
    original = roll._recreated

    def recreated(job: Job, observed: Observed, groups: Sequence[Any]) -> list[Any]:
        return original(job, observed, groups) if run.knows_who_trains(job, observed) else list(groups)

    patch.setattr(roll, "_recreated", recreated)


def does_not_wait_for_those_who_leave(patch: Patch) -> None:
    """A suspended job's coordinator goes with the replicas, and who is resumed does not wait for their checkpoint."""
    patch.setattr(run, "stopped_by", lambda *_: 0.0)


def believes_nodes_more_than_the_coordinator(patch: Patch) -> None:
    """Who is heard is moved all the same, when its node is not Ready."""
    patch.setattr(nodes, "_is_heard", lambda *_: False)


def restarts_in_pods_that_are_to_be_left(patch: Patch) -> None:
    """A crash on an ill or cordoned node is mended there."""
    patch.setattr(nodes, "wish", lambda *_: None)


def waits_for_pods_that_are_lost(patch: Patch) -> None:
    """Who was restarted in its pods has to wait until a node that took one of them along has been away for long."""
    patch.setattr(nodes, "_is_same_loss", lambda *_: False)


def avoids_nodes_for_ever(patch: Patch) -> None:
    """What is known of bad nodes never grows old."""

    def everything(job: Job, now: float) -> Any:
        status = job.status
        return {it.name: it.times for it in status.node_faults}, {it.name: it for it in status.avoided_nodes}

    patch.setattr(nodes, "_remembered", everything)


def removes_by_force_at_once(patch: Patch) -> None:
    """A pod on a dead node is removed while its grace period runs."""
    patch.setattr(nodes, "OVERDUE", -60.0)


def waits_for_hanging_starts_for_ever(patch: Patch) -> None:
    """A replica of which the coordinator never hears has no end."""
    patch.setattr(deadlines, "overdue", lambda *_: None)


def starts_again_what_has_just_begun(patch: Patch) -> None:
    """A replica that the coordinator does not know yet has had its time at once."""
    patch.setattr(deadlines, "_limit", lambda *_: ("startSeconds", 0))


def believes_the_phase_of_a_pod(patch: Patch) -> None:
    """A pod has not ended as long as anything in it runs."""
    patch.setattr(observe, "phase_of", lambda pod, *_, **__: (pod.get("status") or {}).get("phase") or "Pending")


def leaves_proxies_behind(patch: Patch) -> None:
    """Of a pod whose training has ended, nothing is stopped at the end."""
    patch.setattr(PodView, "over", property(lambda pod: pod.ended))


BUGS: Sequence[Bug] = (
    acts_before_the_status_is_written,
    goes_on_after_a_conflict,
    counts_a_restart_twice,
    forgets_restarts,
    takes_a_pod_that_was_not_created_for_deleted,
    creates_deleted_pods_again,
    starts_finished_replicas_again,
    forgets_stale_pods,
    is_not_woken_after_a_wait,
    does_not_wait,
    scales_down_from_the_lowest,
    restarts_all_for_one,
    believes_old_verdicts,
    tells_of_the_next_attempt,
    leaves_failed_replicas_alone,
    replaces_a_silent_coordinator,
    leaves_the_end,
    stops_nothing_at_the_end,
    ends_with_the_first,
    forgets_the_time_to_live,
    takes_what_is_late_for_deleted,
    rolls_all_at_once,
    replaces_who_has_the_template_already,
    rolls_on_before_a_step_is_done,
    recreates_one_after_the_other,
    does_not_wait_for_those_who_leave,
    believes_nodes_more_than_the_coordinator,
    restarts_in_pods_that_are_to_be_left,
    waits_for_pods_that_are_lost,
    avoids_nodes_for_ever,
    removes_by_force_at_once,
    waits_for_hanging_starts_for_ever,
    starts_again_what_has_just_begun,
    believes_the_phase_of_a_pod,
    leaves_proxies_behind,
)

ABOUT_MACHINES: Sequence[Bug] = (restarts_in_pods_that_are_to_be_left, waits_for_pods_that_are_lost)
"""Those that only show where machines fail beneath replicas that are restarted in place."""
ABOUT_ROLLS: Sequence[Bug] = (
    rolls_all_at_once,
    replaces_who_has_the_template_already,
    rolls_on_before_a_step_is_done,
)
"""Those that show where templates change."""
