"""One group for each attempt of a replica: there before its pods, and gone with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.operator.world import NAME, Killed, World, manifest

from fthsdp_operator.api import ATTEMPT_LABEL, MAX_JOB_NAME, GangProvider, Job, ReplicaState, parse_job
from fthsdp_operator.manifests import gang, render
from fthsdp_operator.observed.observe import observe, view
from fthsdp_operator.rules.actions import Delete, delete
from fthsdp_operator.rules.pod_groups import with_groups

Manifest = dict[str, Any]
WITH_GROUPS = ["Native", "Volcano", "Coscheduling"]


def job_of(provider: str, template: Manifest | None = None, **fields: Any) -> Job:
    template = template or manifest()["spec"]["template"]
    return parse_job(manifest(gang={"provider": provider, **fields}, template=template))


def pod(job: Job) -> Manifest:
    return render.training_pod(job, replica=2, attempt=1, index=0)


def template(**fields: Any) -> Manifest:
    return {"spec": {"containers": [{"name": "train", "image": "x"}], **fields}}


# --- what each provider is told ---


def test_without_a_provider_nothing_is_said() -> None:
    assert pod(job_of("None")) == pod(parse_job(manifest()))


def test_native() -> None:
    job = job_of("Native", template(priorityClassName="high"))
    made = render.pod_group(job, replica=2, attempt=1)
    assert (made["apiVersion"], made["kind"]) == ("scheduling.k8s.io/v1beta1", "PodGroup")
    assert made["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "disruptionMode": {"all": {}},
        "priorityClassName": "high",
    }
    assert pod(job)["spec"]["schedulingGroup"] == {"podGroupName": made["metadata"]["name"]}


def test_volcano() -> None:
    job = job_of("Volcano", queue="research")
    made = render.pod_group(job, replica=2, attempt=1)
    assert (made["apiVersion"], made["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert made["spec"] == {"minMember": 2, "queue": "research"}
    assert pod(job)["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == made["metadata"]["name"]
    assert pod(job)["spec"]["schedulerName"] == "volcano"
    assert render.pod_group(job_of("Volcano"), replica=0, attempt=0)["spec"] == {"minMember": 2}


def test_coscheduling() -> None:
    job = job_of("Coscheduling", scheduleTimeoutSeconds=120)
    made = render.pod_group(job, replica=2, attempt=1)
    assert (made["apiVersion"], made["kind"]) == ("scheduling.x-k8s.io/v1alpha1", "PodGroup")
    assert made["spec"] == {"minMember": 2, "scheduleTimeoutSeconds": 120}
    assert pod(job)["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == made["metadata"]["name"]
    assert pod(job)["spec"]["schedulerName"] == "scheduler-plugins-scheduler"


@pytest.mark.parametrize("provider", ["Volcano", "Coscheduling"])
def test_a_scheduler_that_the_user_names_is_the_one(provider: str) -> None:
    assert pod(job_of(provider, template(schedulerName="mine")))["spec"]["schedulerName"] == "mine"


def test_kueue() -> None:
    own = {"metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}}, **template()}
    made = pod(job_of("Kueue", own, queue="research"))["metadata"]
    group = gang.group_name(job_of("Kueue", queue="research"), 2, 1)
    theirs = {name: value for name, value in made["labels"].items() if name.startswith("kueue")}
    assert theirs == {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/pod-group-name": group}
    assert {name: value for name, value in made["annotations"].items() if name.startswith("kueue")} == {
        "kueue.x-k8s.io/pod-group-total-count": "2",
        "kueue.x-k8s.io/pod-group-fast-admission": "true",
        "kueue.x-k8s.io/pod-group-pod-index-label": "fthsdp.dev/pod-index",
        "kueue.x-k8s.io/retriable-in-group": "false",
    }
    assert (made["labels"]["team"], made["annotations"]["b"]) == ("a", "c")


@pytest.mark.parametrize("provider", WITH_GROUPS)
def test_a_group_goes_with_its_job(provider: str) -> None:
    metadata = render.pod_group(job_of(provider), replica=0, attempt=0)["metadata"]
    assert metadata["ownerReferences"][0]["uid"] == "job-1"
    assert metadata["labels"]["fthsdp.dev/job"] == NAME


def test_names_of_groups_are_labels_and_no_two_jobs_share_one() -> None:
    job = job_of("Native")
    longest = job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": "a" * MAX_JOB_NAME})})
    assert len(gang.group_name(longest, 1023, 999_999)) <= 63
    later = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "job-2"})})
    names = {gang.group_name(it, replica, attempt) for it in (job, later) for replica in (0, 1) for attempt in (0, 1)}
    assert len(names) == 8


def test_every_provider_is_in_the_tables() -> None:
    assert {*gang.GROUP_API, GangProvider.KUEUE, GangProvider.NONE} == set(GangProvider)
    assert len({gang.group_kind(provider) for provider in gang.GROUP_API}) == len(gang.GROUP_API)


# --- when ---


class Grouped(World):
    """A cluster that says so when a pod comes before its group."""

    def __init__(self, provider: str = "Native", **spec: Any) -> None:
        super().__init__(manifest(gang={"provider": provider}, **spec))
        self.early: list[str] = []

    @property
    def groups(self) -> set[str]:
        """Groups by their names without the job's."""
        whose = gang.group_name(self.job, 0, 0).removesuffix("-r0-a0")
        return {name.removeprefix(f"{whose}-") for kind, name in self.objects if kind == "PodGroup"}

    async def create(self, manifest: Any) -> Manifest:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Pod" and "coordinator" not in name:
            group = name.removeprefix(f"{NAME}-").rpartition("-")[0]
            if group not in self.groups:
                self.early.append(name)
        return await super().create(manifest)


@pytest.mark.parametrize("provider", WITH_GROUPS)
def test_groups_are_there_before_their_pods_and_the_next_attempt_has_its_own(provider: str) -> None:
    async def story() -> None:
        world = Grouped(provider)
        await world.train()
        assert world.groups == {"r0-a0", "r1-a0", "r2-a0"}
        world.exits("r1-a0-0", 1)
        await world.settle()
        assert world.groups == {"r0-a0", "r1-a1", "r2-a0"}
        assert world.early == []

    asyncio.run(story())


def test_a_group_that_is_gone_with_its_only_pod_is_not_left_behind() -> None:
    async def story() -> None:
        world = Grouped(podsPerReplica=1)
        await world.train()
        world.vanish("r1-a0-0")
        await world.settle()
        assert world.groups == {"r0-a0", "r1-a1", "r2-a0"}

    asyncio.run(story())


async def restarted_in_its_pod(world: Grouped, times: int) -> None:
    """Replica 1 crashes so often, and is restarted in its only pod each time."""
    await world.train()
    for number in range(times):
        world.launcher_says("r1-a0-0", 1)
        await world.settle()
        assert world.job.status.replica_statuses[1].attempt == number + 1
        world.everybody_trains()
        await world.settle()
        world.now += 601


IN_PLACE = {"podsPerReplica": 1, "failurePolicy": {"inPlace": {}}}


@pytest.mark.parametrize("times", [1, 3])
def test_a_replica_that_was_restarted_in_its_pods_keeps_their_group_and_leaves_none_behind(times: int) -> None:
    async def story() -> None:
        world = Grouped(**IN_PLACE)
        await restarted_in_its_pod(world, times)
        assert world.groups == {"r0-a0", "r1-a0", "r2-a0"}
        world.vanish("r1-a0-0")  # so that nobody deletes it
        await world.settle()
        assert world.groups == {"r0-a0", f"r1-a{times + 1}", "r2-a0"}

    asyncio.run(story())


def test_nor_does_it_when_it_is_suspended_while_its_pod_goes() -> None:
    async def story() -> None:
        world = Grouped(**IN_PLACE)
        await restarted_in_its_pod(world, 2)
        world.user_deletes("r1-a0-0")
        world.user_changes(suspend=True)
        await world.settle()
        for replica in range(3):
            world.vanish(f"r{replica}-a0-0")
        world.user_changes(suspend=False)
        await world.settle()
        assert world.groups == {"r0-a1", "r1-a3", "r2-a1"}

    asyncio.run(story())


def test_nor_does_an_operator_that_is_killed_at_any_call() -> None:
    async def story() -> None:
        for number in range(20):
            world = Grouped(**IN_PLACE)
            await restarted_in_its_pod(world, 2)
            begun = len(world.writes)
            world.vanish("r1-a0-0")
            world.kill_at = begun + number
            try:
                await world.settle()
            except Killed:
                world.kill_at = None
                await world.settle()
            assert world.groups == {"r0-a0", "r1-a3", "r2-a0"}, number
            if len(world.writes) - begun <= number:
                return
        raise AssertionError("it never ends")

    asyncio.run(story())


def test_who_is_abandoned_scaled_away_or_suspended_has_no_group() -> None:
    async def story() -> None:
        world = Grouped(failurePolicy={"rules": [_ABANDON]})
        await world.train()
        world.exits("r1-a0-0", 7)
        await world.settle()
        assert world.job.status.replica_statuses[1].state is ReplicaState.ABANDONED
        assert world.groups == {"r0-a0", "r2-a0"}
        world.user_changes(replicas=2, minReplicas=1)
        await world.settle()
        assert world.groups == {"r0-a0"}
        world.user_changes(suspend=True)
        await world.settle()
        assert world.groups == set()

    asyncio.run(story())


def test_the_group_of_a_pod_is_that_of_the_attempt_for_which_it_was_created() -> None:
    """A pod may go on as a later attempt: its label says so, and its group cannot be changed."""
    job = job_of("Native")
    made = render.training_pod(job, replica=1, attempt=0, index=0)
    made["metadata"] |= {"uid": "u", "labels": made["metadata"]["labels"] | {ATTEMPT_LABEL: "3"}}
    pod = view(made)
    assert pod is not None
    observed = observe(job, [pod], fresh_key="", coordinator_image="")
    first, _ = with_groups(job, observed, delete(observed.trainers, "so"))
    assert isinstance(first, Delete)
    assert (first.kind, first.name) == ("PodGroup.scheduling.k8s.io", gang.group_name(job, 1, 0))


_ABANDON = {"name": "a", "onExitCodes": {"operator": "In", "values": [7]}, "action": "AbandonReplica"}


def test_a_job_without_groups_calls_for_none() -> None:
    async def story() -> None:
        world = World(manifest(gang={"provider": "Kueue", "queue": "q"}))
        await world.train()
        world.exits("r1-a0-0", 1)
        await world.settle()
        assert [call for call in world.writes if "PodGroup" in call] == []

    asyncio.run(story())


@pytest.mark.parametrize("provider", ["Native", "Volcano"])
def test_an_operator_that_is_killed_at_any_call_leaves_the_groups_that_are_needed(provider: str) -> None:
    async def story() -> None:
        calls = await failing(Grouped(provider))
        for number in range(calls):
            world = Grouped(provider)
            assert await failing(world, kill_after=number) >= number
            assert world.groups == {"r0-a0", "r1-a1", "r2-a1"}, number
            assert world.early == [], number

    asyncio.run(story())


async def failing(world: Grouped, *, kill_after: int | None = None) -> int:
    """Two replicas fail, in one of them a pod is gone; returns how many calls it took, the killed one included."""
    await world.train()
    begun = len(world.writes)
    world.exits("r1-a0-0", 1)
    world.vanish("r2-a0-1")
    world.kill_at = None if kill_after is None else begun + kill_after
    try:
        await world.settle()
    except Killed:
        world.kill_at = None
        await world.settle()
    return len(world.writes) - begun
