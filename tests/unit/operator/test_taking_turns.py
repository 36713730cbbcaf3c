"""Whatever takes a replica away by choice, a changed template or an ill node, takes one after the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operator.world import World, manifest, template

from fthsdp_operator.api import REPLICA_LABEL, ReplicaState
from fthsdp_operator.observed.observe import NodeView
from fthsdp_operator.rules.nodes import MOVE_PATIENCE

WELL = NodeView(name="", ready="True", conditions=frozenset({("Ready", "True")}))


async def trained(**spec: Any) -> World:
    """A job that trains, each replica on a node of its own."""
    world = World(manifest(minReplicas=1, **spec))
    await world.train()
    for (kind, _), it in world.objects.items():
        replica = it["metadata"].get("labels", {}).get(REPLICA_LABEL)
        if kind == "Pod" and replica is not None:
            it["spec"]["nodeName"] = f"node-r{replica}"
            world.node_views[f"node-r{replica}"] = replace(WELL, name=f"node-r{replica}")
    return world


def falls_ill(world: World, replica: int) -> None:
    name = f"node-r{replica}"
    world.node_views[name] = replace(world.node_views[name], conditions=frozenset({("GPUMissing", "True")}))


def is_well(world: World, replica: int) -> None:
    name = f"node-r{replica}"
    world.node_views[name] = replace(WELL, name=name)


def changes_template(world: World) -> None:
    world.user_changes(template=template())


async def come_back(world: World) -> None:
    world.the_deleted_vanish()
    assert world.coordinator is not None
    await world.train(step=world.coordinator.step + 3)


def attempts(world: World) -> list[int]:
    return [it.attempt for it in world.job.status.replica_statuses]


@pytest.mark.parametrize("failed_before", [False, True])
def test_nobody_leaves_an_ill_node_while_another_gets_a_changed_template(failed_before: bool) -> None:
    async def story() -> None:
        world = await trained()
        if failed_before:
            world.exits("r2-a0-0", 1)
            await world.settle()
            world.now += 2 * MOVE_PATIENCE
            await come_back(world)
        changes_template(world)
        await world.settle()
        first = int(failed_before)
        assert attempts(world) == [0, 0, first + 1]
        falls_ill(world, 0)
        await world.settle()
        assert attempts(world) == [0, 0, first + 1]
        await come_back(world)
        assert sorted(attempts(world)) == sorted([0, 1, first + 1])  # one of the two has its turn

    asyncio.run(story())


def test_nobody_gets_a_changed_template_while_another_leaves_an_ill_node() -> None:
    async def story() -> None:
        world = await trained()
        falls_ill(world, 0)
        changes_template(world)
        await world.settle()
        assert sum(attempts(world)) == 1

    asyncio.run(story())


def test_a_roll_whose_replica_does_not_come_back_keeps_others_on_ill_nodes_for_a_time_only() -> None:
    async def story() -> None:
        world = await trained()
        changes_template(world)
        await world.settle()
        falls_ill(world, 0)
        world.now += MOVE_PATIENCE - 1
        await world.settle()
        assert attempts(world) == [0, 0, 1]
        world.now += 1
        await world.settle()
        assert attempts(world) == [1, 0, 1]

    asyncio.run(story())


@pytest.mark.parametrize("trains_a_little", [False, True])
def test_a_replica_that_fails_again_and_again_keeps_others_on_ill_nodes_for_a_time_only(trains_a_little: bool) -> None:
    async def story() -> None:
        world = await trained(failurePolicy={"perReplica": {"limit": 100}, "backoff": {"maxSeconds": 60}})
        began = world.now
        world.exits("r2-a0-0", 1)
        await world.settle()
        while attempts(world)[0] == 0:
            falls_ill(world, 0)
            world.now += 61
            await world.settle()
            is_well(world, 0)  # while all train it could go at once
            world.kubelets_start_everything()
            if trains_a_little:
                world.everybody_trains()
                await world.settle()
                assert world.job.status.replica_statuses[2].state is ReplicaState.ACTIVE
            world.exits(f"r2-a{world.job.status.replica_statuses[2].attempt}-0", 1)
            await world.settle()
            assert world.now - began < 2 * MOVE_PATIENCE
        assert world.now - began >= MOVE_PATIENCE

    asyncio.run(story())


def test_since_when_a_replica_is_away_stands_in_the_status_until_it_goes_again() -> None:
    async def story() -> None:
        world = await trained()
        assert [it.away_since for it in world.job.status.replica_statuses] == [None] * 3
        world.exits("r2-a0-0", 1)
        await world.settle()
        first = world.now
        world.now += 5
        world.kubelets_start_everything()
        world.exits("r2-a1-0", 1)
        await world.settle()
        assert world.job.status.replica_statuses[2].away_since == first
        world.now += 5
        await come_back(world)
        world.now += 601  # it was stable
        world.exits("r2-a2-0", 1)
        await world.settle()
        assert world.job.status.replica_statuses[2].away_since == world.now

    asyncio.run(story())
