"""What keeps a replica from training stands in the status, and has an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.operator.world import NAME, World, manifest

from fthsdp_operator.api import (
    REPLICA_LABEL,
    Failure,
    JobState,
    ReplicaState,
    ReplicaStatus,
    RuleAction,
    Waiting,
    format_time,
)
from fthsdp_operator.rules.deadlines import STALLED, stalled
from fthsdp_operator.rules.replicas import STRAGGLER_GRACE

START = 1800.0


async def starts(deadlines: dict[str, Any] | None = None, **spec: Any) -> World:
    """A job that trains, and whose replica 2 has just been started again."""
    world = World(manifest(deadlines=deadlines or {}, **spec))
    await world.train()
    world.user_deletes("r2-a0-0")
    await world.settle()
    for name in ("r2-a0-0", "r2-a0-1"):
        world.vanish(name)
    for index in range(2):
        world.pod(f"r2-a1-{index}")["metadata"]["creationTimestamp"] = format_time(world.now)
    await world.settle()
    return world


def entry(world: World, replica: int = 2) -> ReplicaStatus:
    found = world.job.status.replica(replica)
    assert found is not None
    return found


def failure(world: World, replica: int = 2) -> Failure:
    found = entry(world, replica).last_failure
    assert found is not None
    return found


def waits(world: World) -> Waiting:
    found = entry(world).waiting
    assert found is not None
    return found


def unplaced(world: World, name: str, reason: str = "Unschedulable", message: str = "0/3 nodes are available") -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    world.pod(name)["status"]["conditions"] = [condition]


def holds(
    world: World, name: str, reason: str, message: str = "no such thing", kind: str = "containerStatuses"
) -> None:
    """The kubelet starts a container not, and says why."""
    world.kubelet_places(name)
    container = {"name": "train", "image": "x", "state": {"waiting": {"reason": reason, "message": message}}}
    world.pod(name)["status"][kind] = [container]


async def after(world: World, seconds: float) -> None:
    world.now += seconds
    await world.settle()


# --- what it waits for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "reason", "message"),
    [
        (lambda w: unplaced(w, "r2-a1-1"), "Unschedulable", f"{NAME}-r2-a1-1: 0/3 nodes are available"),
        (
            lambda w: unplaced(w, "r2-a1-0", "SchedulingGated", "gated"),
            "SchedulingGated",
            f"{NAME}-r2-a1-0: gated",
        ),
        (
            lambda w: holds(w, "r2-a1-0", "ImagePullBackOff", 'Back-off pulling image "x"'),
            "ImagePullFailed",
            f'{NAME}-r2-a1-0: container train: ImagePullBackOff: Back-off pulling image "x"',
        ),
        (
            lambda w: holds(w, "r2-a1-0", "InvalidImageName", ""),
            "ImagePullFailed",
            f"{NAME}-r2-a1-0: container train: InvalidImageName: x",
        ),
        (
            lambda w: holds(w, "r2-a1-1", "CreateContainerConfigError", 'secret "s" not found'),
            "CreateContainerConfigError",
            f'{NAME}-r2-a1-1: container train: CreateContainerConfigError: secret "s" not found',
        ),
        (
            lambda w: holds(w, "r2-a1-1", "CrashLoopBackOff", "back-off 5m0s", "initContainerStatuses"),
            "CrashLoopBackOff",
            f"{NAME}-r2-a1-1: container train: CrashLoopBackOff: back-off 5m0s",
        ),
        (
            lambda w: w.kubelets_start_everything(),
            "NotJoined",
            "all its pods run, and the coordinator has not heard of it",
        ),
    ],
)
def test_the_status_says_what_a_replica_waits_for(held: Any, reason: str, message: str) -> None:
    async def story() -> None:
        world = await starts()
        assert entry(world).waiting is None  # nobody has said anything yet
        held(world)
        await world.settle()
        since = world.now
        assert (waits(world).reason, waits(world).message, waits(world).since) == (reason, message, since)
        await after(world, STALLED - 1)
        assert waits(world).since == since
        assert world.condition("Stalled").status == "False"
        await after(world, 1)
        stalled = world.condition("Stalled")
        assert (stalled.status, stalled.reason) == ("True", "ReplicasWait")
        assert stalled.message == f"replica 2: {reason}: {message}"
        world.kubelets_start_everything()
        world.pod("r2-a1-0")["status"] = world.pod("r2-a1-1")["status"] = {"phase": "Running"}
        world.everybody_trains()
        await world.settle()
        assert entry(world).waiting is None
        assert (world.condition("Stalled").status, world.condition("Stalled").reason) == ("False", "NobodyWaits")

    asyncio.run(story())


def test_of_many_that_wait_the_first_are_named() -> None:
    held = Waiting(reason="Unschedulable", message="no room", since=0.0)
    entries = tuple(ReplicaStatus(index=index, waiting=held) for index in range(9))
    words = [f"replica {index}: Unschedulable: no room" for index in range(4)]
    assert stalled(entries, STALLED) == "; ".join([*words, "and 5 more"])
    assert stalled(entries, STALLED - 1) == ""


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
def test_a_pod_that_just_takes_its_time_has_all_of_it_and_after_five_minutes_it_is_said(reason: str) -> None:
    async def story() -> None:
        world = await starts({"startSeconds": 60})
        for index in range(2):
            holds(world, f"r2-a1-{index}", reason)
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(world.now + 7000)}
        world.pod("r2-a1-0")["status"]["conditions"] = world.pod("r2-a1-1")["status"]["conditions"] = [placed]
        await after(world, 7000 + STALLED - 1)  # it was queued for long: that does not count
        assert (entry(world).waiting, world.condition("Stalled").status) == (None, "False")
        await after(world, 1)
        since = world.now - STALLED
        assert (waits(world).reason, waits(world).since) == ("ContainerCreating", since)
        assert waits(world).message.startswith(f"{NAME}-r2-a1-0: its containers do not start: a Secret or volume")
        assert world.condition("Stalled").reason == "ReplicasWait"
        await after(world, 100_000)
        assert (waits(world).since, entry(world).attempt) == (since, 1)
        world.kubelets_start_everything()
        await world.settle()
        assert waits(world).reason == "NotJoined"

    asyncio.run(story())


def test_a_pod_of_which_no_scheduler_says_anything_is_waited_for() -> None:
    async def story() -> None:
        world = await starts()
        await after(world, 9)
        assert entry(world).waiting is None
        await after(world, 1)
        assert (waits(world).reason, waits(world).message) == (
            "Unschedulable",
            f"{NAME}-r2-a1-0: no scheduler has said anything about it",
        )

    asyncio.run(story())


def test_a_sidecar_that_crashes_while_its_replica_trains_is_the_kubelets_business() -> None:
    async def story() -> None:
        world = await starts()
        world.kubelets_start_everything()
        world.everybody_trains()
        await world.settle()
        holds(world, "r2-a1-0", "CrashLoopBackOff", "back-off 5m0s", "initContainerStatuses")
        await after(world, 10 * START)
        assert (entry(world).waiting, entry(world).attempt, entry(world).state) == (None, 1, ReplicaState.ACTIVE)

    asyncio.run(story())


async def a_sidecar_crashes(**spec: Any) -> World:
    """The containers of replica 2 wait for a sidecar that crashes, and have for as long as a start may take."""
    world = await starts(**spec)
    holds(world, "r2-a1-0", "CrashLoopBackOff", "back-off 5m0s", "initContainerStatuses")
    world.kubelet_places("r2-a1-1")
    await world.settle()
    await after(world, START)
    return world


def test_a_sidecar_that_crashes_before_its_replica_starts_costs_no_restart() -> None:
    async def story() -> None:
        world = await a_sidecar_crashes()
        assert (waits(world).reason, world.condition("Stalled").reason) == ("CrashLoopBackOff", "ReplicasWait")
        assert (entry(world).attempt, entry(world).recent_restarts) == (1, ())

    asyncio.run(story())


def test_a_rule_may_end_what_waits_for_a_sidecar() -> None:
    async def story() -> None:
        rule = {"name": "mine", "onPodReasons": ["CrashLoopBackOff"], "action": "FailJob"}
        world = await a_sidecar_crashes(failurePolicy={"rules": [rule]})
        assert world.condition("Failed").reason == "FailedByRule"

    asyncio.run(story())


def test_behind_a_sidecar_that_crashes_no_missing_image_is_overlooked() -> None:
    async def story() -> None:
        world = await starts()
        holds(world, "r2-a1-0", "CrashLoopBackOff", "back-off 5m0s", "initContainerStatuses")
        holds(world, "r2-a1-1", "ImagePullBackOff")
        await world.settle()
        await after(world, START)
        assert (failure(world).reason, entry(world).attempt) == ("ImagePullFailed", 2)

    asyncio.run(story())


def test_who_trains_in_a_pod_that_is_pending_for_its_sidecar_is_left_alone_while_the_coordinator_is_silent() -> None:
    async def story() -> None:
        world = await starts()
        world.kubelets_start_everything()
        world.everybody_trains()
        await world.settle()
        holds(world, "r2-a1-0", "ImagePullBackOff")
        world.pod("r2-a1-0")["status"]["phase"] = "Pending"
        world.coordinator = None
        await world.settle()
        await after(world, 2 * START)
        assert (entry(world).waiting, entry(world).attempt, entry(world).state) == (None, 1, ReplicaState.ACTIVE)

    asyncio.run(story())


# --- scheduleSeconds --------------------------------------------------------------------------------------------------


def test_a_replica_that_is_half_placed_gives_its_nodes_back_and_waits_longer_each_time() -> None:
    async def story() -> None:
        world = await starts({"scheduleSeconds": 60})
        world.kubelet_places("r2-a1-0")
        unplaced(world, "r2-a1-1")
        await world.settle()
        await after(world, 59)
        assert entry(world).attempt == 1
        await after(world, 1)
        why = failure(world)
        assert (entry(world).attempt, entry(world).state) == (2, ReplicaState.BACKOFF)
        assert (why.reason, why.pod, why.action) == (
            "Unschedulable",
            f"{NAME}-r2-a1-1",
            RuleAction.RESTART_REPLICA_FREE,
        )
        assert why.message.endswith("0/3 nodes are available (for 60 s, which is deadlines.scheduleSeconds)")
        assert not [name for name in world.pods if name.startswith("r2")]
        assert entry(world).recent_restarts == ()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("deadlines", "reason", "placed"),
    [
        ({}, "Unschedulable", True),
        ({"scheduleSeconds": 60}, "SchedulingGated", True),
        ({"scheduleSeconds": 60}, "", False),
    ],
)
def test_pods_are_left_to_wait_where_nothing_is_gained(deadlines: dict[str, Any], reason: str, placed: bool) -> None:
    async def story() -> None:
        world = await starts(deadlines)
        if placed:
            world.kubelet_places("r2-a1-0")
            unplaced(world, "r2-a1-1", reason)
        before = world.pods
        await world.settle()
        await after(world, 100_000)
        assert world.pods == before

    asyncio.run(story())


def test_a_rule_may_give_up_on_a_replica_for_which_there_is_no_room() -> None:
    async def story() -> None:
        rules = [{"name": "full", "onPodReasons": ["Unschedulable"], "action": "AbandonReplica"}]
        world = await starts({"scheduleSeconds": 60}, failurePolicy={"rules": rules})
        unplaced(world, "r2-a1-0")
        await world.settle()
        await after(world, 60)
        assert (entry(world).state, failure(world).rule) == (ReplicaState.ABANDONED, "full")

    asyncio.run(story())


# --- startSeconds -----------------------------------------------------------------------------------------------------


def test_a_rank_that_hangs_before_the_coordinator_has_heard_of_it_has_an_end_by_default() -> None:
    async def story() -> None:
        world = await starts()
        world.kubelets_start_everything()
        await world.settle()
        await after(world, START - 1)
        assert entry(world).state is ReplicaState.STARTING
        await after(world, 1)
        why = failure(world)
        assert (why.reason, why.pod, why.action) == ("StartTimeout", f"{NAME}-r2-a1-0", RuleAction.RESTART_REPLICA)
        assert entry(world).attempt == 2
        assert len(entry(world).recent_restarts) == 1

    asyncio.run(story())


def test_a_first_start_has_the_same_end() -> None:
    async def story() -> None:
        world = World(manifest(deadlines={"startSeconds": 100}))
        await world.settle()
        world.kubelets_start_everything()
        world.everybody_trains()
        assert world.coordinator is not None
        others = tuple(it for it in world.coordinator.replicas if it.replica != 1)
        world.coordinator = world.coordinator.model_copy(update={"replicas": others, "step": 0})
        await world.settle()
        await after(world, 100)
        assert [it.attempt for it in world.job.status.replica_statuses] == [0, 1, 0]

    asyncio.run(story())


def test_nothing_is_counted_while_the_coordinator_does_not_answer_or_a_pod_does_not_run() -> None:
    async def story() -> None:
        world = await starts()
        world.kubelet_places("r2-a1-0")
        world.pod("r2-a1-0")["status"]["phase"] = "Running"
        await after(world, 2 * START)
        assert waits(world).reason == "Unschedulable"  # its other pod, of which no scheduler says anything
        world.kubelets_start_everything()
        await after(world, START - 1)
        known, world.coordinator = world.coordinator, None
        await after(world, 5 * START)
        assert (entry(world).attempt, entry(world).waiting) == (1, None)
        world.coordinator = known
        await world.settle()
        await after(world, START - 1)
        assert entry(world).attempt == 1
        await after(world, 1)
        assert entry(world).attempt == 2

    asyncio.run(story())


def test_a_member_waits_for_ever_if_it_has_to() -> None:
    async def story() -> None:
        world = await starts()
        world.kubelets_start_everything()
        world.everybody_trains()
        assert world.coordinator is not None
        waiting = tuple(
            it.model_copy(update={"role": None, "step": None}) if it.replica == 2 else it
            for it in world.coordinator.replicas
        )
        world.coordinator = world.coordinator.model_copy(update={"replicas": waiting})
        await world.settle()
        await after(world, 100 * START)
        assert (entry(world).attempt, entry(world).waiting) == (1, None)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("ErrImagePull", "ImagePullBackOff"), "ImagePullFailed"),
        (("CreateContainerConfigError",) * 2, "CreateContainerConfigError"),
    ],
)
def test_a_container_that_is_kept_from_starting_has_an_end(words: tuple[str, str], reason: str) -> None:
    async def story() -> None:
        world = await starts({"startSeconds": 600})
        holds(world, "r2-a1-0", "ContainerCreating")
        await after(world, 5000)  # a large image
        holds(world, "r2-a1-0", words[0])
        await world.settle()
        await after(world, 300)
        holds(world, "r2-a1-0", words[1])
        await after(world, 299)
        assert entry(world).attempt == 1
        await after(world, 1)
        assert (entry(world).attempt, failure(world).reason, failure(world).node) == (2, reason, "node-1")
        assert failure(world).action is RuleAction.RESTART_REPLICA

    asyncio.run(story())


# --- the whole job ----------------------------------------------------------------------------------------------------


def test_a_job_that_takes_too_long_fails_and_everything_stops() -> None:
    async def story() -> None:
        world = World(manifest(deadlines={"activeSeconds": 100}))
        world.now += 1000  # it waits for nodes: that does not count
        await world.train()
        world.now += 99
        assert await world.look() <= 1.0
        assert not world.job.status.terminal
        world.exits("r2-a0-0", 1)
        await after(world, 1)
        status, failed = world.job.status, world.condition("Failed")
        assert (status.state, failed.reason) == (JobState.FAILED, "DeadlineExceeded")
        assert failed.message == "the job has not ended within 100 s (deadlines.activeSeconds)"
        assert (status.restarts, list(world.pods)) == (0, ["r2-a0-0"])
        assert (status.ready, status.ready_replicas) == ("0/3", 0)  # for ever, so it has to be true
        assert {entry.state for entry in status.replica_statuses} == {ReplicaState.FAILED}

    asyncio.run(story())


def test_a_run_that_is_over_is_not_too_late() -> None:
    async def story() -> None:
        world = World(manifest(deadlines={"activeSeconds": 100}))
        await world.train()
        world.everybody_trains(finished=True)
        await after(world, 100)
        assert not world.job.status.terminal
        assert await world.look() > 0  # nor looked at again and again

    asyncio.run(story())


@pytest.mark.parametrize("state", [ReplicaState.ACTIVE, ReplicaState.SPARE])
def test_a_replica_that_froze_when_the_run_and_its_coordinator_were_over_is_stopped(state: ReplicaState) -> None:
    async def story() -> None:
        world = World(manifest(spares=1))
        await world.train()
        frozen = next(it.index for it in world.job.status.replica_statuses if it.state is state)
        world.everybody_trains(finished=True)
        for (kind, name), it in list(world.objects.items()):
            replica = it["metadata"].get("labels", {}).get(REPLICA_LABEL)
            if kind == "Pod" and replica not in (None, str(frozen)):
                world.exits(name, 0)
        await world.settle()
        world.vanish(f"{NAME}-coordinator")
        world.coordinator = None
        await world.settle()
        await after(world, STRAGGLER_GRACE - 1)
        assert not world.job.status.terminal
        await after(world, 1)
        assert world.job.status.state is JobState.COMPLETE
        assert not [name for name in world.pods if name.startswith(f"r{frozen}-")]

    asyncio.run(story())
