"""Restarts in place: which failures they are for, and how pods are told. Pure.

A pod learns the number of its attempt from its label, through a file; its launcher starts the command again when the
number grows. Who is restarted so keeps its pods, their names included: ``podsAttempt`` of its status says whose those
are, and from there ``observe`` takes them for pods of the new attempt.
"""

from __future__ import annotations

from collections.abc import Iterable

from fthsdp_operator.api import ATTEMPT_LABEL, Failure, Job, ReplicaState, ReplicaStatus, RuleAction
from fthsdp_operator.observed.observe import Observed, PodView
from fthsdp_operator.rules import nodes, policy
from fthsdp_operator.rules.actions import Label

__all__ = ["POLL", "is_possible", "judged", "labels", "labels_to_set"]

POLL = 0.5
"""Seconds after which a job whose pods have launchers is looked at again without any event: what they say stands with
the coordinator, and no event tells of it."""


def is_possible(job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure, now: float) -> bool:
    """Whether a replica that failed can be restarted where it is.

    Only a crash of its own process can be mended so, and only once: if the fault is the pod's or the machine's, it
    comes back before the replica was stable. All its pods have to be as they were before, on nodes that are well, and
    that it is not to leave anyway.
    """
    if job.spec.failure_policy.in_place is None or failure.reason != "Error":
        return False
    if entry.revision != job.spec.revision:
        return False  # it is restarted with the template as it is now
    if policy.in_a_row(entry, job.spec.failure_policy.backoff, now) > 0:
        return False
    pods = observed.group(entry.index, entry.attempt)
    whole = len(pods) == job.spec.pods_per_replica and all(_is_well(observed, pod) for pod in pods)
    return whole and nodes.wish(job, observed, entry, now) is None


def _is_well(observed: Observed, pod: PodView) -> bool:
    node = observed.nodes.get(pod.node or "")
    return pod.alive and pod.phase == "Running" and not pod.reason and (node is None or node.ready == "True")


def judged(job: Job, observed: Observed, entry: ReplicaStatus, failure: Failure) -> Failure:
    """A restart in place that never came about, as a container had ended by then too, is no second failure.

    One process that dies takes the others along, and what their launchers tell arrives before a kubelet has told how
    the first one ended. The same holds where a kubelet shows the label too late for a launcher's patience.
    """
    built_in = failure.rule is None and failure.action is RuleAction.RESTART_REPLICA
    if entry.pods_attempt is None or entry.state is not ReplicaState.STARTING or not built_in:
        return failure
    pods = observed.group(entry.index, entry.attempt)
    if len(pods) == job.spec.pods_per_replica and pods.all_run:
        return failure
    return failure.model_copy(update={"action": RuleAction.RESTART_REPLICA_FREE})


def labels(pods: Iterable[PodView], attempt: int) -> tuple[Label, ...]:
    """Tell pods which attempt they are to run."""
    why = f"it is to run attempt {attempt} of its replica"
    return tuple(
        Label(name=pod.name, uid=pod.uid, labels={ATTEMPT_LABEL: str(attempt)}, why=why) for pod in pods if pod.alive
    )


def labels_to_set(observed: Observed, entry: ReplicaStatus) -> tuple[Label, ...]:
    """Tell those pods of a replica that was restarted in place which have not been told so far."""
    if entry.pods_attempt is None:
        return ()
    return labels((pod for pod in observed.group(entry.index, entry.attempt) if pod.label is not None), entry.attempt)
