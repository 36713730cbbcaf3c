"""An operator that is killed before any of its calls goes on to the same end, and restarts nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.unit.operator.world import Killed, World, manifest

Story = Callable[[World], None]


def delete_a_pod(world: World) -> None:
    world.user_deletes("r2-a0-1")


def lose_a_pod(world: World) -> None:
    world.vanish("r2-a0-0")


def crash_two_replicas(world: World) -> None:
    world.exits("r0-a0-0", 1)
    world.exits("r1-a0-1", 137, reason="OOMKilled")


def lose_the_coordinator(world: World) -> None:
    world.vanish("llama-coordinator")


def suspend(world: World) -> None:
    world.user_changes(suspend=True)


def scale_up(world: World) -> None:
    world.user_changes(replicas=4)


def scale_down(world: World) -> None:
    world.user_changes(replicas=2)


def finish(world: World) -> None:
    for name in world.pods:
        world.exits(name, 0)
    world.exits("llama-coordinator", 0)


def crash_at_the_end(world: World) -> None:
    """Its replica is not started again, and the job is complete only when the other pod of it is stopped too."""
    for name in ("r0-a0-0", "r0-a0-1", "r1-a0-0", "r1-a0-1"):
        world.exits(name, 0)
    world.exits("r2-a0-0", 1)


def give_up(world: World) -> None:
    world.user_changes(failurePolicy={"perReplica": {"limit": 0}, "onExhausted": "FailJob"})
    world.exits("r2-a0-0", 1)


def abandon(world: World) -> None:
    world.user_changes(failurePolicy={"perReplica": {"limit": 0}})
    world.exits("r2-a0-0", 1)


def abandon_one_and_restart_another(world: World) -> None:
    rule = {"name": "gone", "onExitCodes": {"operator": "In", "values": [9]}, "action": "AbandonReplica"}
    world.user_changes(failurePolicy={"rules": [rule]})
    world.exits("r1-a0-0", 9)
    world.exits("r2-a0-0", 1)


def bring_everywhere_the_same_fault(world: World) -> None:
    for replica in range(3):
        world.exits(f"r{replica}-a0-0", 3)


def spend_the_last_of_the_job(world: World) -> None:
    world.user_changes(failurePolicy={"job": {"limit": 1}})
    world.exits("r0-a0-0", 3)
    world.exits("r2-a0-0", 1)


STORIES = [
    delete_a_pod,
    lose_a_pod,
    crash_two_replicas,
    lose_the_coordinator,
    suspend,
    scale_up,
    scale_down,
    finish,
    crash_at_the_end,
    give_up,
    abandon,
    abandon_one_and_restart_another,
    bring_everywhere_the_same_fault,
    spend_the_last_of_the_job,
]


def picture(world: World) -> object:
    """What counts about the outcome; UIDs are made anew by each test."""
    status = world.job.status
    entries = [(it.index, it.state, it.attempt, it.restarts) for it in status.replica_statuses]
    objects = sorted((kind, name, "deletionTimestamp" in it["metadata"]) for (kind, name), it in world.objects.items())
    told = world.coordinator.abandoned if world.coordinator else ()
    return status.state, status.ready, status.restarts, status.abandoned_replicas, entries, objects, told


async def play(story: Story, kill_at: int | None) -> World | None:
    """Return the world after the story, or None when it was over before the operator could be killed."""
    world = World(manifest())
    await world.train()
    story(world)
    world.writes.clear()
    world.kill_at = kill_at
    if kill_at is not None:
        try:
            await world.settle()
        except Killed:
            pass
        else:
            return None
    world.kill_at = None
    await world.settle()
    return world


@pytest.mark.parametrize("story", STORIES, ids=[story.__name__ for story in STORIES])
def test_killed_before_any_call_it_comes_to_the_same_end(story: Story) -> None:
    async def check() -> None:
        whole = await play(story, None)
        assert whole is not None
        killed = 0
        while (world := await play(story, killed)) is not None:
            assert picture(world) == picture(whole), f"killed before write {killed}"
            killed += 1
        assert killed > 0

    asyncio.run(check())


def test_killed_anywhere_at_the_start_everything_is_created_once() -> None:
    async def check() -> None:
        whole = World()
        await whole.settle()
        for kill_at in range(len(whole.writes)):
            world = World()
            world.kill_at = kill_at
            with pytest.raises(Killed):
                await world.settle()
            world.kill_at = None
            await world.settle()
            assert world.objects.keys() == whole.objects.keys()
            assert world.job.status.restarts == 0

    asyncio.run(check())
