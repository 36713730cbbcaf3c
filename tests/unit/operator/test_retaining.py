"""Pods of the last attempts that failed stay for their logs, and count for nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.operator.world import NAME, World, manifest

from fthsdp_operator.api import JobState, ReplicaState


async def failed(times: int, **spec: Any) -> World:
    """A job whose replica 2 has failed so often, and trains again."""
    world = World(manifest(**{"retainFailedPods": 1, **spec}))
    await world.train()
    for attempt in range(times):
        world.now += 1000.0
        world.exits(f"r2-a{attempt}-1", 1)
        await world.settle()
        world.the_deleted_vanish()
        world.now += 1000.0
        await world.train()
    return world


def of_replica_2(world: World) -> list[str]:
    return sorted(name for name in world.pods if name.startswith("r2-"))


@pytest.mark.parametrize(
    ("retain", "kept"), [(0, []), (1, ["r2-a2-1"]), (2, ["r2-a1-1", "r2-a2-1"]), (9, ["r2-a0-1", "r2-a1-1", "r2-a2-1"])]
)
def test_as_many_attempts_stay_as_are_asked_for_and_of_each_what_had_ended(retain: int, kept: list[str]) -> None:
    async def story() -> None:
        world = await failed(3, retainFailedPods=retain)
        assert of_replica_2(world) == [*kept, "r2-a3-0", "r2-a3-1"]

    asyncio.run(story())


def test_they_count_for_nothing() -> None:
    async def story() -> None:
        world = await failed(1)
        status = world.job.status
        assert (status.state, status.ready, status.replicas, status.restarts) == (JobState.RUNNING, "3/3", 3, 1)
        writes = len(world.writes)
        await world.look()
        assert len(world.writes) == writes

    asyncio.run(story())


def test_a_pod_that_was_deleted_is_not_kept() -> None:
    async def story() -> None:
        world = World(manifest(retainFailedPods=1))
        await world.train()
        world.user_deletes("r2-a0-0")
        await world.settle()
        assert of_replica_2(world) == ["r2-a1-0", "r2-a1-1"]

    asyncio.run(story())


def test_those_of_a_replica_that_is_scaled_away_go_with_it() -> None:
    async def story() -> None:
        world = await failed(1)
        world.user_changes(replicas=2)
        await world.settle()
        assert of_replica_2(world) == []
        assert world.job.status.replica_statuses[2].state is ReplicaState.REMOVED

    asyncio.run(story())


def test_those_of_a_suspended_job_go_and_do_not_keep_its_coordinator() -> None:
    async def story() -> None:
        world = await failed(1)
        world.user_changes(suspend=True)
        await world.settle()
        world.the_deleted_vanish()
        await world.settle()
        assert of_replica_2(world) == []
        assert "deletionTimestamp" in world.pod(f"{NAME}-coordinator")["metadata"]

    asyncio.run(story())


def test_they_stay_when_the_template_is_changed_because_of_what_they_say() -> None:
    async def story() -> None:
        world = await failed(1, minReplicas=1)
        world.user_changes(template={"spec": {"containers": [{"name": "train", "image": "y"}]}})
        await world.settle()
        assert "r2-a0-1" in world.pods
        assert "r2-a2-0" in world.pods

    asyncio.run(story())
