"""Spares are groups of pods like the others; who trains is the coordinator's choice, and capacity is counted once."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.operator.world import NAME, World, manifest

from fthsdp.coordinator.messages import ReplicaStatus, Role
from fthsdp_operator.api import JobState, ReplicaState

COORDINATOR = f"{NAME}-coordinator"


def states(world: World) -> list[ReplicaState]:
    return [entry.state for entry in world.job.status.replica_statuses]


def counts(world: World) -> tuple[str | None, str | None, int, int]:
    status = world.job.status
    return status.ready, status.spares, status.replicas, status.ready_replicas


async def trained(**spec: object) -> World:
    world = World(manifest(spares=1, **spec))
    await world.train()
    return world


async def fails(world: World, name: str) -> None:
    """A replica fails; the spare trains from the same decision on, and the failed one comes back as a shadow."""
    world.exits(name, 1)
    await world.settle()
    world.kubelets_start_everything()
    assert world.coordinator is not None
    left = world.coordinator.replicas
    active = tuple(it.model_copy(update={"role": Role.ACTIVE}) for it in left)
    replica = int(name[1 : name.index("-")])
    back = ReplicaStatus(replica=replica, attempt=1, role=Role.SHADOW, step=None)
    world.coordinator = world.coordinator.model_copy(update={"replicas": (*active, back)})
    await world.settle()


def test_spares_get_pods_and_the_job_runs_when_all_wanted_replicas_train() -> None:
    async def story() -> None:
        world = await trained()
        assert len(world.pods) == 8
        assert states(world) == [ReplicaState.ACTIVE] * 3 + [ReplicaState.SPARE]
        assert counts(world) == ("3/3", "1/1", 3, 3)
        assert world.job.status.state is JobState.RUNNING
        assert "replica 3 is a ready spare (attempt 0)" in [event.message for event in world.events]

    asyncio.run(story())


def test_a_job_without_spares_says_nothing_of_them() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        assert world.job.status.spares is None

    asyncio.run(story())


def test_a_spare_takes_over_and_the_failed_replica_becomes_the_spare() -> None:
    async def story() -> None:
        world = await trained()
        await fails(world, "r1-a0-0")
        active, back = ReplicaState.ACTIVE, ReplicaState.CATCHING_UP
        assert states(world) == [active, back, active, active]
        assert (world.job.status.state, *counts(world)) == (JobState.RUNNING, "3/3", "0/1", 3, 3)
        world.everybody_trains(step=20)
        await world.settle()
        assert states(world) == [active, ReplicaState.SPARE, active, active]
        assert counts(world) == ("3/3", "1/1", 3, 3)

    asyncio.run(story())


def test_no_capacity_is_lost_in_the_eyes_of_people_while_the_coordinator_decides() -> None:
    async def story() -> None:
        world = await trained(minReplicas=3)
        world.deaf = True
        world.exits("r1-a0-0", 1)
        await world.look()
        assert (world.job.status.state, *counts(world)[:2]) == (JobState.RUNNING, "3/3", "0/1")
        assert "Paused" not in [event.reason for event in world.events]

    asyncio.run(story())


def test_a_spare_stays_one_between_the_loss_of_a_replica_and_the_decision_that_takes_the_spare_in() -> None:
    async def story() -> None:
        world = await trained(minReplicas=3)
        assert world.coordinator is not None
        left = tuple(it for it in world.coordinator.replicas if it.replica != 1)
        world.coordinator = world.coordinator.model_copy(update={"replicas": left})
        await world.look()
        assert states(world)[3] is ReplicaState.SPARE
        assert (world.job.status.state, world.job.status.ready) == (JobState.RUNNING, "3/3")
        assert "Paused" not in [event.reason for event in world.events]

    asyncio.run(story())


def test_a_ready_shadow_is_no_spare_while_too_few_train() -> None:
    async def story() -> None:
        world = await trained()
        await fails(world, "r1-a0-0")
        assert world.coordinator is not None
        members = world.coordinator.replicas
        late = tuple(
            it.model_copy(update={"role": Role.SHADOW if it.replica in (1, 3) else Role.ACTIVE, "step": 20})
            for it in members
        )
        world.coordinator = world.coordinator.model_copy(update={"replicas": late})
        await world.settle()
        assert states(world) == [
            ReplicaState.ACTIVE,
            ReplicaState.CATCHING_UP,
            ReplicaState.ACTIVE,
            ReplicaState.CATCHING_UP,
        ]
        assert (world.job.status.state, world.job.status.ready) == (JobState.DEGRADED, "2/3")

    asyncio.run(story())


def test_a_failed_spare_costs_the_job_nothing() -> None:
    async def story() -> None:
        world = await trained()
        before = {name: uid for name, uid in world.pods.items() if not name.startswith("r3-")}
        world.exits("r3-a0-1", 1)
        await world.settle()
        assert (world.job.status.state, world.job.status.ready, world.job.status.spares) == (
            JobState.RUNNING,
            "3/3",
            "0/1",
        )
        assert before.items() <= world.pods.items()
        assert {"r3-a1-0", "r3-a1-1"} <= world.pods.keys()

    asyncio.run(story())


def test_a_spare_has_the_same_budget_as_a_replica() -> None:
    async def story() -> None:
        world = await trained(failurePolicy={"perReplica": {"limit": 0}, "onExhausted": "FailJob"})
        world.exits("r3-a0-0", 1)
        await world.settle()
        assert world.job.status.state is JobState.FAILED
        assert world.job.status.last_failure == f"r3 {NAME}-r3-a0-0 Error exit 1"

    asyncio.run(story())


def test_a_job_is_complete_when_the_spares_have_ended_too() -> None:
    async def story() -> None:
        world = await trained()
        for name in world.pods:
            if not name.startswith("r3-"):
                world.exits(name, 0)
        await world.settle()
        assert world.job.status.state is JobState.RUNNING
        world.exits("r3-a0-0", 0)
        world.exits("r3-a0-1", 0)
        await world.settle()
        assert (world.job.status.state, *counts(world)) == (JobState.COMPLETE, "3/3", "1/1", 3, 3)

    asyncio.run(story())


@pytest.mark.parametrize(("spares", "pods"), [(2, 10), (0, 6)])
def test_spares_can_be_added_and_taken_away_while_the_job_runs(spares: int, pods: int) -> None:
    async def story() -> None:
        world = await trained()
        before = world.pods
        world.user_changes(spares=spares)
        await world.settle()
        for name in [name for name in before if name not in world.pods]:
            world.vanish(name)
        await world.settle()
        assert len(world.pods) == pods
        assert {name: uid for name, uid in before.items() if name[1] < "3"}.items() <= world.pods.items()
        assert "deletionTimestamp" in world.pod(COORDINATOR)["metadata"]  # it has to know the new number

    asyncio.run(story())


def test_a_replica_that_becomes_a_spare_by_the_number_keeps_its_pods() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        before = world.pods
        world.user_changes(replicas=2, spares=1)
        await world.settle()
        assert world.pods == before
        assert (world.job.status.state, *counts(world)) == (JobState.RUNNING, "2/2", "1/1", 2, 2)
        world.vanish(COORDINATOR)
        world.everybody_trains()
        await world.settle()
        assert counts(world) == ("2/2", "1/1", 2, 2)

    asyncio.run(story())


def test_a_replica_that_has_just_begun_to_train_is_not_scaled_away_while_nobody_else_does() -> None:
    async def story() -> None:
        world = World(manifest(replicas=2, minReplicas=1))
        await world.settle()
        world.kubelets_start_everything()
        await world.settle()
        world.everybody_trains()
        assert world.coordinator is not None
        everybody = world.coordinator
        alone = tuple(it for it in everybody.replicas if it.replica == 1)
        world.coordinator = everybody.model_copy(update={"replicas": alone})
        world.user_changes(replicas=1)  # and no look has seen yet that replica 1 trains
        await world.settle()
        assert {"r1-a0-0", "r1-a0-1"} <= world.pods.keys()
        entry = world.job.status.replica(1)
        assert entry is not None
        assert entry.state is ReplicaState.ACTIVE
        world.coordinator = everybody
        await world.settle()
        assert not {"r1-a0-0", "r1-a0-1"} & world.pods.keys()

    asyncio.run(story())
