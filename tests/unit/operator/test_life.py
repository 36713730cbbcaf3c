"""From the first look at a job to its end: what exists when, and which word stands in its status."""

from __future__ import annotations

import asyncio
import math

import pytest
from tests.unit.operator.world import NAME, NAMESPACE, World, manifest

from fthsdp_operator.api import JOB_LABEL, JOB_UID_LABEL, KIND, JobState, ReplicaState, format_time
from fthsdp_operator.cluster import ClusterError, Manifest
from fthsdp_operator.execute import Memory, reconcile
from fthsdp_operator.observed.observe import NodeView
from fthsdp_operator.rules.deadlines import STALLED
from fthsdp_operator.rules.job_status import PROGRESS

COORDINATOR = f"{NAME}-coordinator"


def all_exit(world: World, code: int = 0) -> None:
    for name in world.pods:
        world.exits(name, code)


def test_everything_a_job_needs_is_created_and_what_pods_lean_on_comes_first() -> None:
    async def story() -> None:
        world = World()
        await world.look()
        kinds = [write.split()[1] for write in world.writes if write.startswith("create")]
        support = ["Secret", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Service"]
        assert kinds == support + ["Pod"] * 7
        assert world.writes[0] == "status"
        assert all("ownerReferences" in it["metadata"] for (kind, _), it in world.objects.items() if kind != KIND)

    asyncio.run(story())


def test_a_settled_job_is_left_alone() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.writes.clear()
        wait = await world.look()
        assert world.writes == []
        assert 0 < wait <= 2

    asyncio.run(story())


def test_what_somebody_deletes_is_created_again() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        key = world.objects["Secret", f"{NAME}-key"]["stringData"]["key"]
        for kind, name in (("Service", NAME), ("ConfigMap", f"{NAME}-epoch")):
            world.vanish(name, kind=kind)
        await world.settle()
        assert ("Service", NAME) in world.objects
        assert ("ConfigMap", f"{NAME}-epoch") in world.objects
        assert world.objects["Secret", f"{NAME}-key"]["stringData"]["key"] == key
        assert world.job.status.restarts == 0

    asyncio.run(story())


def test_the_state_follows_the_pods_and_the_coordinator() -> None:
    async def story() -> None:
        world = World()
        states = []

        async def note() -> None:
            await world.settle()
            status = world.job.status
            states.append((status.state, status.ready, status.restarting_replicas))

        await note()
        world.kubelets_start_everything()
        await note()
        world.everybody_trains()
        await note()
        world.exits("r1-a0-0", 1)
        await note()
        world.exits("r2-a0-0", 1)
        await note()
        assert states == [
            (JobState.PENDING, "0/3", 0),
            (JobState.STARTING, "0/3", 0),
            (JobState.RUNNING, "3/3", 0),
            (JobState.DEGRADED, "2/3", 1),
            (JobState.PAUSED, "1/3", 2),
        ]
        assert world.condition("Available").status == "False"
        assert world.condition("Degraded").message == "replica 1 is Starting, replica 2 is Starting"

    asyncio.run(story())


def test_step_and_loss_come_from_the_coordinator_and_stay_when_it_is_silent() -> None:
    async def story() -> None:
        world = World()
        await world.train(step=41)
        world.coordinator = None
        await world.look()
        status = world.job.status
        assert (status.step, status.loss, status.ready) == (41, 2.5, "3/3")

    asyncio.run(story())


def test_a_loss_that_is_not_a_number_is_left_out() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        assert world.coordinator is not None
        world.coordinator = world.coordinator.model_copy(update={"loss": math.nan, "step": 11})
        world.now += PROGRESS
        await world.settle()
        assert world.job.status.loss is None

    asyncio.run(story())


def test_numbers_that_change_with_every_step_are_written_down_now_and_then() -> None:
    async def story() -> None:
        world = World()
        await world.train(step=10)
        world.writes.clear()
        world.now += PROGRESS - 1
        world.everybody_trains(step=11)
        await world.settle()
        assert (world.job.status.step, world.writes) == (10, [])
        world.now += 1
        await world.settle()
        assert (world.job.status.step, world.writes) == (11, ["status"])

    asyncio.run(story())


def test_the_last_step_is_written_down_at_once() -> None:
    async def story() -> None:
        world = World()
        await world.train(step=10)
        world.everybody_trains(step=11, finished=True)
        await world.settle()
        assert world.job.status.step == 11

    asyncio.run(story())


def test_the_first_step_is_written_down_at_once() -> None:
    async def story() -> None:
        world = World()
        await world.train(step=0)
        world.everybody_trains(step=1)
        await world.settle()
        assert world.job.status.step == 1

    asyncio.run(story())


def test_what_the_coordinator_counts_is_in_the_status_and_stays_there_while_it_is_silent() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        assert world.coordinator is not None
        figures = {"samples_per_second": 412.5, "effective_training_time": 0.97}
        world.coordinator = world.coordinator.model_copy(update=figures)
        world.now += PROGRESS
        await world.settle()
        world.coordinator = None
        world.now += PROGRESS
        await world.settle()
        status = world.job.status
        assert (status.samples_per_second, status.effective_training_time) == (412.5, 0.97)
        assert status.tokens_per_second is None

    asyncio.run(story())


def test_tokens_per_second_follow_from_what_the_job_says_of_its_samples() -> None:
    async def story() -> None:
        world = World(manifest(tokensPerSample=2048))
        await world.train()
        assert world.coordinator is not None
        world.coordinator = world.coordinator.model_copy(update={"samples_per_second": 10.0})
        world.now += PROGRESS
        await world.settle()
        assert world.job.status.tokens_per_second == 20480.0

    asyncio.run(story())


def test_a_job_is_complete_when_a_replica_finished_and_no_pod_runs() -> None:
    async def story() -> None:
        world = World(manifest(ttlSecondsAfterFinished=100))
        await world.train()
        world.exits("r0-a0-0", 0)
        world.exits("r0-a0-1", 0)
        world.exits("r1-a0-0", 0)
        await world.settle()
        assert world.job.status.state is JobState.RUNNING
        all_exit(world)
        world.exits(COORDINATOR, 0)
        await world.settle()
        assert (world.job.status.state, world.job.status.ready) == (JobState.COMPLETE, "3/3")
        assert world.condition("Complete").status == "True"
        assert len(world.pods) == 6  # they keep their logs

    asyncio.run(story())


def test_who_fails_after_somebody_finished_is_not_restarted() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r0-a0-0", 0)
        world.exits("r0-a0-1", 0)
        world.exits("r1-a0-0", 1)
        await world.settle()
        assert "r1-a1-0" not in world.pods
        for name in ("r1-a0-1", "r2-a0-0", "r2-a0-1"):
            if name in world.pods:
                world.exits(name, 0)
        await world.settle()
        assert world.job.status.state is JobState.COMPLETE
        assert [it.state for it in world.job.status.replica_statuses] == [
            ReplicaState.FINISHED,
            ReplicaState.FAILED,
            ReplicaState.FINISHED,
        ]

    asyncio.run(story())


def test_a_replica_still_on_its_way_back_at_the_end_holds_nobody_up() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r2-a0-0", 1)
        await world.settle()  # its new pods stay Pending: no node has room
        for name in ("r0-a0-0", "r0-a0-1", "r1-a0-0", "r1-a0-1"):
            world.exits(name, 0)
        await world.settle()
        assert world.job.status.state is JobState.COMPLETE
        assert not [name for name in world.pods if name.startswith("r2-a1")]

    asyncio.run(story())


def test_who_comes_back_after_the_end_to_a_coordinator_that_is_gone_holds_nobody_up() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r2-a0-0", 1)
        await world.settle()
        world.kubelets_start_everything()
        for name in ("r0-a0-0", "r0-a0-1", "r1-a0-0", "r1-a0-1", COORDINATOR):
            world.exits(name, 0)
        world.coordinator = None
        world.vanish(COORDINATOR)  # its pod is cleaned up with its node
        await world.settle()
        assert world.job.status.state is JobState.COMPLETE
        assert not [name for name in world.pods if name.startswith("r2-")]

    asyncio.run(story())


@pytest.mark.parametrize("end", ["complete", "failed"])
def test_an_end_is_never_left_again(end: str) -> None:
    async def story() -> None:
        world = World(manifest(failurePolicy={"perReplica": {"limit": 0}}))
        await world.train()
        all_exit(world, 0 if end == "complete" else 1)
        await world.settle()
        state = world.job.status.state
        assert state.value.lower() == end
        world.user_changes(suspend=True)
        await world.settle()
        world.user_changes(suspend=False, replicas=5)
        for name in list(world.pods):
            world.vanish(name)
        await world.settle()
        assert world.job.status.state is state
        assert world.pods == {}

    asyncio.run(story())


def test_a_coordinator_that_does_not_exit_after_the_end_is_stopped() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        all_exit(world)
        await world.settle()
        assert "deletionTimestamp" not in world.pod(COORDINATOR)["metadata"]
        world.now += 31
        await world.settle()
        assert "deletionTimestamp" in world.pod(COORDINATOR)["metadata"]

    asyncio.run(story())


def test_an_ended_job_is_deleted_when_its_time_is_up() -> None:
    async def story() -> None:
        world = World(manifest(ttlSecondsAfterFinished=100))
        await world.train()
        all_exit(world)
        world.exits(COORDINATOR, 0)
        await world.settle()
        assert await world.look() == 100
        world.now += 100
        await world.look()
        assert (KIND, NAME) not in world.objects
        assert await world.look() == math.inf

    asyncio.run(story())


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.objects[KIND, NAME]["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
        world.exits("r0-a0-0", 1)
        world.writes.clear()
        await world.settle()
        assert world.writes == []

    asyncio.run(story())


def test_suspending_takes_all_pods_away_and_resuming_starts_new_attempts_at_no_cost() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_changes(suspend=True)
        await world.settle()
        assert world.pods == {}
        assert world.job.status.state is JobState.SUSPENDED
        world.user_changes(suspend=False)
        world.vanish(COORDINATOR)
        world.coordinator = None
        await world.train()
        assert sorted(world.pods) == ["r0-a1-0", "r0-a1-1", "r1-a1-0", "r1-a1-1", "r2-a1-0", "r2-a1-1"]
        assert (world.job.status.state, world.job.status.restarts) == (JobState.RUNNING, 0)

    asyncio.run(story())


def test_a_job_that_is_suspended_from_the_start_has_nothing() -> None:
    async def story() -> None:
        world = World(manifest(suspend=True))
        await world.settle()
        assert list(world.objects) == [(KIND, NAME)]
        assert world.job.status.state is JobState.SUSPENDED

    asyncio.run(story())


def test_scaling_up_adds_replicas_and_touches_no_other() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        before = world.pods
        world.user_changes(replicas=4)
        await world.settle()
        assert world.pods.keys() - before.keys() == {"r3-a0-0", "r3-a0-1"}
        assert before.items() <= world.pods.items()
        # the coordinator has to know the new number; its state is in the ConfigMap
        assert "deletionTimestamp" in world.pod(COORDINATOR)["metadata"]

    asyncio.run(story())


def test_scaling_down_lets_the_highest_leave_before_the_coordinator_changes() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_changes(replicas=2)
        await world.settle()
        assert sorted(world.pods) == ["r0-a0-0", "r0-a0-1", "r1-a0-0", "r1-a0-1"]
        assert world.told == []  # they leave at a step boundary by themselves
        assert "deletionTimestamp" not in world.pod(COORDINATOR)["metadata"]
        for name in ("r2-a0-0", "r2-a0-1"):
            world.vanish(name)
        await world.settle()
        assert "deletionTimestamp" in world.pod(COORDINATOR)["metadata"]
        assert (world.job.status.ready, world.job.status.state) == ("2/2", JobState.RUNNING)

    asyncio.run(story())


def test_scaling_down_waits_for_as_many_to_train_as_minreplicas_says() -> None:
    """Else the last replicas that have the training state would go, while the others have still to get it from them."""

    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r0-a0-0", 1)
        world.exits("r1-a0-0", 134)
        world.user_changes(replicas=2)
        await world.settle()
        assert {"r2-a0-0", "r2-a0-1"} <= world.pods.keys()
        world.kubelets_start_everything()
        await world.settle()
        assert {"r2-a0-0", "r2-a0-1"} <= world.pods.keys()
        world.everybody_trains()
        await world.settle()
        assert sorted(world.pods) == ["r0-a1-0", "r0-a1-1", "r1-a1-0", "r1-a1-1"]
        assert {told.replica for told in world.told} == {0, 1}  # it leaves at a step boundary by itself

    asyncio.run(story())


def test_who_is_needed_although_it_was_scaled_away_goes_when_it_fails() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r0-a0-0", 1)
        world.user_changes(replicas=2)
        await world.settle()
        assert {"r2-a0-0", "r2-a0-1"} <= world.pods.keys()
        world.exits("r2-a0-0", 1)
        await world.settle()
        assert sorted(world.pods) == ["r0-a1-0", "r0-a1-1", "r1-a0-0", "r1-a0-1"]

    asyncio.run(story())


def test_a_replica_that_was_scaled_away_comes_back_as_a_new_attempt() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_changes(replicas=2)
        await world.settle()
        world.user_changes(replicas=3)
        await world.settle()
        assert {"r2-a1-0", "r2-a1-1"} <= world.pods.keys()
        assert world.job.status.restarts == 0

    asyncio.run(story())


@pytest.mark.parametrize("how", ["vanished", "failed"])
def test_a_lost_coordinator_is_replaced_and_costs_no_replica_anything(how: str) -> None:
    async def story() -> None:
        world = World()
        await world.train()
        before, old = world.pods, world.pod(COORDINATOR)["metadata"]["uid"]
        if how == "vanished":
            world.vanish(COORDINATOR)
        else:
            world.exits(COORDINATOR, 1)
        await world.settle()
        assert world.pod(COORDINATOR)["metadata"]["uid"] != old
        assert world.pods == before
        assert (world.job.status.restarts, world.job.status.coordinator.starts) == (0, 2)
        assert [event.reason for event in world.events if event.warning] == ["CoordinatorReplaced"]

    asyncio.run(story())


def test_a_coordinator_on_a_lost_node_is_removed_by_force() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.user_deletes(COORDINATOR)
        old = world.pod(COORDINATOR)["metadata"]["uid"]
        await world.settle()
        assert world.pod(COORDINATOR)["metadata"]["uid"] == old
        world.now += 33
        await world.settle()
        assert world.pod(COORDINATOR)["metadata"]["uid"] != old

    asyncio.run(story())


@pytest.mark.parametrize(
    ("kept_by", "words"),
    [
        (
            {
                "containerStatuses": [
                    {"name": "c", "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}
                ]
            },
            f"{COORDINATOR}: ImagePullFailed: container c: ErrImagePull: denied",
        ),
        ({}, f"{COORDINATOR}: Unschedulable: no scheduler has said anything about it"),
        (
            {"containerStatuses": [{"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}}]},
            f"{COORDINATOR}: ContainerCreating: its containers do not start: a Secret or volume that cannot be mounted,"
            " a large image, an init container; kubectl describe pod says which",
        ),
    ],
    ids=["its image", "no scheduler", "its Secret"],
)
def test_a_coordinators_pod_that_does_not_start_is_named_after_five_minutes(kept_by: Manifest, words: str) -> None:
    async def story() -> None:
        world = World()
        await world.settle()
        world.pod(COORDINATOR)["metadata"]["creationTimestamp"] = format_time(world.now)
        world.pod(COORDINATOR)["status"] |= kept_by
        if kept_by:
            world.kubelet_places(COORDINATOR)
        world.now += STALLED - 1
        assert await world.look() <= 1.0
        assert world.condition("Stalled").reason == "NobodyWaits"
        world.now += 1
        await world.settle()
        stalled = world.condition("Stalled")
        assert (stalled.status, stalled.reason, stalled.message) == ("True", "CoordinatorWaits", words)
        await world.look()
        assert [event.message for event in world.events if event.reason == "CoordinatorWaits"] == [words]
        world.kubelets_start_everything()
        world.pod(COORDINATOR)["status"].pop("containerStatuses", None)
        await world.settle()
        assert world.condition("Stalled").reason == "NobodyWaits"

    asyncio.run(story())


def test_a_coordinator_that_crashes_after_days_is_said_to_wait_only_when_it_has_been_away_for_long() -> None:
    async def story() -> None:
        world, memory = World(), Memory()

        async def look() -> str:
            await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
            return world.condition("Stalled").reason

        await world.train()
        world.pod(COORDINATOR)["metadata"]["creationTimestamp"] = format_time(world.now)
        world.now += 3 * 24 * 3600
        assert await look() == "NobodyWaits"
        waiting = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}
        world.pod(COORDINATOR)["status"]["containerStatuses"] = [{"name": "c", "state": {"waiting": waiting}}]
        world.coordinator = None
        for seconds, reason in ((1, "NobodyWaits"), (STALLED - 2, "NobodyWaits"), (1, "CoordinatorWaits")):
            world.now += seconds
            assert await look() == reason
        world.everybody_trains()
        assert await look() == "NobodyWaits"

    asyncio.run(story())


@pytest.mark.parametrize("finalizers", [["example.com/audit"], []])
def test_a_coordinators_pod_that_does_not_go_is_named_and_replaced_when_it_has(finalizers: list[str]) -> None:
    async def story() -> None:
        world = Held()
        await world.train()
        before, old = world.pods, world.pod(COORDINATOR)
        old["metadata"]["finalizers"] = finalizers
        world.user_deletes(COORDINATOR)
        world.now += 33
        await world.settle()
        assert world.condition("Stalled").reason == "NobodyWaits"
        world.now += 7
        for _ in range(3):
            await world.look()
        assert world.forced > 0
        stalled = world.condition("Stalled")
        why = "its finalizers keep it: example.com/audit" if finalizers else "removing it by force has not helped"
        assert (stalled.status, stalled.reason, stalled.message) == (
            "True", "CoordinatorHeld", f"{COORDINATOR} does not go, so no other coordinator can be started: {why}"
        )  # fmt: skip
        said = [event.message for event in world.events if event.reason == "CoordinatorHeld"]
        assert said == [stalled.message]
        world.vanish(COORDINATOR)
        await world.settle()
        assert world.pod(COORDINATOR)["metadata"]["uid"] != old["metadata"]["uid"]
        assert world.condition("Stalled").status == "False"
        assert (world.pods, world.job.status.restarts) == (before, 0)

    asyncio.run(story())


class Held(World):
    """A cluster in which a pod of the coordinator does not go, even by force."""

    forced = 0

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        if name == COORDINATOR and grace_seconds == 0:
            self.forced += 1
        else:
            await super().delete(kind, namespace, name, uid=uid, grace_seconds=grace_seconds)


def test_a_coordinator_that_keeps_failing_is_started_ever_more_slowly() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        for _ in range(2):
            world.vanish(COORDINATOR)
            await world.settle()
        assert ("Pod", COORDINATOR) not in world.objects
        world.now += 5
        await world.settle()
        assert ("Pod", COORDINATOR) in world.objects

    asyncio.run(story())


def test_a_coordinator_that_gets_new_numbers_again_and_again_is_back_at_once_each_time() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        for replicas in range(4, 10):
            world.user_changes(replicas=replicas)
            await world.settle()
            world.the_deleted_vanish()
            await world.settle()
            assert ("Pod", COORDINATOR) in world.objects
            await world.train()
        for _ in range(3):  # a suspend and a resume are nobody's failure either
            world.user_changes(suspend=True)
            await world.settle()
            world.the_deleted_vanish()
            await world.settle()
            world.user_changes(suspend=False)
            await world.settle()
            assert ("Pod", COORDINATOR) in world.objects
            await world.train()

    asyncio.run(story())


def test_a_pod_of_an_earlier_job_of_the_same_name_is_not_ours() -> None:
    async def story() -> None:
        earlier = World()
        await earlier.settle()
        earlier.exits("r0-a0-0", 1)
        world = World()
        world.objects["Pod", f"{NAME}-r0-a0-0"] = earlier.pod("r0-a0-0")
        world.pod("r0-a0-0")["metadata"]["labels"]["fthsdp.dev/job-uid"] = "another"
        world.pod("r0-a0-0")["metadata"]["ownerReferences"][0]["uid"] = "another"
        for _ in range(3):
            await world.look()
        assert world.job.status.restarts == 0
        world.vanish("r0-a0-0")
        await world.settle()
        assert world.pod("r0-a0-0")["metadata"]["labels"]["fthsdp.dev/job-uid"] == "job-1"

    asyncio.run(story())


def recreated(*names: str, finalizers: tuple[str, ...] = (), kind: type[World] = World, **spec: object) -> World:
    """A job that was deleted and created anew, while these pods of the earlier one stay on a node that is lost."""
    earlier, job = World(), manifest(**spec)
    job["metadata"]["uid"] = "job-2"
    world = kind(job)
    asyncio.run(earlier.train())
    for name in names:
        earlier.user_deletes(name)
        pod = earlier.pod(name)
        pod["metadata"] |= {"uid": f"old-{name}", "finalizers": list(finalizers)}
        pod["spec"]["nodeName"] = "lost"
        world.objects["Pod", pod["metadata"]["name"]] = pod
    world.node_views["lost"] = NodeView(name="lost", ready="Unknown", not_ready_since=world.now - 3600)
    return world


def test_an_earlier_jobs_coordinator_that_does_not_go_is_removed_by_force_as_its_own_would_be() -> None:
    async def story(world: World) -> None:
        world.now += 31  # its grace period is over, but not for long
        await world.settle()
        assert world.pod(COORDINATOR)["metadata"]["uid"] == f"old-{COORDINATOR}"
        world.now += 1
        await world.settle()
        assert world.pod(COORDINATOR)["metadata"]["labels"][JOB_UID_LABEL] == "job-2"
        assert world.condition("Stalled").reason == "NobodyWaits"

    asyncio.run(story(recreated(COORDINATOR)))


@pytest.mark.parametrize("allowed", [False, True])
def test_an_earlier_jobs_training_pods_are_removed_by_force_where_the_jobs_own_are(allowed: bool) -> None:
    async def story(world: World) -> None:
        world.now += 32
        await world.settle()
        new = {
            name for name in ("r0-a0-0", "r1-a0-1") if world.pod(name)["metadata"]["labels"][JOB_UID_LABEL] == "job-2"
        }
        assert new == ({"r0-a0-0", "r1-a0-1"} if allowed else set())
        assert world.condition("Stalled").reason == "NobodyWaits"
        world.now += 8
        await world.settle()
        words = (
            f"{NAME}-r0-a0-0 is of an earlier job of this name and does not go (and 1 more): node lost does not take it"
            " away; nodePolicy.forceDelete, or kubectl delete --force, removes it"
        )
        stalled = world.condition("Stalled")
        known = ("NobodyWaits", "") if allowed else ("PodNameTaken", words)
        assert (stalled.reason, stalled.message) == known
        said = [event.message for event in world.events if event.reason == "PodNameTaken"]
        assert said == ([] if allowed else [words])

    asyncio.run(story(recreated("r0-a0-0", "r1-a0-1", nodePolicy={"forceDelete": allowed})))


def test_an_earlier_jobs_pod_that_no_job_needs_is_left_to_kubernetes() -> None:
    async def story(world: World) -> None:
        world.now += 1000
        await world.settle()
        assert world.pod("r2-a0-1")["metadata"]["uid"] == "old-r2-a0-1"
        assert world.condition("Stalled").reason == "NobodyWaits"

    asyncio.run(story(recreated("r2-a0-1", replicas=2, minReplicas=1, nodePolicy={"forceDelete": True})))


def test_what_no_job_owns_is_not_removed_by_force_however_late_it_is() -> None:
    async def story(world: World) -> None:
        for name in theirs:
            del world.pod(name)["metadata"]["ownerReferences"]
        world.now += 1000
        await world.settle()
        assert all(world.pod(name)["metadata"]["uid"] == f"old-{name}" for name in theirs)
        words = "is not of this job and does not go (and 1 more): node lost does not take it away"
        assert world.condition("Stalled").message.startswith(f"{COORDINATOR} {words}")

    theirs = (COORDINATOR, "r0-a0-0")
    asyncio.run(story(recreated(*theirs, nodePolicy={"forceDelete": True})))


def test_a_finalizer_that_keeps_an_earlier_jobs_coordinator_is_named() -> None:
    async def story(world: World) -> None:
        world.now += 40
        for _ in range(3):
            await world.look()
        words = "is of an earlier job of this name and does not go: its finalizers keep it: example.com/audit"
        assert world.condition("Stalled").message == f"{COORDINATOR} {words}"

    asyncio.run(story(recreated(COORDINATOR, finalizers=("example.com/audit",), kind=Held)))


@pytest.mark.parametrize("change", [{"ownerReferences": []}, {"labels": {JOB_LABEL: NAME}}], ids=["a copy", "no role"])
def test_a_strangers_pod_under_a_needed_name_is_named_and_never_touched(change: Manifest) -> None:
    async def story() -> None:
        world = World()
        await world.train()
        taken = {**world.pod("r0-a0-0"), "metadata": {**world.pod("r0-a0-0")["metadata"], **change, "uid": "theirs"}}
        taken["metadata"]["name"] = f"{NAME}-r0-a1-0"
        world.objects["Pod", f"{NAME}-r0-a1-0"] = taken
        world.exits("r0-a0-1", 1)
        words = f"{NAME}-r0-a1-0 is there already and not of this job: delete it, or give the job another name"
        if "labels" in change:  # it is no pod of any job, so it is seen when it is in the way
            with pytest.raises(ClusterError, match=words):
                await world.settle()
        else:
            await world.settle()
            assert (world.condition("Stalled").reason, world.condition("Stalled").message) == ("PodNameTaken", words)
        assert world.pod("r0-a1-0")["metadata"]["uid"] == "theirs"
        world.vanish("r0-a1-0")
        await world.settle()
        assert world.pod("r0-a1-0")["metadata"]["labels"][JOB_UID_LABEL] == "job-1"
        assert world.condition("Stalled").reason == "NobodyWaits"

    asyncio.run(story())


def copied(world: World, name: str, *, keeps_owner: bool, **status: object) -> None:
    """Somebody copies a pod with its labels, to look into it: kubectl debug leaves the owner out, kubectl get not."""
    copy = {**world.pod(name), "metadata": {**world.pod(name)["metadata"], "name": "copy", "uid": "copy"}}
    if not keeps_owner:
        del copy["metadata"]["ownerReferences"]
    copy["status"] = {"phase": "Running", **status}
    world.objects = {("Pod", "copy"): copy, **world.objects}


@pytest.mark.parametrize("keeps_owner", [False, True])
def test_a_copy_of_a_training_pod_is_nobodys_failure_and_left_alone(keeps_owner: bool) -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.writes.clear()
        ended = {"name": "train", "state": {"terminated": {"exitCode": 1, "finishedAt": format_time(world.now)}}}
        copied(world, "r0-a0-0", keeps_owner=keeps_owner, phase="Failed", containerStatuses=[ended])
        await world.settle()
        world.vanish("copy")
        await world.settle()
        assert (world.job.status.restarts, world.writes) == (0, [])

    asyncio.run(story())


@pytest.mark.parametrize("keeps_owner", [False, True])
def test_a_copy_of_the_coordinator_is_not_the_coordinator(keeps_owner: bool) -> None:
    async def story() -> None:
        world = World()
        await world.train()
        copied(world, COORDINATOR, keeps_owner=keeps_owner, phase="Succeeded")
        world.exits("r1-a0-0", 1)
        await world.settle()
        world.vanish(COORDINATOR)
        await world.settle()
        assert (world.job.status.terminal, world.job.status.restarts) == (False, 1)
        assert {"copy", COORDINATOR} <= {name for kind, name in world.objects if kind == "Pod"}

    asyncio.run(story())


def test_a_job_waits_while_its_names_are_taken_by_objects_of_others() -> None:
    async def story() -> None:
        earlier = World()
        await earlier.settle()
        world = World()
        taken = earlier.objects["Secret", f"{NAME}-key"]
        taken["metadata"]["ownerReferences"][0]["uid"] = "another"  # the garbage collector is on its way
        world.objects["Secret", f"{NAME}-key"] = taken
        await world.settle()
        assert world.pods == {}
        accepted = world.condition("Accepted")
        assert (accepted.status, accepted.reason) == ("False", "NameTaken")
        assert accepted.message.startswith(f"Secret {NAME}-key: there already")
        world.vanish(f"{NAME}-key", kind="Secret")
        await world.settle()
        assert len(world.pods) == 6
        assert (world.condition("Accepted").status, world.job.status.coordinator.starts) == ("True", 1)

    asyncio.run(story())


def test_a_coordinator_that_has_just_started_takes_nothing_back() -> None:
    async def story() -> None:
        world = World()
        await world.train(step=41)
        assert world.coordinator is not None
        world.coordinator = world.coordinator.model_copy(update={"step": 0, "loss": None})
        await world.settle()
        assert (world.job.status.step, world.job.status.loss) == (41, 2.5)

    asyncio.run(story())


def test_a_job_that_cannot_be_understood_is_refused_and_what_runs_is_not_touched() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        before = world.pods
        world.user_changes(minReplicas=9)
        await world.look()
        await world.look()
        raw = world.objects[KIND, NAME]["status"]
        accepted = next(it for it in raw["conditions"] if it["type"] == "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
        assert accepted["message"].startswith("spec.minReplicas is above replicas")
        assert world.pods == before
        world.user_changes(minReplicas=1)
        await world.settle()
        assert world.condition("Accepted").status == "True"

    asyncio.run(story())


def test_conditions_keep_the_time_of_their_last_change() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        since = world.condition("Available").last_transition_time
        world.now += 60
        world.exits("r2-a0-0", 1)
        await world.settle()
        assert world.condition("Available").last_transition_time == since
        assert world.condition("Degraded").last_transition_time == world.now

    asyncio.run(story())


def test_what_happened_can_be_read_as_events() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        world.exits("r2-a0-0", 1)
        await world.settle()
        world.kubelets_start_everything()
        world.everybody_trains()
        await world.settle()
        all_exit(world)
        await world.settle()
        messages = [event.message for event in world.events if event.reason != "ReplicaActive"]
        assert messages == [
            "3/3 replicas train",
            "r2 llama-r2-a0-0 Error exit 1; attempt 1 starts now",
            "3/3 replicas train",
            "all training pods have ended",
        ]

    asyncio.run(story())
