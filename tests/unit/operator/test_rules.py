"""What is asked for because of a failure: by the first of the job's rules that matches, else by who has caused it."""

from __future__ import annotations

from typing import Any

import pytest

from fthsdp_operator.api import Failure, Rule, RuleAction
from fthsdp_operator.observed.observe import Exit, PodView
from fthsdp_operator.rules.failure_rules import INFRASTRUCTURE, apply

PAID, FREE = RuleAction.RESTART_REPLICA, RuleAction.RESTART_REPLICA_FREE
DISRUPTED = frozenset({("DisruptionTarget", "True"), ("Ready", "False")})


def exited(code: int, container: str = "train", reason: str = "Error") -> Exit:
    return Exit(container=container, code=code, reason=reason, message="", time=None)


def pod(*exits: Exit, **fields: Any) -> PodView:
    who: dict[str, Any] = {
        "name": "llama-r2-a0-1",
        "uid": "u",
        "role": "trainer",
        "replica": 2,
        "attempt": 0,
        "index": 1,
    }
    return PodView(**who, phase="Failed", exits=exits, **fields)


def failure(reason: str = "Error") -> Failure:
    return Failure(pod="llama-r2-a0-1", reason=reason, time=0.0)


def rule(action: str = "FailJob", **criterion: Any) -> Rule:
    return Rule.model_validate({"name": "mine", "action": action, **criterion})


def codes(operator: str, *values: int, container: str | None = None) -> dict[str, Any]:
    name = {} if container is None else {"containerName": container}
    return {"onExitCodes": {"operator": operator, "values": list(values), **name}}


@pytest.mark.parametrize(
    ("reason", "seen", "action"),
    [
        ("Error", pod(exited(1)), PAID),
        ("OOMKilled", pod(exited(137, reason="OOMKilled")), PAID),
        ("ExitedEarly", pod(exited(0)), PAID),
        ("Hung", pod(), PAID),
        ("Silent", pod(), PAID),
        ("StateDiverged", pod(), PAID),
        ("DeadlineExceeded", pod(reason="DeadlineExceeded"), PAID),
        ("PodDeleted", pod(deleted=1.0), FREE),
        ("PodDeleted", None, FREE),
        ("Evicted", pod(reason="Evicted"), FREE),
        ("UnexpectedAdmissionError", pod(reason="UnexpectedAdmissionError"), FREE),
        ("OutOfcpu", pod(reason="OutOfcpu"), FREE),
        ("OutOfnvidia.com/gpu", pod(reason="OutOfnvidia.com/gpu"), FREE),
        ("Error", pod(exited(1), conditions=DISRUPTED), FREE),
        ("Error", pod(exited(1), conditions=frozenset({("DisruptionTarget", "False")})), PAID),
    ],
)
def test_what_the_cluster_or_a_person_has_done_costs_nothing(
    reason: str, seen: PodView | None, action: RuleAction
) -> None:
    judged = apply((), failure(reason), seen)
    assert (judged.action, judged.rule) == (action, None)


@pytest.mark.parametrize(("reason", "action"), [("Error", FREE), ("OOMKilled", PAID), ("Hung", PAID)])
def test_a_pod_that_ends_since_another_of_its_replica_has_found_no_node_costs_nothing(
    reason: str, action: RuleAction
) -> None:
    assert apply((), failure(reason), pod(exited(1)), homeless=True).action is action
    mine = rule("RestartReplica", **codes("In", 1))
    assert apply((mine,), failure(), pod(exited(1)), homeless=True).action is PAID


def test_no_reason_that_a_run_can_cause_is_free() -> None:
    assert INFRASTRUCTURE.isdisjoint(
        {"Error", "OOMKilled", "ExitedEarly", "DeadlineExceeded", "Hung", "Silent", "Frozen"}
    )


@pytest.mark.parametrize(
    ("criterion", "seen", "reason", "matches"),
    [
        (codes("In", 42, 43), pod(exited(43)), "Error", True),
        (codes("In", 42), pod(exited(43)), "Error", False),
        (codes("NotIn", 42), pod(exited(43)), "Error", True),
        (codes("NotIn", 42), pod(exited(42)), "Error", False),
        (codes("NotIn", 42), pod(exited(0)), "ExitedEarly", False),
        (codes("NotIn", 42), pod(), "PodDeleted", False),
        (codes("NotIn", 42), None, "PodDeleted", False),
        (codes("In", 7), pod(exited(7, "side"), exited(1)), "Error", True),
        (codes("In", 1), pod(exited(7, "side"), exited(1)), "Error", True),
        (codes("In", 7, container="train"), pod(exited(7, "side"), exited(1)), "Error", False),
        (codes("NotIn", 7, container="side"), pod(exited(7, "side"), exited(1)), "Error", False),
        (codes("In", 7, container="side"), pod(exited(7, "side"), exited(1)), "Error", True),
        ({"onPodReasons": ["Evicted", "Hung"]}, pod(), "Hung", True),
        ({"onPodReasons": ["PreemptionByScheduler"]}, pod(reason="PreemptionByScheduler"), "Preempted", True),
        ({"onPodReasons": ["Preempted"]}, pod(reason="PreemptionByScheduler"), "Preempted", True),
        ({"onPodReasons": ["OOMKilled"]}, pod(exited(137, "side", "OOMKilled")), "Error", True),
        ({"onPodReasons": ["Completed"]}, pod(exited(0, reason="Completed"), exited(1)), "Error", False),
        ({"onPodReasons": ["PodDeleted"]}, None, "PodDeleted", True),
        ({"onPodReasons": ["Hung"]}, pod(exited(1)), "Error", False),
        ({"onPodConditions": [{"type": "DisruptionTarget"}]}, pod(conditions=DISRUPTED), "Evicted", True),
        ({"onPodConditions": [{"type": "Ready", "status": "False"}]}, pod(conditions=DISRUPTED), "Error", True),
        ({"onPodConditions": [{"type": "Ready"}]}, pod(conditions=DISRUPTED), "Error", False),
        ({"onPodConditions": [{"type": "DisruptionTarget"}]}, None, "PodDeleted", False),
    ],
)
def test_a_rule_matches_what_it_names(
    criterion: dict[str, Any], seen: PodView | None, reason: str, matches: bool
) -> None:
    judged = apply((rule(**criterion),), failure(reason), seen)
    assert (judged.rule == "mine", judged.action is RuleAction.FAIL_JOB) == (matches, matches)


def test_the_first_rule_that_matches_decides() -> None:
    rules = (
        rule(**codes("In", 1)).model_copy(update={"name": "other"}),
        rule("RestartReplicaFree", **codes("NotIn", 1)),
        rule("FailJob", **codes("NotIn", 1)).model_copy(update={"name": "late"}),
    )
    judged = apply(rules, failure(), pod(exited(3)))
    assert (judged.rule, judged.action) == ("mine", FREE)


def test_a_rule_can_make_cost_what_is_free_otherwise() -> None:
    judged = apply((rule("RestartReplica", onPodReasons=["Evicted"]),), failure("Evicted"), pod(reason="Evicted"))
    assert judged.action is PAID
