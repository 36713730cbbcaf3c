"""A replica that is given up: the others train on, and only a person brings it back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.operator.world import NAME, World, manifest

from fthsdp.coordinator.messages import Cause, Verdict
from fthsdp_operator.api import JobState, ReplicaState

COORDINATOR = f"{NAME}-coordinator"
NO_BUDGET = {"perReplica": {"limit": 0}}


async def abandoned(index: int = 2, **spec: Any) -> World:
    """A job that trains on without one of its replicas."""
    world = World(manifest(failurePolicy=NO_BUDGET, **spec))
    await world.train()
    world.exits(f"r{index}-a0-0", 1)
    await world.settle()
    return world


def states(world: World) -> list[ReplicaState]:
    return [entry.state for entry in world.job.status.replica_statuses]


def condition(world: World, kind: str) -> tuple[str, str, str]:
    found = world.condition(kind)
    return found.status, found.reason, found.message


def test_the_others_train_on_and_everybody_can_see_who_does_not() -> None:
    async def story() -> None:
        world = await abandoned()
        status = world.job.status
        assert states(world) == [ReplicaState.ACTIVE, ReplicaState.ACTIVE, ReplicaState.ABANDONED]
        assert (status.state, status.ready, status.abandoned_replicas) == (JobState.DEGRADED, "2/3", 1)
        assert (status.replicas, status.ready_replicas, status.restarting_replicas, status.restarts) == (2, 2, 0, 0)
        assert status.last_failure == f"r2 {NAME}-r2-a0-0 Error exit 1"
        assert condition(world, "Degraded") == ("True", "ReplicasMissing", "replica 2 is Abandoned")
        assert condition(world, "Available")[0] == "True"
        (event,) = [event for event in world.events if event.reason == "ReplicaAbandoned"]
        assert event.message == (
            "replica 2 failed again after 0 restarts within 3600 s (failurePolicy.perReplica.limit is 0), last:"
            f" {NAME}-r2-a0-0 Error exit 1; the others train on"
        )

    asyncio.run(story())


def test_the_pod_that_failed_keeps_its_logs_and_the_others_of_the_replica_go() -> None:
    async def story() -> None:
        world = await abandoned()
        assert sorted(world.pods) == ["r0-a0-0", "r0-a0-1", "r1-a0-0", "r1-a0-1", "r2-a0-0"]
        world.writes.clear()
        for _ in range(3):
            world.now += 3600
            await world.look()
        assert world.writes == []
        world.vanish("r2-a0-0")  # somebody has cleaned up
        await world.settle()
        assert world.writes == []

    asyncio.run(story())


def test_the_coordinator_is_told_that_nobody_follows_and_told_again_when_it_has_started_anew() -> None:
    async def story() -> None:
        world = await abandoned()
        assert [(it.replica, it.attempt, it.final) for it in world.told] == [(2, 0, True)]
        assert world.coordinator is not None
        assert world.coordinator.abandoned == (2,)
        world.everybody_trains()  # as one says that was told nothing
        await world.settle()
        assert [(it.replica, it.attempt, it.final) for it in world.told] == [(2, 0, True)] * 2

    asyncio.run(story())


def test_a_replica_that_can_still_leave_at_a_boundary_is_not_cut_off() -> None:
    async def story() -> None:
        rule = {"name": "out", "onPodReasons": ["PodDeleted"], "action": "AbandonReplica"}
        world = World(manifest(failurePolicy={"rules": [rule]}))
        await world.train()
        world.user_deletes("r2-a0-1")
        await world.settle()
        assert states(world)[2] is ReplicaState.ABANDONED
        assert world.told == []
        assert "deletionTimestamp" in world.pod("r2-a0-0")["metadata"]
        for name in ("r2-a0-0", "r2-a0-1"):
            world.vanish(name)
        await world.settle()
        assert [(it.replica, it.final) for it in world.told] == [(2, True)]
        assert not any(name.startswith("r2") for name in world.pods)

    asyncio.run(story())


def test_one_that_hangs_is_abandoned_with_all_its_pods() -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy=NO_BUDGET))
        await world.train()
        assert world.coordinator is not None
        hung = Verdict(replica=1, attempt=0, cause=Cause.HUNG, reason="rank 3 never joined step 11")
        world.coordinator = world.coordinator.model_copy(update={"verdicts": (hung,)})
        await world.settle()
        assert states(world)[1] is ReplicaState.ABANDONED
        assert not any(name.startswith("r1") for name in world.pods)
        assert world.job.status.state is JobState.DEGRADED

    asyncio.run(story())


@pytest.mark.parametrize("both_at_once", [True, False])
def test_when_too_few_could_train_the_job_fails(both_at_once: bool) -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy=NO_BUDGET))  # two of three have to train
        await world.train()
        world.exits("r0-a0-0", 1)
        if not both_at_once:
            await world.settle()
            assert not world.job.status.terminal
        world.exits("r1-a0-0", 4)
        await world.settle()
        status, reason, message = condition(world, "Failed")
        assert (status, reason) == ("True", "RestartBudgetExhausted")
        assert message.startswith("replica 1 failed again after 0 restarts")
        assert message.endswith("Error exit 4; without it 1 replica could train, and minReplicas is 2")
        assert sorted(world.pods) == ["r0-a0-0", "r1-a0-0"]

    asyncio.run(story())


def test_a_spare_takes_the_place_and_the_job_runs_on_in_full() -> None:
    async def story() -> None:
        world = await abandoned(1, spares=1)
        world.everybody_trains(step=20)
        await world.settle()
        status = world.job.status
        assert states(world) == [
            ReplicaState.ACTIVE,
            ReplicaState.ABANDONED,
            ReplicaState.ACTIVE,
            ReplicaState.ACTIVE,
        ]
        assert (status.state, status.ready, status.spares, status.replicas) == (JobState.RUNNING, "3/3", "0/1", 3)
        assert status.abandoned_replicas == 1

    asyncio.run(story())


def test_a_spare_added_later_takes_the_place_too() -> None:
    async def story() -> None:
        world = await abandoned(0)
        world.user_changes(spares=1)
        await world.settle()
        world.vanish(COORDINATOR)  # it is replaced, to know the new number
        await world.train(step=20)
        assert (world.job.status.state, world.job.status.ready) == (JobState.RUNNING, "3/3")
        assert states(world)[0] is ReplicaState.ABANDONED

    asyncio.run(story())


def test_the_run_is_complete_without_it() -> None:
    async def story() -> None:
        world = await abandoned()
        for name in ("r0-a0-0", "r0-a0-1", "r1-a0-0", "r1-a0-1", COORDINATOR):
            world.exits(name, 0)
        await world.settle()
        status = world.job.status
        assert (status.state, status.ready, status.abandoned_replicas) == (JobState.COMPLETE, "2/3", 1)
        assert states(world) == [ReplicaState.FINISHED, ReplicaState.FINISHED, ReplicaState.ABANDONED]
        assert "r2-a0-0" in world.pods

    asyncio.run(story())


def test_scaling_others_does_not_bring_it_back() -> None:
    async def story() -> None:
        world = await abandoned(0)
        world.user_changes(replicas=4)
        await world.settle()
        assert states(world)[0] is ReplicaState.ABANDONED
        assert {"r3-a0-0", "r3-a0-1"} <= world.pods.keys()

    asyncio.run(story())


def test_scaled_away_and_back_it_starts_anew_with_its_whole_budget() -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy={"perReplica": {"limit": 1}}))
        for attempt in range(2):
            await world.train()
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
        assert states(world)[2] is ReplicaState.ABANDONED
        world.user_changes(replicas=2)
        await world.settle()
        assert (states(world)[2], world.job.status.abandoned_replicas) == (ReplicaState.REMOVED, 0)
        assert not any(name.startswith("r2") for name in world.pods)
        world.user_changes(replicas=3)
        await world.settle()
        assert {"r2-a2-0", "r2-a2-1"} <= world.pods.keys()
        world.exits("r2-a2-0", 1)
        await world.settle()
        assert "r2-a3-0" in world.pods

    asyncio.run(story())


def test_a_job_that_is_suspended_and_resumed_has_all_its_replicas_and_whole_budgets_again() -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy={"job": {"limit": 2}, "perReplica": {"limit": 1}}))
        for attempt in range(2):
            await world.train()
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
        world.user_changes(suspend=True)
        await world.settle()
        assert states(world) == [ReplicaState.SUSPENDED] * 3
        world.user_changes(suspend=False)
        world.vanish(COORDINATOR)
        world.coordinator = None
        await world.train()
        assert (world.job.status.ready, world.job.status.abandoned_replicas) == ("3/3", 0)
        for name in ("r2-a2-0", "r0-a1-0"):
            world.exits(name, 1)
            await world.settle()
        assert not world.job.status.terminal
        assert states(world)[2] is not ReplicaState.ABANDONED

    asyncio.run(story())


@pytest.mark.parametrize("change", [{"minReplicas": 3}, {"replicas": 2}])
def test_without_which_a_changed_job_could_never_train_comes_back(change: dict[str, int]) -> None:
    async def story() -> None:
        world = await abandoned(0)
        world.user_changes(**change)
        await world.settle()
        assert "r0-a1-0" in world.pods
        assert world.job.status.abandoned_replicas == 0
        world.vanish(COORDINATOR)
        world.coordinator = None
        await world.train()
        assert world.job.status.state is JobState.RUNNING

    asyncio.run(story())
