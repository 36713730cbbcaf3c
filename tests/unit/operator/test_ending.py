"""When a run was a success, that an end is one, and whose jobs are left alone."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from tests.unit.operator.world import NAME, World, manifest

from fthsdp.errors import ConfigError
from fthsdp_operator.api import KIND, JobState, ReplicaState, parse_job
from fthsdp_operator.rules.replicas import STRAGGLER_GRACE

ALL = {"success": {"policy": "All"}}


def finishes(world: World, *replicas: int) -> None:
    for name in list(world.pods):
        if int(name[1]) in replicas:
            world.exits(name, 0)


async def ended(*, finish: tuple[int, ...], fail: tuple[int, ...], **spec: Any) -> World:
    world = World(manifest(**spec))
    await world.train()
    world.everybody_trains(step=30, finished=True)
    finishes(world, *finish)
    await world.settle()
    for replica in fail:
        world.exits(f"r{replica}-a0-0", 1)
    await world.settle()
    world.the_deleted_vanish()
    await world.settle()
    return world


@pytest.mark.parametrize(("spec", "state"), [({}, JobState.COMPLETE), (ALL, JobState.FAILED)])
def test_one_that_fails_after_the_others_have_finished_counts_under_all(spec: dict[str, Any], state: JobState) -> None:
    async def story() -> None:
        world = await ended(finish=(0, 1), fail=(2,), **spec)
        assert world.job.status.state is state
        assert world.job.status.replica_statuses[2].state is ReplicaState.FAILED
        assert world.job.status.restarts == 0
        if state is JobState.FAILED:
            assert world.condition("Failed").reason == "ReplicasUnfinished"
            assert f"(success.policy is All): r2 {NAME}-r2-a0-0 Error exit 1" in world.condition("Failed").message

    asyncio.run(story())


@pytest.mark.parametrize("spec", [{}, ALL])
def test_a_run_that_all_have_finished_is_a_success(spec: dict[str, Any]) -> None:
    async def story() -> None:
        world = await ended(finish=(0, 1, 2), fail=(), **spec)
        assert (world.job.status.state, world.condition("Complete").reason) == (JobState.COMPLETE, "RunFinished")

    asyncio.run(story())


def test_an_abandoned_replica_does_not_count_under_all() -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy={"perReplica": {"limit": 0}}, **ALL))
        await world.train()
        world.exits("r2-a0-0", 1)
        await world.settle()
        assert world.job.status.abandoned_replicas == 1
        world.everybody_trains(step=30, finished=True)
        finishes(world, 0, 1)
        await world.settle()
        assert world.job.status.state is JobState.COMPLETE

    asyncio.run(story())


def test_a_replica_that_was_added_too_late_to_begin_does_not_count_under_all() -> None:
    async def story() -> None:
        world = World(manifest(**ALL))
        await world.train()
        world.user_changes(replicas=4)
        await world.settle()
        world.vanish(f"{NAME}-coordinator")
        await world.settle()
        world.everybody_trains(step=30, finished=True)
        finishes(world, 0, 1, 2)
        await world.settle()
        assert world.job.status.state is JobState.COMPLETE

    asyncio.run(story())


async def ended_with_a_straggler(world: World) -> None:
    """Replicas 0 and 1 have finished, and 2 runs on until it is stopped."""
    world.everybody_trains(step=30, finished=True)
    finishes(world, 0, 1)
    world.exits(f"{NAME}-coordinator", 0)
    world.coordinator = None
    await world.settle()
    world.now += STRAGGLER_GRACE
    await world.settle()


@pytest.mark.parametrize("failed_before", [False, True])
def test_one_that_was_stopped_as_it_still_ran_counts_under_all_and_no_old_failure_is_blamed(
    failed_before: bool,
) -> None:
    async def story() -> None:
        world = World(manifest(**ALL))
        await world.train()
        if failed_before:
            world.exits("r2-a0-0", 1)
            await world.settle()
            world.now += 3600
            await world.train(step=20)
        await ended_with_a_straggler(world)
        assert world.job.status.state is JobState.FAILED
        assert world.condition("Failed").message.endswith("(success.policy is All): r2 still ran long after the others")

    asyncio.run(story())


def test_a_failure_after_the_end_is_blamed_though_the_replica_had_trained() -> None:
    async def story() -> None:
        world = World(manifest(**ALL))
        await world.train()
        world.exits("r2-a0-0", 1)
        await world.settle()
        world.now += 3600
        await world.train(step=20)
        world.everybody_trains(step=30, finished=True)
        finishes(world, 0, 1)
        world.now += 10
        world.exits("r2-a1-0", 3)
        await world.settle()
        assert world.condition("Failed").message.endswith(f"r2 {NAME}-r2-a1-0 Error exit 3")

    asyncio.run(story())


def test_one_that_was_away_for_a_changed_template_counts_under_all() -> None:
    async def story() -> None:
        world = World(manifest(**ALL))
        await world.train()
        world.user_changes(template={"spec": {"containers": [{"name": "t", "image": "y"}]}})
        await world.settle()
        for index in range(2):
            world.vanish(f"r2-a0-{index}")
        world.everybody_trains(step=30, finished=True)
        finishes(world, 0, 1)
        await world.settle()
        world.now += 1000
        world.exits(f"{NAME}-coordinator", 0)
        await world.settle()
        world.now += STRAGGLER_GRACE
        await world.settle()
        assert world.job.status.state is JobState.FAILED
        assert world.condition("Failed").message.endswith("r2 was away, and not back by then")

    asyncio.run(story())


def test_nobody_is_restarted_into_a_run_that_the_first_has_finished() -> None:
    async def story() -> None:
        world = World(manifest(**ALL))
        await world.train()
        world.everybody_trains(step=30, finished=True)
        finishes(world, 0)
        world.exits("r2-a0-0", 1)
        await world.settle()
        assert not [name for name in world.pods if name.startswith("r2-a1")]
        assert world.job.status.state is JobState.RUNNING  # replica 1 is still at it

    asyncio.run(story())


CHANGES = (
    {"template": {"spec": {"containers": [{"name": "t", "image": "y"}]}}},
    {"replicas": 5},
    {"suspend": True},
    {"minReplicas": 1, "spares": 1},
    {"failurePolicy": {"perReplica": {"limit": 50}}},
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize("fail", [(), (2,)])
def test_no_change_of_the_spec_opens_a_job_again_that_has_ended(change: dict[str, Any], fail: tuple[int, ...]) -> None:
    async def story() -> None:
        world = await ended(finish=tuple({0, 1, 2} - {*fail}), fail=fail, **ALL)
        before, pods = world.job.status, world.pods
        assert before.terminal
        world.user_changes(**change)
        await world.settle()
        assert (world.job.status.state, world.job.status.completion_time) == (before.state, before.completion_time)
        assert world.job.status.replica_statuses == before.replica_statuses
        assert world.pods == pods

    asyncio.run(story())


def test_a_job_that_somebody_else_looks_after_is_not_touched() -> None:
    async def story() -> None:
        world = World(manifest(managedBy="kueue.x-k8s.io/multikueue", minReplicas=9))  # nor is it judged
        world.objects[KIND, NAME]["status"] = {"whatever": "they write"}
        before = copy.deepcopy(world.objects)
        await world.look()
        assert (world.objects, world.writes, world.events) == (before, [], [])

    asyncio.run(story())


def test_a_job_that_names_this_operator_is_looked_after() -> None:
    async def story() -> None:
        world = World(manifest(managedBy="fthsdp.dev/fthsdp-operator"))
        await world.train()
        assert world.job.status.state is JobState.RUNNING

    asyncio.run(story())


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"managedBy": ""}, "spec.managedBy is '': it has to be at least 1 character long"),
        ({"success": {"policy": "Some"}}, "spec.success.policy is 'Some': it has to be 'First' or 'All'"),
        ({"retainFailedPods": -1}, "spec.retainFailedPods is -1: it has to be at least 0"),
        ({"updatePolicy": {"minReadySteps": -1}}, "spec.updatePolicy.minReadySteps is -1: it has to be at least 0"),
        ({"updatePolicy": {"maxUnavailable": 0}}, "spec.updatePolicy.maxUnavailable is 0: it has to be at least 1"),
        ({"updatePolicy": {"type": "Recreate"}}, "set checkpoint, or type Rolling or OnRestart"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_job(manifest(**spec))
    assert sentence in str(refused.value)
