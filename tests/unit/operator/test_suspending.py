"""A job is suspended and resumed: its replicas leave at a boundary, and come back to what they wrote there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.operator.world import NAME, World, manifest, template

from fthsdp_operator.api import JobState, ReplicaState

COORDINATOR = f"{NAME}-coordinator"
CHECKPOINT = {"checkpoint": {"path": "/ckpt", "everySteps": 10}}


async def suspended(**spec: Any) -> World:
    world = World(manifest(**spec))
    await world.train()
    world.user_changes(suspend=True)
    await world.settle()
    return world


def warnings(world: World) -> list[str]:
    return [event.reason for event in world.events if event.warning]


def test_the_coordinator_stays_until_the_replicas_have_left() -> None:
    async def story() -> None:
        world = await suspended()
        assert (world.pods, world.told) == ({}, [])
        assert "deletionTimestamp" not in world.pod(COORDINATOR)["metadata"]
        world.vanish("r0-a0-0")
        await world.settle()
        assert "deletionTimestamp" not in world.pod(COORDINATOR)["metadata"]
        world.the_deleted_vanish()
        await world.settle()
        assert "deletionTimestamp" in world.pod(COORDINATOR)["metadata"]

    asyncio.run(story())


def test_the_coordinator_does_not_stay_for_a_pod_on_a_node_that_is_lost() -> None:
    async def story() -> None:
        world = await suspended()
        assert await world.look() == pytest.approx(2.0)
        world.now += 31.9  # the grace period and almost two seconds
        await world.look()
        assert "deletionTimestamp" not in world.pod(COORDINATOR)["metadata"]
        world.now += 0.1
        await world.look()
        assert "deletionTimestamp" in world.pod(COORDINATOR)["metadata"]

    asyncio.run(story())


def test_without_a_checkpoint_people_are_warned_that_the_state_is_gone() -> None:
    async def story() -> None:
        world = await suspended()
        assert warnings(world) == ["StateLost"]
        condition = world.condition("Suspended")
        assert (condition.status, "its state of step 10 is gone" in condition.message) == ("True", True)

    asyncio.run(story())


def test_with_a_checkpoint_nobody_is_warned() -> None:
    async def story() -> None:
        world = await suspended(**CHECKPOINT)
        assert warnings(world) == []
        assert "goes on from its newest checkpoint" in world.condition("Suspended").message

    asyncio.run(story())


def test_a_job_that_was_never_begun_loses_nothing() -> None:
    async def story() -> None:
        world = World(manifest(suspend=True))
        await world.settle()
        assert (world.pods, warnings(world), world.job.status.state) == ({}, [], JobState.SUSPENDED)

    asyncio.run(story())


def test_who_is_resumed_waits_for_those_who_write_the_checkpoint() -> None:
    async def story() -> None:
        world = await suspended(**CHECKPOINT)
        world.user_changes(suspend=False)
        await world.settle()
        assert world.pods == {}
        assert {entry.state for entry in world.job.status.replica_statuses} == {ReplicaState.SUSPENDED}
        world.the_deleted_vanish()
        await world.settle()
        assert sorted(world.pods) == [f"r{replica}-a1-{index}" for replica in range(3) for index in range(2)]

    asyncio.run(story())


def test_one_that_is_scaled_away_meanwhile_may_be_the_one_that_writes_it() -> None:
    async def story() -> None:
        world = await suspended(**CHECKPOINT)
        world.user_changes(suspend=False, replicas=2)
        await world.settle()
        for name in [f"r{replica}-a0-{index}" for replica in range(2) for index in range(2)]:
            world.vanish(name)
        await world.settle()
        assert world.pods == {}
        world.the_deleted_vanish()
        await world.settle()
        assert sorted(world.pods) == ["r0-a1-0", "r0-a1-1", "r1-a1-0", "r1-a1-1"]

    asyncio.run(story())


def test_replicas_that_are_added_as_the_job_is_resumed_hold_nobody_up() -> None:
    async def story() -> None:
        world = await suspended(**CHECKPOINT)
        world.user_changes(suspend=False, replicas=4)
        await world.settle()
        assert sorted(world.pods) == ["r3-a0-0", "r3-a0-1"]
        world.the_deleted_vanish()
        await world.settle()
        assert len(world.pods) == 8

    asyncio.run(story())


def test_without_a_checkpoint_there_is_nothing_to_wait_for() -> None:
    async def story() -> None:
        world = await suspended()
        world.user_changes(suspend=False)
        await world.settle()
        assert len(world.pods) == 6

    asyncio.run(story())


def test_a_template_that_is_changed_while_nothing_runs_is_rolled_out_when_all_are_back() -> None:
    async def story() -> None:
        world = await suspended(**CHECKPOINT)
        old = world.job.status.current_revision
        world.the_deleted_vanish()
        world.user_changes(template=template())
        await world.settle()
        assert world.job.status.current_revision == old != world.job.status.update_revision
        world.user_changes(suspend=False)
        await world.settle()
        assert world.condition("Progressing").reason == "Rolling"
        await world.train()
        await world.train(step=13)
        assert world.job.status.current_revision == world.job.status.update_revision

    asyncio.run(story())


def test_what_was_changed_meanwhile_is_what_is_started() -> None:
    async def story() -> None:
        world = await suspended(**CHECKPOINT)
        world.the_deleted_vanish()
        world.user_changes(suspend=False, template=template(), replicas=2)
        await world.settle()
        assert sorted(world.pods) == ["r0-a1-0", "r0-a1-1", "r1-a1-0", "r1-a1-1"]
        assert world.pod("r0-a1-0")["spec"]["containers"][0]["image"] == "y"
        assert world.condition("Progressing").reason == "Rolling"
        await world.train()
        await world.train(step=13)
        assert world.condition("Progressing").reason == "UpToDate"

    asyncio.run(story())


def test_who_had_failed_starts_again_with_all_others_and_nothing_is_held_against_anybody() -> None:
    async def story() -> None:
        world = World(manifest(**CHECKPOINT))
        await world.train()
        world.everybody_trains(step=30, finished=True)
        world.exits("r2-a0-0", 1)
        await world.settle()
        assert world.job.status.replica_statuses[2].state is ReplicaState.FAILED
        world.user_changes(suspend=True)
        await world.settle()
        assert {entry.state for entry in world.job.status.replica_statuses} == {ReplicaState.SUSPENDED}
        world.the_deleted_vanish()
        world.coordinator = None
        world.user_changes(suspend=False)
        await world.train()
        assert [entry.state for entry in world.job.status.replica_statuses] == [ReplicaState.ACTIVE] * 3
        assert [entry.last_failure for entry in world.job.status.replica_statuses] == [None] * 3

    asyncio.run(story())


def test_a_failure_before_is_no_part_of_the_same_failure_after() -> None:
    async def story() -> None:
        world = World(manifest(replicas=2, minReplicas=1))
        await world.settle()
        world.kubelets_start_everything()
        world.exits("r0-a0-0", 1)
        await world.settle()
        world.user_changes(suspend=True)
        await world.settle()
        world.the_deleted_vanish()
        world.user_changes(suspend=False)
        await world.settle()
        world.kubelets_start_everything()
        world.exits(f"r1-a{world.job.status.replica_statuses[1].attempt}-0", 1)
        await world.settle()
        assert not world.job.status.terminal  # two replicas that had failed alike would be a fault of the code

    asyncio.run(story())


def test_who_has_finished_stays_so_and_who_had_not_counts_under_all() -> None:
    async def story() -> None:
        world = World(manifest(success={"policy": "All"}))
        await world.train()
        world.everybody_trains(step=30, finished=True)
        for index in range(2):
            world.exits(f"r0-a0-{index}", 0)
        await world.settle()
        world.user_changes(suspend=True)
        await world.settle()
        world.the_deleted_vanish()
        world.coordinator = None
        world.user_changes(suspend=False)
        await world.settle()
        assert world.job.status.state is JobState.FAILED
        assert "r1 was away, and not back by then" in world.condition("Failed").message
        assert "r0" not in world.condition("Failed").message

    asyncio.run(story())
