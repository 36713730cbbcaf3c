"""What is to be done about a failure: the job's own rules first, then what is built in. Pure.

Built in is one distinction. What the cluster or a person has done to a pod says nothing about the run, so a restart for
it costs no budget; whatever the run itself may have caused does, so that a run that keeps failing ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from fthsdp_operator.api import ExitCodeOperator, Failure, OnExitCodes, Rule, RuleAction
from fthsdp_operator.observed.observe import PodView

__all__ = ["DISRUPTION", "INFRASTRUCTURE", "apply"]

INFRASTRUCTURE = frozenset(
    {
        # taken away while it ran
        "Evicted",
        "NodeCordoned",
        "NodeLost",
        "NodeShutdown",
        "NodeUnhealthy",
        "PodDeleted",
        "Preempted",
        "Preempting",
        "Shutdown",
        "Terminated",
        # never admitted by the kubelet of the node that it was bound to
        "NodeAffinity",
        "NodePorts",
        "SMTAlignmentError",
        "TaintToleration",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        # never placed
        "Unschedulable",
    }
)
"""Reasons of failures that the run cannot have caused. PodDeleted is one of them: a run cannot delete its pods."""
_OUT_OF_SOMETHING = "OutOf"
"""How a kubelet's reason begins when its node has not enough of a resource for the pod, as in OutOfcpu."""
DISRUPTION = ("DisruptionTarget", "True")
"""The condition by which Kubernetes says that it takes a pod away."""


def apply(rules: Sequence[Rule], failure: Failure, pod: PodView | None, *, homeless: bool = False) -> Failure:
    """Return the failure with the action that is asked for, and the rule that asks for it.

    ``pod`` is the one with which the failure began, as it was seen last; None when nobody saw it. ``homeless``: another
    pod of the replica had not found a node by then.
    """
    rule = next((rule for rule in rules if _matches(rule, failure, pod)), None)
    action = _built_in(failure, pod, homeless=homeless) if rule is None else rule.action
    return failure.model_copy(update={"action": action, "rule": None if rule is None else rule.name})


def _matches(rule: Rule, failure: Failure, pod: PodView | None) -> bool:
    if rule.on_pod_reasons is not None:
        return not _reasons(failure, pod).isdisjoint(rule.on_pod_reasons)
    if pod is None:
        return False
    if rule.on_exit_codes is not None:
        return _has_exit(rule.on_exit_codes, failure, pod)
    return any((it.type, it.status) in pod.conditions for it in rule.on_pod_conditions or ())


def _reasons(failure: Failure, pod: PodView | None) -> set[str]:
    """What people may know the failure by: our word for it, the pod's, and those of its containers that failed."""
    if pod is None:
        return {failure.reason}
    return {failure.reason, pod.reason, *(one.reason for one in pod.exits if one.code != 0)} - {""}


def _has_exit(wanted: OnExitCodes, failure: Failure, pod: PodView) -> bool:
    exits = {(one.container, one.code) for one in pod.exits}
    if failure.container is not None and failure.exit_code is not None:
        exits.add((failure.container, failure.exit_code))  # of a command whose container still runs
    return any(
        (code in wanted.values) is (wanted.operator is ExitCodeOperator.IN)
        for container, code in exits
        if code != 0 and wanted.container_name in (None, container)
    )


def _built_in(failure: Failure, pod: PodView | None, *, homeless: bool) -> RuleAction:
    disrupted = pod is not None and DISRUPTION in pod.conditions
    # The ranks of a replica wait for each other, but not for ever.
    waited_in_vain = homeless and failure.reason == "Error"
    if disrupted or waited_in_vain or failure.reason in INFRASTRUCTURE or failure.reason.startswith(_OUT_OF_SOMETHING):
        return RuleAction.RESTART_REPLICA_FREE
    return RuleAction.RESTART_REPLICA
