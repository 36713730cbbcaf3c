"""A changed template reaches the replicas one after the other, while the rest train."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.operator.world import NAME, Killed, World, manifest, template

from fthsdp.coordinator.messages import ReplicaStatus, Role, Status
from fthsdp_operator.api import REPLICA_LABEL, REVISION_LABEL, JobState, ReplicaState

ACTIVE, STARTING = ReplicaState.ACTIVE, ReplicaState.STARTING
CHECKPOINT = {"checkpoint": {"path": "/ckpt", "everySteps": 10}}


async def trained(**spec: Any) -> World:
    world = World(manifest(**spec))
    await world.train()
    return world


async def changed(*, image: str = "y", **spec: Any) -> World:
    """A job that trains, whose template was just changed."""
    world = await trained(**spec)
    world.user_changes(template=template(image))
    await world.settle()
    return world


def step(world: World) -> int:
    return 10 if world.coordinator is None else world.coordinator.step


async def come_back(world: World) -> None:
    """New pods take the place of those that were asked to stop, and train, so far without a step."""
    world.the_deleted_vanish()
    await world.train(step=step(world) + 10)


async def do_steps(world: World, number: int) -> None:
    world.everybody_trains(step=step(world) + number)
    await world.settle()


async def goes_on(world: World) -> None:
    await come_back(world)
    await do_steps(world, 3)


def attempts(world: World) -> list[int]:
    return [entry.attempt for entry in world.job.status.replica_statuses]


def new_ones(world: World) -> list[int]:
    wanted = world.job.spec.revision
    return [entry.index for entry in world.job.status.replica_statuses if entry.revision == wanted]


def reasons(world: World) -> list[str]:
    return [event.reason for event in world.events]


def progress(world: World) -> tuple[str, str]:
    condition = world.condition("Progressing")
    return condition.status, condition.reason


def test_one_after_the_other_from_the_highest() -> None:
    async def story() -> None:
        world = await changed()
        seen = [new_ones(world)]
        for _ in range(3):
            await goes_on(world)
            seen.append(new_ones(world))
        assert seen == [[2], [1, 2], [0, 1, 2], [0, 1, 2]]
        status = world.job.status
        assert (attempts(world), status.restarts, status.state) == ([1, 1, 1], 0, JobState.RUNNING)
        assert status.current_revision == status.update_revision == world.job.spec.revision
        assert (status.updated_replicas, progress(world)) == (3, ("False", "UpToDate"))
        assert reasons(world).count("RolledOut") == 1

    asyncio.run(story())


def test_the_others_are_not_touched_and_the_coordinator_is_told_nothing() -> None:
    async def story() -> None:
        world = await trained()
        before = world.pods
        world.user_changes(template=template("y"))
        await world.settle()
        left = {name: uid for name, uid in before.items() if name[1] != "2"}
        assert {name: uid for name, uid in world.pods.items() if name[1] != "2"} == left
        assert world.told == []
        assert world.pod("r2-a1-0")["spec"]["containers"][0]["image"] == "y"
        assert world.pod("r2-a1-0")["metadata"]["labels"][REVISION_LABEL] == world.job.spec.revision

    asyncio.run(story())


def test_meanwhile_the_status_says_how_far_it_is() -> None:
    async def story() -> None:
        world = await trained()
        old = world.job.status.update_revision
        world.user_changes(template=template("y"))
        await world.settle()
        status = world.job.status
        assert (status.current_revision, status.updated_replicas) == (old, 1)
        assert status.update_revision == world.job.spec.revision != old
        assert progress(world) == ("True", "Rolling")
        assert world.condition("Progressing").message.endswith("waits for replica 2")

    asyncio.run(story())


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.CATCHING_UP])
def test_a_replica_that_is_not_back_keeps_the_next_one_waiting(state: ReplicaState) -> None:
    async def story() -> None:
        world = await changed()
        members = world.coordinator
        assert members is not None
        await world.settle()
        world.kubelets_start_everything()
        if state is ReplicaState.CATCHING_UP:
            world.everybody_trains()
            assert world.coordinator is not None
            late = [
                it.model_copy(update={"step": None, "role": "shadow"}) if it.replica == 2 else it
                for it in world.coordinator.replicas
            ]
            world.coordinator = world.coordinator.model_copy(update={"replicas": tuple(late)})
        await world.settle()
        assert world.job.status.replica_statuses[2].state is state
        assert new_ones(world) == [2]

    asyncio.run(story())


def test_the_next_one_waits_until_the_one_before_has_done_some_steps() -> None:
    async def story() -> None:
        world = await changed()
        await come_back(world)
        assert world.job.status.replica_statuses[2].state is ACTIVE
        await do_steps(world, 2)
        assert (new_ones(world), progress(world)) == ([2], ("True", "Rolling"))
        assert world.condition("Progressing").message.endswith("waits for replica 2")
        await do_steps(world, 1)
        assert new_ones(world) == [1, 2]

    asyncio.run(story())


def test_a_roll_is_over_when_the_last_one_has_done_them_too() -> None:
    async def story() -> None:
        world = await changed()
        await goes_on(world)
        await goes_on(world)
        await come_back(world)
        assert (new_ones(world), progress(world)) == ([0, 1, 2], ("True", "Rolling"))
        assert world.job.status.current_revision != world.job.status.update_revision
        await do_steps(world, 3)
        assert (progress(world), reasons(world).count("RolledOut")) == (("False", "UpToDate"), 1)

    asyncio.run(story())


def test_how_many_steps_is_for_the_user_to_say() -> None:
    async def story() -> None:
        world = await changed(updatePolicy={"minReadySteps": 0})
        await come_back(world)
        assert new_ones(world) == [1, 2]
        world = await changed(updatePolicy={"minReadySteps": 20})
        await come_back(world)
        await do_steps(world, 19)
        assert new_ones(world) == [2]
        await do_steps(world, 1)
        assert new_ones(world) == [1, 2]

    asyncio.run(story())


def test_an_operator_that_starts_meanwhile_counts_no_steps_twice_and_none_of_others() -> None:
    async def story() -> None:
        world = await changed()
        await come_back(world)
        since = world.job.status.replica_statuses[2].trains_since_step
        assert since == step(world)
        await do_steps(world, 1)
        assert world.job.status.replica_statuses[2].trains_since_step == since
        assert world.job.status.replica_statuses[0].trains_since_step == 10

    asyncio.run(story())


def test_an_update_that_crashes_in_its_first_steps_reaches_nobody_else() -> None:
    async def story() -> None:
        world = await changed()
        others = {name: uid for name, uid in world.pods.items() if name[1] in "01"}
        for attempt in (1, 2):
            await come_back(world)
            await do_steps(world, 1)
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
            assert (new_ones(world), progress(world)) == ([2], ("False", "RollStalled"))
            world.now += 1000.0
        await come_back(world)
        assert world.job.status.replica_statuses[2].state is ACTIVE
        assert progress(world) == ("False", "RollStalled")  # as it has been each time
        assert others.items() <= world.pods.items()
        await do_steps(world, 3)
        assert (new_ones(world), progress(world)) == ([1, 2], ("True", "Rolling"))

    asyncio.run(story())


def test_a_coordinator_that_says_nothing_for_a_moment_stalls_no_roll_that_has_gone_on() -> None:
    async def story() -> None:
        world = await changed()
        await come_back(world)
        world.exits("r2-a1-0", 1)
        await world.settle()
        await come_back(world)
        await do_steps(world, 3)
        assert progress(world) == ("True", "Rolling")
        speaks, world.coordinator = world.coordinator, None
        await world.look()
        assert progress(world) == ("True", "Rolling")
        world.coordinator = speaks
        await world.settle()
        assert progress(world) == ("True", "Rolling")

    asyncio.run(story())


def test_a_spare_shows_nothing_of_a_step_that_it_failed_in() -> None:
    async def story() -> None:
        world = await changed(spares=1)
        await come_back(world)
        assert new_ones(world) == [2, 3]
        world.the_deleted_vanish()
        await do_steps(world, 1)  # the spare has taken the place of 2
        await world.train(step=step(world))  # which is the new spare
        states = [entry.state for entry in world.job.status.replica_statuses]
        assert (states[2:], new_ones(world)) == ([ReplicaState.SPARE, ACTIVE], [2, 3])
        world.exits("r3-a1-0", 1)
        await world.settle()
        assert (new_ones(world), progress(world)) == ([2, 3], ("False", "RollStalled"))
        world.the_deleted_vanish()
        await world.train(step=step(world))  # now 2 trains in its place
        states = [entry.state for entry in world.job.status.replica_statuses]
        assert (states[2:], progress(world)) == ([ACTIVE, ReplicaState.SPARE], ("False", "RollStalled"))
        await do_steps(world, 3)
        assert new_ones(world) == [1, 2, 3]

    asyncio.run(story())


def test_a_spare_that_failed_on_its_way_and_stands_by_holds_nobody_up() -> None:
    async def story() -> None:
        world = await changed(spares=1)
        world.the_deleted_vanish()
        world.kubelets_start_everything()
        world.exits("r3-a1-0", 1)
        await world.settle()
        assert (new_ones(world), progress(world)) == ([3], ("False", "RollStalled"))
        await come_back(world)
        assert new_ones(world) == [2, 3]

    asyncio.run(story())


def test_a_replica_that_is_down_counts_as_away() -> None:
    async def story() -> None:
        world = await trained(minReplicas=1)
        world.exits("r0-a0-0", 1)
        await world.settle()
        world.user_changes(template=template("y"))
        await world.settle()
        assert attempts(world) == [2, 0, 0]  # what did not run yet takes the new template at once
        assert new_ones(world) == [0]

    asyncio.run(story())


def test_as_many_as_the_policy_says() -> None:
    async def story() -> None:
        world = await changed(replicas=4, minReplicas=1, updatePolicy={"maxUnavailable": 2})
        assert new_ones(world) == [2, 3]

    asyncio.run(story())


def test_never_so_many_that_fewer_than_min_replicas_are_left() -> None:
    async def story() -> None:
        world = await changed(replicas=4, minReplicas=3, updatePolicy={"maxUnavailable": 3})
        assert new_ones(world) == [3]

    asyncio.run(story())


def test_where_none_can_go_the_status_says_so_and_what_would_help() -> None:
    async def story() -> None:
        world = await changed(minReplicas=3)
        assert attempts(world) == [0, 0, 0]
        assert progress(world) == ("False", "NoRoom")
        assert "lower minReplicas, add a replica or a spare" in world.condition("Progressing").message
        assert reasons(world).count("NoRoom") == 1
        world.user_changes(minReplicas=2)
        await world.settle()
        world.vanish(f"{NAME}-coordinator")
        await goes_on(world)
        assert 2 in new_ones(world)

    asyncio.run(story())


def test_spares_go_first() -> None:
    async def story() -> None:
        world = await changed(spares=1, minReplicas=3)
        assert new_ones(world) == [3]
        await goes_on(world)
        assert new_ones(world) == [2, 3]  # the new spare takes its place: no room is needed

    asyncio.run(story())


def test_nothing_is_taken_away_while_nobody_knows_who_trains() -> None:
    async def story() -> None:
        world = await trained()
        coordinator, world.coordinator = world.coordinator, None
        world.user_changes(template=template("y"))
        await world.settle()
        assert (attempts(world), progress(world)) == ([0, 0, 0], ("True", "Rolling"))
        world.coordinator = coordinator
        await world.settle()
        assert attempts(world) == [0, 0, 1]

    asyncio.run(story())


def test_a_template_that_fails_stops_the_roll_and_costs_the_others_nothing() -> None:
    async def story() -> None:
        world = await changed(minReplicas=1, updatePolicy={"maxUnavailable": 2}, replicas=4)
        await goes_on_without(world)
        world.exits("r3-a1-0", 1)
        await world.settle()
        assert new_ones(world) == [2, 3]
        assert progress(world) == ("False", "RollStalled")
        assert f"{NAME}-r3-a1-0 Error exit 1" in world.condition("Progressing").message
        assert reasons(world).count("RollStalled") == 1
        assert {name for name in world.pods if name[1] in "01"} == {"r0-a0-0", "r0-a0-1", "r1-a0-0", "r1-a0-1"}

    async def goes_on_without(world: World) -> None:
        world.the_deleted_vanish()
        world.kubelets_start_everything()
        await world.settle()

    asyncio.run(story())


async def spent(world: World) -> None:
    """The new replica fails until it is abandoned."""
    for _ in range(10):
        entry = world.job.status.replica_statuses[2]
        if entry.state is ReplicaState.ABANDONED:
            return
        world.now += 1000.0
        await world.settle()
        world.kubelets_start_everything()
        world.exits(f"r2-a{world.job.status.replica_statuses[2].attempt}-0", 1)
        await world.settle()
    raise AssertionError("it was never abandoned")


@pytest.mark.parametrize("image", ["x", "z"])
def test_a_replica_abandoned_with_a_bad_template_stops_the_roll_until_that_is_corrected(image: str) -> None:
    async def story() -> None:
        world = await changed(minReplicas=1, failurePolicy={"perReplica": {"limit": 2, "windowSeconds": 100000}})
        await spent(world)
        assert (new_ones(world), progress(world)) == ([2], ("False", "RollStalled"))
        others = {name: uid for name, uid in world.pods.items() if name[1] in "01"}
        assert len(others) == 4
        world.user_changes(template=template(image))
        await goes_on(world)
        await goes_on(world)
        assert world.job.status.replica_statuses[2].state is ACTIVE
        assert world.job.status.abandoned_replicas == 0
        if image == "x":  # changed back: those that have it are left alone
            assert others.items() <= world.pods.items()
        else:
            await goes_on(world)
            assert new_ones(world) == [0, 1, 2]

    asyncio.run(story())


def test_a_corrected_template_is_tried_without_waiting_for_the_end_of_a_backoff() -> None:
    async def story() -> None:
        world = await changed(minReplicas=1)
        for attempt in (1, 2):
            world.kubelets_start_everything()
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
        assert world.job.status.replica_statuses[2].state is ReplicaState.BACKOFF
        world.user_changes(template=template("z"))
        await world.settle()
        assert world.job.status.replica_statuses[2].state is STARTING
        assert new_ones(world) == [2]

    asyncio.run(story())


def test_a_template_is_replaced_that_never_starts() -> None:
    async def story() -> None:
        world = await changed()
        world.the_deleted_vanish()
        world.kubelet_places("r2-a1-0")  # and its image does not exist
        await world.settle()
        assert new_ones(world) == [2]
        world.user_changes(template=template("z"))
        await world.settle()
        assert (attempts(world), new_ones(world)) == ([0, 0, 2], [2])
        assert not {"r2-a1-0", "r2-a1-1"} & world.pods.keys()

    asyncio.run(story())


def test_a_job_that_has_not_begun_takes_the_new_template_everywhere_at_once() -> None:
    async def story() -> None:
        world = World(manifest())
        await world.settle()
        world.user_changes(template=template("y"))
        await world.settle()
        assert (attempts(world), new_ones(world)) == ([1, 1, 1], [0, 1, 2])
        images = {it["spec"]["containers"][0]["image"] for it in world.objects.values() if _trains(it)}
        assert images == {"y"}

    asyncio.run(story())


def _trains(thing: dict[str, Any]) -> bool:
    return thing["kind"] == "Pod" and REPLICA_LABEL in thing["metadata"]["labels"]


def test_a_template_that_says_the_same_rolls_nothing() -> None:
    async def story() -> None:
        world = await trained()
        before, writes = world.pods, len(world.writes)
        container = {"command": ["train"], "image": "x", "name": "train", "env": [], "resources": {}}
        world.user_changes(template={"metadata": {"creationTimestamp": None}, "spec": {"containers": [container]}})
        await world.settle()
        assert world.pods == before
        assert world.writes[writes:] in ([], ["status"])  # observedGeneration

    asyncio.run(story())


def test_on_restart_leaves_all_alone_until_one_restarts() -> None:
    async def story() -> None:
        world = await changed(updatePolicy={"type": "OnRestart"})
        assert (attempts(world), progress(world)) == ([0, 0, 0], ("False", "OnRestart"))
        world.exits("r0-a0-0", 1)
        await world.settle()
        assert (attempts(world), new_ones(world)) == ([1, 0, 0], [0])

    asyncio.run(story())


def test_recreate_lets_all_leave_and_starts_them_when_the_last_has_stopped() -> None:
    async def story() -> None:
        world = await changed(updatePolicy={"type": "Recreate"}, **CHECKPOINT)
        assert [entry.state for entry in world.job.status.replica_statuses] == [ReplicaState.SUSPENDED] * 3
        assert (world.pods, world.told) == ({}, [])
        assert progress(world) == ("True", "Recreating")
        assert "deletionTimestamp" not in world.pod(f"{NAME}-coordinator")["metadata"]  # it lets them go
        for name in [f"{NAME}-r{replica}-a0-{index}" for replica in range(3) for index in range(2)][1:]:
            world.vanish(name)
        await world.settle()
        assert world.pods == {}
        world.vanish("r0-a0-0")
        await world.settle()
        assert (attempts(world), new_ones(world)) == ([1, 1, 1], [0, 1, 2])
        assert len(world.pods) == 6

    asyncio.run(story())


async def paused(**spec: Any) -> World:
    """Replicas 1 and 2 have failed, and replica 0 waits for them."""
    world = await trained(**spec)
    for replica in (1, 2):
        world.exits(f"r{replica}-a0-0", 1)
    await world.settle()
    world.the_deleted_vanish()
    world.kubelets_start_everything()
    await world.settle()
    known = world.coordinator
    assert known is not None
    left = tuple(it for it in known.replicas if it.replica == 0)
    world.coordinator = known.model_copy(update={"paused": True, "replicas": left})
    await world.settle()
    assert world.job.status.state is JobState.PAUSED
    return world


def test_who_hangs_before_it_joins_gets_the_new_template_though_the_job_is_paused() -> None:
    async def story() -> None:
        world = await paused()
        world.user_changes(template=template("y"))
        await world.settle()
        assert (attempts(world), new_ones(world)) == ([0, 2, 2], [1, 2])
        assert {"r0-a0-0", "r0-a0-1"} <= world.pods.keys()

    asyncio.run(story())


@pytest.mark.parametrize("catches_up", [False, True])
def test_nobody_is_taken_for_one_that_hangs_who_may_be_about_to_train(catches_up: bool) -> None:
    async def story() -> None:
        world = await paused()
        known = world.coordinator
        assert known is not None
        if catches_up:  # without it the job would be paused for even longer
            (waits,) = known.replicas
            late = waits.model_copy(update={"replica": 1, "attempt": 1, "role": Role.SHADOW, "step": None})
            last = late.model_copy(update={"replica": 2})
            world.coordinator = known.model_copy(update={"replicas": (waits, late, last)})
        else:
            world.coordinator = None
        world.user_changes(template=template("y"))
        await world.settle()
        assert (attempts(world), new_ones(world)) == ([0, 1, 1], [])

    asyncio.run(story())


@pytest.mark.parametrize("heard", [False, True])
def test_a_job_that_hangs_before_it_has_begun_begins_with_a_corrected_template(heard: bool) -> None:
    async def story() -> None:
        world = World(manifest())
        await world.settle()
        world.kubelets_start_everything()
        greeted = ReplicaStatus(replica=0, attempt=0, role=None, step=None)
        world.coordinator = Status(
            epoch=0, paused=False, finished=False, step=0, loss=None, replicas=(greeted,) if heard else ()
        )
        await world.settle()
        world.user_changes(template=template("y"))
        await world.settle()
        assert new_ones(world) == ([1, 2] if heard else [0, 1, 2])

    asyncio.run(story())


@pytest.mark.parametrize("back", [0, 1, 2])
def test_after_a_restart_of_the_coordinator_nobody_who_has_trained_is_taken_for_one_that_hangs(back: int) -> None:
    async def story() -> None:
        world = await trained()
        known = world.coordinator
        assert known is not None
        world.coordinator = known.model_copy(update={"replicas": known.replicas[:back]})
        await world.settle()
        world.user_changes(template=template("y"))
        await world.settle()
        assert (attempts(world), new_ones(world)) == ([0, 0, 0], [])
        world.coordinator = known
        await world.settle()
        assert new_ones(world) == [2]

    asyncio.run(story())


def test_after_a_restart_of_the_coordinator_no_spare_that_was_ready_is_taken_for_one_that_hangs() -> None:
    async def story() -> None:
        world = await trained(spares=2)
        known = world.coordinator
        assert known is not None
        world.coordinator = known.model_copy(update={"replicas": known.replicas[:3]})  # those that train are back
        world.user_changes(template=template("y"))
        await world.settle()
        assert new_ones(world) == []
        world.coordinator = known
        await world.settle()
        assert new_ones(world) == [4]

    asyncio.run(story())


RECREATE = {"updatePolicy": {"type": "Recreate"}}


def test_recreate_takes_a_paused_job_as_it_is_and_mixes_no_templates() -> None:
    async def story() -> None:
        world = await paused(**RECREATE, **CHECKPOINT)
        world.user_changes(template=template("y"))
        await world.settle()
        assert world.pods == {}
        assert {entry.state for entry in world.job.status.replica_statuses} == {ReplicaState.SUSPENDED}
        world.the_deleted_vanish()
        await world.settle()
        assert (len(world.pods), new_ones(world)) == (6, [0, 1, 2])

    asyncio.run(story())


def test_under_recreate_who_is_down_waits_for_those_who_could_not_be_let_go_so_far() -> None:
    async def story() -> None:
        world = await trained(minReplicas=1, **RECREATE, **CHECKPOINT)
        for attempt in (0, 1):
            world.exits(f"r2-a{attempt}-0", 1)
            await world.settle()
            world.kubelets_start_everything()
        assert world.job.status.replica_statuses[2].state is ReplicaState.BACKOFF
        known, world.coordinator = world.coordinator, None
        world.user_changes(template=template("y"))
        for _ in range(3):
            world.now += 1000
            await world.settle()
            assert {name[1] for name in world.pods} == {"0", "1"}
        assert world.condition("Progressing").message.startswith("replica 2 stops, to start again with the template")
        assert world.condition("Progressing").message.endswith("as soon as replicas 0, 1 can be let go")
        before = attempts(world)
        world.coordinator = known
        await world.settle()
        assert world.pods == {}
        world.the_deleted_vanish()
        await world.settle()
        assert (attempts(world), new_ones(world)) == ([number + 1 for number in before], [0, 1, 2])

    asyncio.run(story())


def test_under_recreate_a_job_that_has_not_begun_waits_for_nobody() -> None:
    async def story() -> None:
        world = World(manifest(**RECREATE, **CHECKPOINT))
        await world.settle()
        world.kubelets_start_everything()
        world.pod("r2-a0-0")["status"]["phase"] = "Pending"
        world.coordinator = Status(epoch=0, paused=False, finished=False, step=0, loss=None, replicas=())
        await world.settle()
        world.user_changes(template=template("y"))
        await world.settle()
        world.the_deleted_vanish()
        await world.settle()
        assert (len(world.pods), new_ones(world)) == (6, [0, 1, 2])

    asyncio.run(story())


def test_under_recreate_one_that_was_scaled_away_and_is_still_needed_holds_nobody_up() -> None:
    async def story() -> None:
        world = await trained(replicas=2, minReplicas=1, **RECREATE, **CHECKPOINT)
        world.exits("r0-a0-0", 1)
        await world.settle()
        world.user_changes(template=template("y"), replicas=1)
        await world.settle()
        world.the_deleted_vanish()
        await world.settle()
        world.now += 1000
        await world.settle()
        assert any(name.startswith("r0-") for name in world.pods)

    asyncio.run(story())


def test_recreate_does_not_wait_for_ever_for_a_node_that_is_lost() -> None:
    async def story() -> None:
        world = await changed(updatePolicy={"type": "Recreate"}, **CHECKPOINT)
        world.now += 33.0
        await world.settle()
        assert len(world.pods) == 6

    asyncio.run(story())


@pytest.mark.parametrize("type_", ["Rolling", "Recreate"])
def test_an_operator_killed_anywhere_in_a_roll_goes_on_as_if_it_had_not_been(type_: str) -> None:
    async def story(kill_at: int | None) -> tuple[Any, ...]:
        world = await trained(updatePolicy={"type": type_}, **CHECKPOINT)
        world.user_changes(template=template("y"))
        if kill_at is not None:
            world.kill_at = len(world.writes) + kill_at
            with pytest.raises(Killed):
                await world.look()
            world.kill_at = None
        await world.settle()
        world.the_deleted_vanish()
        await world.settle()
        return attempts(world), new_ones(world), sorted(world.pods)

    whole = asyncio.run(story(None))
    for kill_at in range(4):
        assert asyncio.run(story(kill_at)) == whole


def test_the_same_failure_of_all_that_have_the_new_template_is_no_fault_of_the_code_of_the_others() -> None:
    async def story() -> None:
        world = await changed(
            replicas=4, minReplicas=1, updatePolicy={"maxUnavailable": 3}, failurePolicy={"simultaneousFraction": 0.5}
        )
        world.kubelets_start_everything()
        for replica in (1, 2, 3):
            world.exits(f"r{replica}-a1-0", 1)
        await world.settle()
        assert world.job.status.state is JobState.DEGRADED
        assert {"r0-a0-0", "r0-a0-1"} <= world.pods.keys()

    asyncio.run(story())
