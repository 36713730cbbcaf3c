"""Only the replica that failed is restarted, once, whatever happened to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from tests.unit.operator.world import NAME, World, manifest

from fthsdp.coordinator.messages import Cause, Verdict
from fthsdp_operator.api import (
    KIND,
    Failure,
    JobState,
    ReplicaState,
    ReplicaStatus,
    RuleAction,
    Waiting,
    format_time,
    parse_job,
)
from fthsdp_operator.observed.observe import observe
from fthsdp_operator.rules.job_status import status_of
from fthsdp_operator.rules.policy import JITTER

Fault = Callable[[World], None]


def crash(world: World) -> None:
    world.exits("r2-a0-1", 1)


def out_of_memory(world: World) -> None:
    world.exits("r2-a0-1", 137, reason="OOMKilled")


def deleted(world: World) -> None:
    world.user_deletes("r2-a0-1")


def deleted_and_gone(world: World) -> None:
    world.user_deletes("r2-a0-1")
    world.exits("r2-a0-1", 143)
    world.vanish("r2-a0-1")


def evicted(world: World) -> None:
    world.pod("r2-a0-1")["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "the node is out of disk"}


def node_lost(world: World) -> None:
    world.user_deletes("r2-a0-1")
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    world.pod("r2-a0-1")["status"]["conditions"] = [condition]


def left_alone(world: World) -> None:
    world.exits("r2-a0-1", 0)


FAULTS = [
    (crash, "Error", 1),
    (out_of_memory, "OOMKilled", 137),
    (deleted, "PodDeleted", None),
    (deleted_and_gone, "PodDeleted", 143),
    (evicted, "Evicted", None),
    (node_lost, "NodeLost", None),
    (left_alone, "ExitedEarly", 0),
]


def failure(world: World, replica: int = 2) -> Failure:
    entry = world.job.status.replica(replica)
    assert entry is not None
    assert entry.last_failure is not None
    return entry.last_failure


@pytest.mark.parametrize(("fault", "reason", "code"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS])
def test_a_failed_replica_is_restarted_and_no_other_is_touched(fault: Fault, reason: str, code: int | None) -> None:
    async def story() -> None:
        world = World()
        await world.train()
        before = world.pods
        fault(world)
        await world.settle()
        if fault is left_alone:
            assert world.pods == before
            world.now += 61
            await world.settle()
        others = {name: uid for name, uid in before.items() if not name.startswith("r2")}
        assert {name: uid for name, uid in world.pods.items() if not name.startswith("r2")} == others
        assert [name for name in world.pods if name.startswith("r2")] == ["r2-a1-0", "r2-a1-1"]
        why = failure(world)
        assert (why.pod, why.reason, why.exit_code) == (f"{NAME}-r2-a0-1", reason, code)
        assert world.job.status.restarts == 1
        # Who is only asked to stop leaves at a step boundary by itself.
        assert [(it.replica, it.attempt) for it in world.told] == ([] if fault is deleted else [(2, 0)])

    asyncio.run(story())


def test_a_deleted_replica_that_does_not_leave_in_its_grace_period_is_declared_gone() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_deletes("r2-a0-1")
        await world.settle()
        assert world.told == []
        world.exits("r2-a0-1", 137)
        await world.settle()
        assert [(it.replica, it.attempt) for it in world.told] == [(2, 0)]

    asyncio.run(story())


def test_the_attempt_is_written_before_anything_is_done() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r2-a0-1", 1)
        world.writes.clear()
        await world.look()
        assert world.writes == [
            "status",
            "tell 2",
            f"delete Pod {NAME}-r2-a0-0",
            f"delete Pod {NAME}-r2-a0-1",
            f"create Pod {NAME}-r2-a1-0",
            f"create Pod {NAME}-r2-a1-1",
        ]

    asyncio.run(story())


def test_new_pods_do_not_wait_for_the_old_ones_to_terminate() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_deletes("r2-a0-1")
        await world.settle()
        assert "deletionTimestamp" in world.pod("r2-a0-0")["metadata"]
        assert {"r2-a1-0", "r2-a1-1"} <= world.pods.keys()

    asyncio.run(story())


def test_two_replicas_that_fail_together_are_both_restarted() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r0-a0-0", 1)
        world.exits("r1-a0-1", 1)
        await world.settle()
        assert sorted(world.pods) == ["r0-a1-0", "r0-a1-1", "r1-a1-0", "r1-a1-1", "r2-a0-0", "r2-a0-1"]

    asyncio.run(story())


def test_the_pod_that_went_first_is_named() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_deletes("r2-a0-1")
        world.now += 1
        world.exits("r2-a0-0", 1)  # it lost its peer
        await world.settle()
        assert (failure(world).pod, failure(world).reason) == (f"{NAME}-r2-a0-1", "PodDeleted")

    asyncio.run(story())


def test_the_exit_code_is_filled_in_when_it_becomes_known() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_deletes("r2-a0-1")
        await world.settle()
        assert failure(world).exit_code is None
        world.exits("r2-a0-1", 143)
        world.vanish("r2-a0-1")  # only a watch event shows the exit code
        await world.settle()
        assert failure(world).exit_code == 143
        assert failure(world).container == "train"
        assert world.job.status.last_failure == f"r2 {NAME}-r2-a0-1 PodDeleted exit 143"
        assert world.job.status.restarts == 1

    asyncio.run(story())


def test_a_replica_that_was_asked_to_leave_exits_with_0_and_is_restarted() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_deletes("r2-a0-1")
        world.exits("r2-a0-0", 0)
        world.exits("r2-a0-1", 0)
        await world.settle()
        assert {"r2-a1-0", "r2-a1-1"} <= world.pods.keys()

    asyncio.run(story())


def test_a_script_that_ends_with_0_before_anybody_trains_is_started_again() -> None:
    async def story() -> None:
        world = World()
        await world.settle()
        world.kubelets_start_everything()
        world.exits("r2-a0-0", 0)
        world.exits("r2-a0-1", 0)
        await world.settle()
        assert world.pods.keys() == {f"r{replica}-a0-{index}" for replica in range(3) for index in range(2)}
        world.now += 61
        await world.settle()
        assert {"r2-a1-0", "r2-a1-1"} <= world.pods.keys()
        assert (failure(world).reason, failure(world).exit_code) == ("ExitedEarly", 0)

    asyncio.run(story())


def test_a_script_that_ends_with_0_while_the_others_wait_for_it_is_started_again() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r2-a0-0", 0)
        world.exits("r2-a0-1", 0)
        await world.settle()
        entry = world.job.status.replica(2)
        assert entry is not None
        assert entry.state is ReplicaState.FINISHED  # as far as anybody can know
        world.everybody_trains()
        assert world.coordinator is not None
        world.coordinator = world.coordinator.model_copy(update={"paused": True})
        await world.settle()
        world.now += 61
        await world.settle()
        assert {"r2-a1-0", "r2-a1-1"} <= world.pods.keys()
        assert failure(world).reason == "ExitedEarly"

    asyncio.run(story())


def test_who_failed_while_the_run_seemed_to_be_over_is_started_again_when_it_is_not() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        for name in ("r1-a0-0", "r1-a0-1"):
            world.exits(name, 1)
        for name in ("r0-a0-0", "r0-a0-1"):
            world.exits(name, 0)
        await world.settle()
        assert [entry.state for entry in world.job.status.replica_statuses[:2]] == [
            ReplicaState.FINISHED,
            ReplicaState.FAILED,
        ]
        world.everybody_trains()
        assert world.coordinator is not None
        world.coordinator = world.coordinator.model_copy(update={"paused": True})
        await world.settle()
        assert {"r1-a1-0", "r1-a1-1"} <= world.pods.keys()
        world.now += 61
        await world.settle()
        assert {"r0-a1-0", "r0-a1-1"} <= world.pods.keys()

    asyncio.run(story())


def test_pods_that_are_not_there_yet_are_created_and_cost_nothing() -> None:
    async def story() -> None:
        world = World()
        await world.look()
        world.vanish("r1-a0-1")
        await world.settle()
        assert len(world.pods) == 6
        assert world.job.status.restarts == 0

    asyncio.run(story())


def test_the_first_restart_is_immediate_and_further_ones_wait() -> None:
    async def story() -> None:
        world = World()
        waits = []
        for attempt in range(4):
            await world.train()
            world.exits(f"r2-a{attempt}-0", 1)
            wait = await world.look()
            entry = world.job.status.replica(2)
            assert entry is not None
            due = entry.next_restart_time
            waits.append(0.0 if due is None else due - world.now)
            assert due is None or wait <= due - world.now
            assert (f"r2-a{attempt + 1}-0" in world.pods) is (due is None)
            world.now = due or world.now
        assert waits[0] == 0
        assert all((1 - JITTER) * whole <= wait <= whole for whole, wait in zip((5, 10, 20), waits[1:], strict=True))

    asyncio.run(story())


def test_after_a_stable_time_a_replica_is_restarted_at_once_again() -> None:
    async def story() -> None:
        world = World()
        for attempt in range(3):
            await world.train()
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
            world.now += 30
        await world.train()
        world.now += 599
        world.coordinator = None  # its silence is nobody's failure, and no less stable
        await world.settle()
        world.now += 1
        world.exits("r2-a3-0", 1)
        await world.settle()
        assert "r2-a4-0" in world.pods
        entry = world.job.status.replica(2)
        assert entry is not None
        assert (entry.restarts, entry.restarts_in_a_row, entry.ready_since) == (4, 1, None)

    asyncio.run(story())


@pytest.mark.parametrize(("replicas", "room"), [(2, 1024), (512, 256)])
def test_of_many_replicas_each_keeps_less_of_what_its_pods_said_last(replicas: int, room: int) -> None:
    """All of it has to fit into one object."""

    async def story() -> None:
        world = World(manifest(replicas=replicas, podsPerReplica=1))
        await world.look()
        world.exits("r1-a0-0", 1, words="é" * 2000 + "the end")
        await world.look()
        entry = world.job.status.replica(1)
        assert entry is not None
        assert entry.last_failure is not None
        assert entry.last_failure.message.endswith("éthe end")
        assert room - 1 <= len(entry.last_failure.message.encode()) <= room

    asyncio.run(story())


def test_what_a_pod_says_after_its_failure_was_noted_has_to_find_room_as_well() -> None:
    async def story() -> None:
        world = World(manifest(replicas=512, podsPerReplica=1))
        await world.look()
        world.user_deletes("r1-a0-0")
        await world.look()
        world.exits("r1-a0-0", 1, words="x" * 2000 + "the end")
        await world.look()
        entry = world.job.status.replica(1)
        assert entry is not None
        assert entry.last_failure is not None
        assert entry.last_failure.message.endswith("the end")
        assert len(entry.last_failure.message) == 256

    asyncio.run(story())


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED, JobState.FAILED])
def test_messages_that_were_written_before_they_had_to_find_room_are_cut_and_written_once(state: JobState) -> None:
    async def story() -> None:
        world = World(manifest(deadlines={"activeSeconds": 1000}))
        await world.train()
        world.user_changes(suspend=state is JobState.SUSPENDED)
        world.now += 1001 if state is JobState.FAILED else 0
        await world.settle()
        assert world.job.status.state is state
        for entry in world.objects[KIND, NAME]["status"]["replicaStatuses"]:
            entry["lastFailure"] = {
                "pod": "p", "reason": "Error", "exitCode": 1, "message": "é" * 4096, "time": format_time(world.now)
            }  # fmt: skip
        world.writes.clear()
        await world.look()
        sizes = [len(it.last_failure.message.encode()) for it in world.job.status.replica_statuses if it.last_failure]
        assert sizes == [1024] * 3
        await world.look()
        await world.look()
        assert world.writes.count("status") == 1

    asyncio.run(story())


@pytest.mark.parametrize("character", ["x", "é", "\N{GRINNING FACE}", '"', "\x1b", "<", "\ud800"])
def test_the_largest_job_fits_into_one_object_whatever_its_pods_say(character: str) -> None:
    """etcd takes 1.5 MiB, and the API server adds who wrote which field. It writes < as six bytes."""
    now = 1_800_000_000.5
    words = character * 1024
    entries = tuple(
        ReplicaStatus(
            index=index, state=ReplicaState.BACKOFF, attempt=9, revision="0123456789", restarts=9, restarts_in_a_row=9,
            recent_restarts=(now,), ready_since=now, trains_since_step=100_000, away_since=now, next_restart_time=now,
            waiting=Waiting(reason="Unschedulable", message=words[:256], pod=f"llama-r{index}-a9-0", since=now),
            last_failure=Failure(
                pod=f"llama-r{index}-a9-0", node=f"gpu-node-{index:04}.example.internal", container="train",
                exit_code=1, reason="Error", message=words, time=now, during=ReplicaState.ACTIVE,
                action=RuleAction.RESTART_REPLICA, revision="0123456789",
            ),
        )
        for index in range(1024)
    )  # fmt: skip
    job = parse_job(manifest(replicas=1024, podsPerReplica=1))
    status = status_of(job, observe(job, [], fresh_key="", coordinator_image=""), entries, now).dump()
    stored = json.dumps(status, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    assert len(stored.encode()) < 1024 * 1024


def test_a_coordinator_that_is_restarted_leaves_a_replica_as_stable_as_it_was() -> None:
    async def story() -> None:
        world = World()
        for attempt in range(2):
            await world.train()
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
            world.now += 30
        await world.train()
        world.now += 590
        known, trained_since = world.coordinator, world.job.status.replica(2)
        assert known is not None
        world.coordinator = known.model_copy(update={"replicas": ()})  # it has heard of nobody so far
        await world.settle()
        assert ReplicaState.ACTIVE not in {entry.state for entry in world.job.status.replica_statuses}
        world.coordinator = known
        await world.settle()
        assert world.job.status.replica(2) == trained_since
        world.now += 10
        world.exits("r2-a2-0", 1)
        await world.settle()
        entry = world.job.status.replica(2)
        assert entry is not None
        assert (entry.next_restart_time, entry.restarts_in_a_row, entry.away_since) == (None, 1, world.now)

    asyncio.run(story())


def test_what_costs_no_budget_is_restarted_for_ever_and_ever_more_slowly() -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy={"perReplica": {"limit": 0}, "job": {"limit": 0}}))
        for attempt in range(12):
            await world.train()
            world.user_deletes(f"r2-a{attempt}-1")
            await world.settle()
            world.now += 300
        entry = world.job.status.replica(2)
        assert entry is not None
        assert (entry.restarts, entry.recent_restarts, entry.restarts_in_a_row) == (12, (), 12)
        assert entry.next_restart_time is not None
        assert not world.job.status.terminal
        assert world.events[-1].message.endswith("s, at no cost")

    asyncio.run(story())


def test_ranks_that_wait_in_vain_for_a_pod_without_a_node_cost_no_budget() -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy={"perReplica": {"limit": 0}}))
        await world.settle()
        for replica in range(3):
            world.pod(f"r{replica}-a0-0")["spec"]["nodeName"] = "node-1"
            world.exits(f"r{replica}-a0-0", 1)  # r0-a0-1 and the others are still Pending
        await world.settle()
        assert not world.job.status.terminal
        assert {"r0-a1-0", "r1-a1-0", "r2-a1-0"} <= world.pods.keys()

    asyncio.run(story())


@pytest.mark.parametrize("fault", [crash, deleted, evicted])
def test_a_rule_comes_before_what_is_built_in(fault: Fault) -> None:
    async def story() -> None:
        rules = [
            {"name": "evictions", "onPodReasons": ["Evicted"], "action": "FailJob"},
            {"name": "codes", "onExitCodes": {"operator": "In", "values": [1]}, "action": "RestartReplicaFree"},
            {"name": "people", "onPodReasons": ["PodDeleted"], "action": "RestartReplica"},
        ]
        world = World(manifest(failurePolicy={"rules": rules}))
        await world.train()
        fault(world)
        await world.settle()
        why, entry = failure(world), world.job.status.replica(2)
        assert entry is not None
        assert (why.rule, why.action, len(entry.recent_restarts), world.job.status.state) == {
            crash: ("codes", "RestartReplicaFree", 0, JobState.DEGRADED),
            deleted: ("people", "RestartReplica", 1, JobState.DEGRADED),
            evicted: ("evictions", "FailJob", 0, JobState.FAILED),
        }[fault]

    asyncio.run(story())


def test_a_rule_sees_the_container_and_the_condition_of_the_pod_that_failed() -> None:
    async def story() -> None:
        rules = [
            {
                "name": "sidecar",
                "onExitCodes": {"containerName": "train", "operator": "NotIn", "values": [3]},
                "action": "FailJob",
            },
            {
                "name": "cable",
                "onPodConditions": [{"type": "Cable", "status": "False"}],
                "action": "RestartReplicaFree",
            },
        ]
        world = World(manifest(failurePolicy={"rules": rules}))
        await world.train()
        world.exits("r2-a0-1", 3)
        world.pod("r2-a0-1")["status"]["conditions"] = [{"type": "Cable", "status": "False"}]
        await world.settle()
        assert failure(world).rule == "cable"

    asyncio.run(story())


def test_the_same_fault_in_all_replicas_at_once_fails_the_job_and_nobody_is_restarted() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        for replica in range(3):
            world.exits(f"r{replica}-a0-0", 3)
        await world.settle()
        status = world.job.status
        failed = world.condition("Failed")
        assert (status.state, failed.status, failed.reason) == (JobState.FAILED, "True", "CodeFault")
        assert failed.message.startswith("replicas 0, 1 and 2 of 3 failed within 60 s with exit code 3")
        assert [(it.state, it.attempt, it.restarts) for it in status.replica_statuses] == [
            (ReplicaState.FAILED, 0, 0)
        ] * 3
        assert sorted(world.pods) == ["r0-a0-0", "r1-a0-0", "r2-a0-0"]  # they have ended, and keep their logs

    asyncio.run(story())


def test_the_same_fault_of_one_replica_after_the_other_fails_the_job_when_the_last_one_has_it() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        for replica in range(3):
            world.exits(f"r{replica}-a0-0", 3)
            await world.settle()
            world.now += 5
        assert world.job.status.state is JobState.FAILED
        assert [event.reason for event in world.events if event.warning][-1] == "CodeFault"

    asyncio.run(story())


def test_replicas_that_come_back_between_the_same_faults_are_no_fault_of_the_code() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        for replica in range(3):
            world.exits(f"r{replica}-a0-0", 3)
            await world.train()
            world.now += 5
        assert (world.job.status.state, world.job.status.restarts) == (JobState.RUNNING, 3)

    asyncio.run(story())


def test_the_budget_of_the_job_is_that_of_all_replicas() -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy={"job": {"limit": 2, "windowSeconds": 600}}))
        await world.train()
        for replica in (0, 2, 1):
            assert not world.job.status.terminal
            world.exits(f"r{replica}-a0-0", 1)
            await world.train()
            world.now += 100
        failed = world.condition("Failed")
        assert (world.job.status.restarts, failed.reason) == (2, "JobBudgetExhausted")
        assert failed.message.startswith("replica 1 failed after 2 restarts of all replicas within 600 s")

    asyncio.run(story())


def test_a_replica_that_uses_up_its_budget_fails_the_job_and_everything_stops() -> None:
    async def story() -> None:
        budget = {"perReplica": {"limit": 2, "windowSeconds": 600}, "onExhausted": "FailJob"}
        world = World(manifest(failurePolicy=budget))
        for attempt in range(3):
            world.now += 10
            await world.train()
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
        status = world.job.status
        failed = world.condition("Failed")
        assert (status.state, failed.status, failed.reason) == (JobState.FAILED, "True", "RestartBudgetExhausted")
        assert "replica 2" in failed.message
        assert "llama-r2-a2-0 Error exit 1" in failed.message
        assert list(world.pods) == ["r2-a2-0"]  # it has ended, and keeps its logs

    asyncio.run(story())


def test_restarts_outside_the_window_are_forgiven() -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy={"perReplica": {"limit": 1, "windowSeconds": 60}}))
        for attempt in range(4):
            await world.train()
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
            world.now += 61
        assert world.job.status.restarts == 4
        assert not world.job.status.terminal

    asyncio.run(story())


def test_bad_input_at_the_start_fails_the_job_at_once() -> None:
    async def story() -> None:
        world = World()
        await world.settle()
        world.kubelets_start_everything()
        world.exits("r1-a0-0", 2, words="no data at /data\n")
        await world.settle()
        failed = world.condition("Failed")
        assert (failed.reason, failed.message) == ("ConfigError", "llama-r1-a0-0 Error exit 2: no data at /data")

    asyncio.run(story())


def test_bad_input_of_one_replica_of_a_job_that_trained_is_a_failure_like_others() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r1-a0-0", 2)
        await world.settle()
        assert "r1-a1-0" in world.pods
        assert not world.job.status.terminal

    asyncio.run(story())


def test_a_replica_that_the_coordinator_took_out_is_restarted_though_its_pods_run() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        before = world.pods
        assert world.coordinator is not None
        reason = "nothing was heard of it for 5 s"
        frozen = Verdict(replica=2, attempt=0, cause=Cause.SILENT, reason=reason)
        world.coordinator = world.coordinator.model_copy(update={"verdicts": (frozen,)})
        await world.settle()
        assert {"r2-a1-0", "r2-a1-1"} <= world.pods.keys()
        assert {name: uid for name, uid in world.pods.items() if name[:2] in ("r0", "r1")} == {
            name: uid for name, uid in before.items() if name[:2] in ("r0", "r1")
        }
        why = failure(world)
        assert (why.pod, why.reason, why.message) == (f"{NAME}-r2-a0-0", "Silent", reason)
        assert world.job.status.restarts == 1  # an old verdict counts once

    asyncio.run(story())


def test_a_coordinator_that_still_counts_on_an_old_attempt_is_told_again() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r2-a0-1", 1)
        world.deaf = True
        await world.look()
        world.told.clear()
        await world.look()  # its status still has attempt 0 of replica 2 as a member
        assert [(it.replica, it.attempt) for it in world.told] == [(2, 0)]

    asyncio.run(story())


def test_states_of_a_replica_on_its_way_back() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        seen: list[tuple[str | None, JobState, ReplicaState]] = []

        def note() -> None:
            entry = world.job.status.replica(2)
            assert entry is not None
            seen.append((world.job.status.ready, world.job.status.state, entry.state))

        note()
        world.user_deletes("r2-a0-1")
        await world.look()
        note()
        world.vanish("r2-a0-1")
        world.vanish("r2-a0-0")
        await world.look()
        note()
        world.kubelets_start_everything()
        world.everybody_trains(step=20)
        await world.look()
        note()
        assert seen == [
            ("3/3", JobState.RUNNING, ReplicaState.ACTIVE),
            ("2/3", JobState.DEGRADED, ReplicaState.PENDING),
            ("2/3", JobState.DEGRADED, ReplicaState.STARTING),
            ("3/3", JobState.RUNNING, ReplicaState.ACTIVE),
        ]

    asyncio.run(story())


def test_of_a_traceback_events_show_the_last_line_and_the_status_keeps_the_end() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r2-a0-0", 1)
        ended = world.pod("r2-a0-0")["status"]["containerStatuses"][0]["state"]["terminated"]
        ended["message"] = "Traceback (most recent call last):\n" + "  more\n" * 400 + "ValueError: no\n"
        await world.settle()
        (event,) = [event for event in world.events if event.reason == "ReplicaFailed"]
        assert event.message == "r2 llama-r2-a0-0 Error exit 1: ValueError: no; attempt 1 starts now"
        assert failure(world).message.endswith("more\nValueError: no")
        assert len(failure(world).message) == 1024

    asyncio.run(story())
