"""A run ends even when some pods do not: those that froze, or came back when all the others had finished."""

import asyncio

import pytest
from tests.unit.operator.world import NAME, World

from fthsdp_operator.api import JobState, ReplicaState, format_time
from fthsdp_operator.rules.replicas import STRAGGLER_GRACE


async def finish_without_replica_2(world: World) -> None:
    await world.train()
    world.everybody_trains(finished=True)
    for name in world.pods:
        if not name.startswith("r2"):
            world.exits(name, 0)
    world.exits(f"{NAME}-coordinator", 0)
    world.coordinator = None
    await world.settle()


def test_pods_that_still_run_after_the_coordinator_left_may_finish() -> None:
    async def story() -> None:
        world = World()
        await finish_without_replica_2(world)
        world.now += STRAGGLER_GRACE - 1
        await world.settle()
        assert world.job.status.state is not JobState.COMPLETE
        assert {"r2-a0-0", "r2-a0-1"} <= set(world.pods)

    asyncio.run(story())


def test_pods_that_run_on_long_after_the_coordinator_left_are_stopped_and_the_job_is_complete() -> None:
    async def story() -> None:
        world = World()
        await finish_without_replica_2(world)
        world.now += STRAGGLER_GRACE
        await world.settle()
        assert not any(name.startswith("r2") for name in world.pods)
        assert world.job.status.state is JobState.COMPLETE
        assert [entry.state for entry in world.job.status.replica_statuses] == [
            ReplicaState.FINISHED,
            ReplicaState.FINISHED,
            ReplicaState.FAILED,
        ]

    asyncio.run(story())


@pytest.mark.parametrize("ahead", [-30, 7200])
def test_the_clock_of_the_coordinators_node_does_not_matter(ahead: float) -> None:
    async def story() -> None:
        world = World()
        await finish_without_replica_2(world)
        (container,) = world.pod("coordinator")["status"]["containerStatuses"]
        container["state"]["terminated"]["finishedAt"] = format_time(world.now + ahead)
        world.now += STRAGGLER_GRACE - 1
        await world.settle()
        assert {"r2-a0-0", "r2-a0-1"} <= set(world.pods)
        world.now += 1
        await world.settle()
        assert world.job.status.state is JobState.COMPLETE

    asyncio.run(story())


def test_a_job_whose_scripts_all_have_nothing_to_do_is_complete() -> None:
    async def story() -> None:
        world = World()
        await world.settle()
        world.kubelets_start_everything()
        for name in world.pods:
            if not name.endswith("coordinator"):
                world.exits(name, 0)
        await world.settle()
        assert world.job.status.state is JobState.COMPLETE

    asyncio.run(story())
