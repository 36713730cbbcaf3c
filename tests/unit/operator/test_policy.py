"""What a failure costs: budgets in sliding windows, waits that grow, and faults that no restart can mend."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.operator.world import NOW, manifest

from fthsdp.exit_codes import EXIT_CONFIG, EXIT_LOST, EXIT_REFUSED, EXIT_TERMINATED
from fthsdp_operator.api import Failure, Job, JobStatus, ReplicaState, ReplicaStatus, RuleAction, parse_job
from fthsdp_operator.rules.policy import JITTER, Verdict, judge, restarted, wait_before

FAIL, ABANDON = RuleAction.FAIL_JOB, RuleAction.ABANDON_REPLICA
PAID, FREE = RuleAction.RESTART_REPLICA, RuleAction.RESTART_REPLICA_FREE
ACTIVE, AWAY, BACK = ReplicaState.ACTIVE, ReplicaState.BACKOFF, ReplicaState.CATCHING_UP


def job(policy: dict[str, Any] | None = None, **spec: Any) -> Job:
    return parse_job(manifest(failurePolicy=policy or {}, **spec))


def failed(
    index: int = 2,
    *,
    code: int | None = 1,
    reason: str = "Error",
    action: RuleAction = PAID,
    ago: float = 0.0,
    message: str = "",
    rule: str | None = None,
    during: ReplicaState = ACTIVE,
    **fields: Any,
) -> ReplicaStatus:
    """A replica that failed so many seconds ago."""
    failure = Failure(
        pod=f"llama-r{index}-a0-0",
        exit_code=code,
        reason=reason,
        action=action,
        rule=rule,
        message=message,
        time=NOW - ago,
        during=during,
    )
    return ReplicaStatus.model_validate({"index": index, "state": ACTIVE, "last_failure": failure, **fields})


def healthy(*indices: int) -> list[ReplicaStatus]:
    return [ReplicaStatus(index=index, state=ACTIVE) for index in indices]


def verdict(
    entry: ReplicaStatus, others: list[ReplicaStatus] | None = None, *, trained: bool = True, of: Job | None = None
) -> Verdict:
    return judge(of or job(), entry, healthy(0, 1) if others is None else others, NOW, trained=trained)


def ago(*seconds: float) -> tuple[float, ...]:
    return tuple(NOW - it for it in seconds)


# --- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("restarts", "action"),
    [
        ((), PAID),
        ((30, 20), PAID),
        ((40, 30, 20), ABANDON),
        ((100, 99.9, 20), ABANDON),
        ((100.1, 99.9, 20), PAID),
    ],
)
def test_the_budget_of_a_replica_is_spent_within_its_window(restarts: tuple[float, ...], action: RuleAction) -> None:
    bounded = job({"perReplica": {"limit": 3, "windowSeconds": 100}})
    entry = failed(recent_restarts=ago(*(it - 0.05 for it in restarts)))
    assert verdict(entry, of=bounded).action is action


@pytest.mark.parametrize(
    ("mine", "theirs", "action"),
    [
        ((10,), (30, 20), PAID),
        ((10,), (30, 20, 5), FAIL),
        ((), (40, 30, 20, 5), FAIL),
        ((10,), (101, 20, 5), PAID),
    ],
)
def test_the_budget_of_the_job_is_that_of_all_replicas_together(
    mine: tuple[float, ...], theirs: tuple[float, ...], action: RuleAction
) -> None:
    bounded = job({"job": {"limit": 4, "windowSeconds": 100}})
    others = [*healthy(0), ReplicaStatus(index=1, recent_restarts=ago(*theirs))]
    found = verdict(failed(recent_restarts=ago(*mine), message="boom"), others, of=bounded)
    assert found.action is action
    if action is FAIL:
        assert (found.reason, found.message) == (
            "JobBudgetExhausted",
            "replica 2 failed after 4 restarts of all replicas within 100 s (failurePolicy.job.limit is 4), last:"
            " llama-r2-a0-0 Error exit 1: boom",
        )


def test_what_costs_nothing_is_restarted_though_all_budgets_are_spent() -> None:
    spent = job({"perReplica": {"limit": 0}, "job": {"limit": 0}})
    assert verdict(failed(reason="Evicted", action=FREE), of=spent).action is FREE


def test_a_restart_is_entered_into_the_books_and_one_that_is_free_costs_nothing() -> None:
    bounded = job({"perReplica": {"windowSeconds": 50}, "job": {"limit": 9, "windowSeconds": 100}})
    before = failed(recent_restarts=ago(120, 70, 10), restarts=7, restarts_in_a_row=2)
    after = restarted(bounded, before, NOW)
    assert (after.restarts, after.restarts_in_a_row) == (8, 3)
    assert after.recent_restarts == ago(70, 10, 0)  # within the longer of the windows
    free = restarted(bounded, failed(action=FREE, recent_restarts=ago(70, 10), restarts=7, restarts_in_a_row=2), NOW)
    assert (free.restarts, free.restarts_in_a_row, free.recent_restarts) == (8, 3, ago(70, 10))


@pytest.mark.parametrize(
    ("policy", "left", "least", "action"),
    [
        ({}, 2, 2, ABANDON),
        ({}, 1, 2, FAIL),
        ({"onExhausted": "FailJob"}, 2, 1, FAIL),
        ({"onExhausted": "AbandonReplica"}, 1, 1, ABANDON),
        ({"onExhausted": "AbandonReplica"}, 0, 1, FAIL),
    ],
)
def test_a_replica_without_budget_is_abandoned_as_long_as_enough_others_can_train(
    policy: dict[str, Any], left: int, least: int, action: RuleAction
) -> None:
    others = [ReplicaStatus(index=index, state=AWAY if index < left else ReplicaState.ABANDONED) for index in range(2)]
    spent = job({"perReplica": {"limit": 0}, **policy}, minReplicas=least)
    found = verdict(failed(), others, of=spent)
    assert (found.action, found.reason) == (action, "RestartBudgetExhausted")
    assert "(failurePolicy.perReplica.limit is 0), last: llama-r2-a0-0 Error exit 1" in found.message
    assert ("could train, and minReplicas is" in found.message) is (
        action is FAIL and policy.get("onExhausted") != "FailJob"
    )


def test_spares_count_among_those_who_can_train() -> None:
    spent = job({"perReplica": {"limit": 0}}, minReplicas=3, spares=1)
    assert verdict(failed(), healthy(0, 1, 3), of=spent).action is ABANDON


def test_rules_that_fail_the_job_or_abandon_the_replica_say_their_name() -> None:
    found = verdict(failed(code=42, action=FAIL, rule="bad-data", message="trace\nno such shard"))
    assert (found.action, found.reason) == (FAIL, "FailedByRule")
    assert found.message == "rule bad-data of failurePolicy: llama-r2-a0-0 Error exit 42: no such shard"
    found = verdict(failed(action=ABANDON, rule="xid"))
    assert (found.action, found.reason) == (ABANDON, "AbandonedByRule")
    found = verdict(failed(action=ABANDON, rule="xid"), healthy(1))
    assert (found.action, found.reason) == (FAIL, "AbandonedByRule")
    assert found.message.endswith("without it 1 replica could train, and minReplicas is 2")


def test_all_that_a_judgement_needs_survives_being_written_and_read() -> None:
    entries = (
        failed(0, ago=20, state=AWAY, recent_restarts=ago(20)),
        failed(1, ago=10, state=AWAY, recent_restarts=ago(10)),
        failed(2, recent_restarts=ago(50, 30), restarts_in_a_row=2),
    )
    written = json.dumps(JobStatus(replica_statuses=entries).dump())
    read = JobStatus.model_validate(json.loads(written)).replica_statuses
    for policy in ({}, {"job": {"limit": 4}}, {"simultaneousFraction": 0}):
        of = job(policy)
        assert verdict(read[2], [*read[:2]], of=of) == verdict(entries[2], [*entries[:2]], of=of)


# --- waits ----------------------------------------------------------------------------------------------------------


def waits(entry: ReplicaStatus, of: Job) -> float:
    return verdict(entry, of=of).restart_at - NOW


@pytest.mark.parametrize(("done", "whole"), [(0, 0), (1, 5), (2, 10), (3, 20), (7, 300), (5000, 300)])
def test_waits_grow_up_to_the_longest_and_are_shortened_by_a_quarter_at_most(done: int, whole: float) -> None:
    seconds = waits(failed(restarts_in_a_row=done), job())
    assert (1 - JITTER) * whole <= seconds <= whole
    assert wait_before(done, job().spec.failure_policy.backoff) == whole


def test_the_same_restart_always_waits_as_long_and_other_replicas_otherwise() -> None:
    of = job()
    again = {waits(failed(index, attempt=3, restarts_in_a_row=3), of) for _ in range(3) for index in range(50)}
    assert len(again) == 50
    assert max(again) - min(again) > 0.8 * JITTER * 20
    elsewhere = parse_job({**manifest(), "metadata": {**manifest()["metadata"], "uid": "job-2"}})
    assert waits(failed(restarts_in_a_row=3), of) != waits(failed(restarts_in_a_row=3), elsewhere)


def test_what_is_free_waits_as_long() -> None:
    of = job()
    free = failed(reason="Evicted", action=FREE, restarts_in_a_row=3)
    assert waits(free, of) == waits(failed(restarts_in_a_row=3), of) > 0


@pytest.mark.parametrize(("since", "in_a_row"), [(600.0, 1), (599.0, 5), (None, 5)])
def test_after_a_stable_time_the_next_restart_is_a_first_one(since: float | None, in_a_row: int) -> None:
    of, ready = job(), None if since is None else NOW - since
    entry = failed(restarts_in_a_row=4, ready_since=ready)
    assert (waits(entry, of) == 0) is (in_a_row == 1)
    assert restarted(of, entry, NOW).restarts_in_a_row == in_a_row


def test_how_long_is_stable_can_be_said() -> None:
    of = job({"backoff": {"stableSeconds": 30}})
    assert waits(failed(restarts_in_a_row=4, ready_since=NOW - 30), of) == 0


# --- faults of the code ---------------------------------------------------------------------------------------------


def test_the_same_exit_code_everywhere_at_once_is_a_fault_of_the_code() -> None:
    others = [failed(0, ago=3, state=AWAY), failed(1)]
    found = verdict(failed(message="Traceback\nValueError: no"), others)
    assert (found.action, found.reason, found.message) == (
        FAIL,
        "CodeFault",
        "replicas 0, 1 and 2 of 3 failed within 60 s with exit code 1, which is a fault of the code that they run"
        " (failurePolicy.simultaneousFraction is 1): llama-r2-a0-0 Error exit 1: ValueError: no",
    )


@pytest.mark.parametrize("code", [EXIT_LOST, EXIT_REFUSED, EXIT_TERMINATED, 137, 0, None])
def test_codes_that_say_nothing_about_the_code_are_no_fault_of_it(code: int | None) -> None:
    assert verdict(failed(code=code), [failed(0, code=code), failed(1, code=code)]).action is PAID


@pytest.mark.parametrize("code", [1, EXIT_CONFIG, 134, 139])
def test_other_codes_are(code: int) -> None:
    assert verdict(failed(code=code), [failed(0, code=code), failed(1, code=code)]).reason == "CodeFault"


def of_template(revision: str | None, replica: ReplicaStatus) -> ReplicaStatus:
    assert replica.last_failure is not None
    failure = replica.last_failure.model_copy(update={"revision": revision})
    return replica.model_copy(update={"last_failure": failure})


def test_failures_of_another_template_are_no_fault_of_this_one() -> None:
    before = [of_template("old", failed(index)) for index in range(2)]
    assert verdict(of_template("new", failed()), before).action is PAID
    assert verdict(of_template("old", failed()), before).reason == "CodeFault"
    unknown = [of_template(None, failed(index)) for index in range(2)]
    assert verdict(of_template("new", failed()), unknown).reason == "CodeFault"


def test_all_out_of_memory_at_once_is_one() -> None:
    oom = [failed(index, code=137, reason="OOMKilled") for index in range(3)]
    assert verdict(oom[2], oom[:2]).reason == "CodeFault"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(failed(1, code=2), id="another code"),
        pytest.param(failed(1, ago=61, state=AWAY), id="too long ago"),
        pytest.param(failed(1, ago=20, state=ACTIVE), id="it trains again"),
        pytest.param(failed(1, ago=20, state=BACK), id="it has come up again"),
        pytest.param(failed(1, reason="Evicted", action=FREE), id="it was evicted, and its exit code is of that"),
        pytest.param(failed(1, reason="PodDeleted", action=FREE), id="it was deleted"),
        pytest.param(failed(1, reason="Hung"), id="it was taken out"),
        pytest.param(failed(1, rule="flaky"), id="a rule speaks of it"),
        pytest.param(failed(1, during=BACK), id="it fell with those from whom it caught up"),
        pytest.param(
            failed(1, ago=-300, state=ACTIVE), id="it trains again, though by a clock that was set back it is to fail"
        ),
        pytest.param(ReplicaStatus(index=1, state=ACTIVE), id="it never failed"),
    ],
)
def test_one_replica_that_did_not_fail_with_the_others_acquits_the_code(other: ReplicaStatus) -> None:
    assert verdict(failed(), [failed(0), other]).action is PAID


def test_a_rule_of_the_user_that_asks_for_a_restart_gets_one() -> None:
    everywhere = [failed(index, rule="storage") for index in range(3)]
    assert verdict(everywhere[2], everywhere[:2]).action is PAID


def test_a_single_replica_that_fails_again_and_again_is_no_fault_of_the_code() -> None:
    alone = job(replicas=1, minReplicas=1)
    assert verdict(failed(0, recent_restarts=ago(30, 20, 10)), [], of=alone, trained=False).action is PAID
    assert verdict(failed(recent_restarts=ago(30, 20, 10))).action is PAID


def test_of_two_replicas_both_have_to_fail_whatever_the_fraction() -> None:
    both = job({"simultaneousFraction": 0.1}, replicas=2, minReplicas=1)
    assert verdict(failed(1), healthy(0), of=both).action is PAID
    assert verdict(failed(1), [failed(0)], of=both).reason == "CodeFault"


@pytest.mark.parametrize(
    ("fraction", "replicas", "needed"), [(0.5, 8, 4), (0.51, 8, 5), (0.3, 10, 3), (0.01, 10, 2), (1, 5, 5), (0, 4, 99)]
)
def test_how_many_it_takes(fraction: float, replicas: int, needed: int) -> None:
    of = job({"simultaneousFraction": fraction}, replicas=replicas)
    for number in range(1, replicas + 1):
        others = [failed(index) for index in range(1, number)] + healthy(*range(number, replicas))
        assert (verdict(failed(0), others, of=of).reason == "CodeFault") is (number >= needed)


def test_a_long_list_of_replicas_is_cut() -> None:
    of = job(replicas=20)
    found = verdict(failed(0), [failed(index) for index in range(1, 20)], of=of)
    assert found.message.startswith("replicas 0, 1, 2, 3, 4, 5, 6, 7 and 12 more of 20 failed within 60 s")


def test_spares_and_replicas_that_were_abandoned_are_not_waited_for() -> None:
    of = job(replicas=3, spares=1)
    standing_by = ReplicaStatus(index=3, state=ReplicaState.SPARE)
    assert verdict(failed(0), [failed(1), failed(2), standing_by], of=of).reason == "CodeFault"
    gone = failed(1, ago=9000, state=ReplicaState.ABANDONED)
    assert verdict(failed(0), [gone, failed(2)], of=job()).reason == "CodeFault"


def test_before_the_first_step_it_does_not_matter_how_long_ago_the_others_failed() -> None:
    late = [failed(0, ago=900, state=AWAY), failed(1, ago=300, state=ReplicaState.ABANDONED)]
    found = verdict(failed(), late, trained=False)
    assert found.reason == "CodeFault"
    assert found.message.startswith("replicas 0, 1 and 2 of 3 failed before the first step with exit code 1")
    assert verdict(failed(), late, trained=True).action is PAID


def test_before_the_first_step_nobody_has_anything_to_catch_up_with() -> None:
    waiting = [failed(index, during=BACK) for index in range(3)]
    assert verdict(waiting[2], waiting[:2], trained=False).reason == "CodeFault"
    assert verdict(waiting[2], waiting[:2], trained=True).action is PAID


def test_bad_input_fails_the_job_unless_it_has_trained_or_a_rule_speaks_of_it() -> None:
    bad = failed(code=EXIT_CONFIG, message="no data at /data")
    found = verdict(bad, trained=False)
    assert (found.reason, found.message) == ("ConfigError", "llama-r2-a0-0 Error exit 2: no data at /data")
    assert verdict(bad, trained=True).action is PAID
    assert verdict(failed(code=EXIT_CONFIG, rule="patience"), trained=False).action is PAID
