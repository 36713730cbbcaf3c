"""What Prometheus is told of a job's life: how much of it trained, what failed, how long each stage took."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.operator.world import NAME, NAMESPACE, World, manifest

from fthsdp.coordinator.messages import Cause, Verdict
from fthsdp_operator.api import KIND, JobState, ReplicaState, format_time
from fthsdp_operator.cluster import ClusterError, Conflict, Manifest
from fthsdp_operator.observed.observe import NodeView
from fthsdp_operator.process.measure import ROLLS
from fthsdp_operator.process.metrics import Metrics

JOB = {"namespace": NAMESPACE, "job": NAME}


class Counted(World):
    """A world whose looks are counted, second by second."""

    def __init__(self, job: Manifest | None = None) -> None:
        super().__init__(job)
        self.metrics = Metrics()
        self.witness = self.metrics

    async def passes(self, seconds: float) -> None:
        """Time passes, with a look at the end."""
        self.now += seconds
        await self.look()

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def of_job(self, name: str, **labels: str) -> float | None:
        return self.value(name, **JOB, **labels)

    def took(self, stage: str) -> float | None:
        """Seconds that the one recovery spent in a stage; None while that was not measured."""
        count = self.value("fthsdp_recovery_seconds_count", stage=stage)
        assert count in (None, 1.0)
        return self.value("fthsdp_recovery_seconds_sum", stage=stage)


def test_replicas_are_counted_by_state_and_the_job_s_own_state_is_one() -> None:
    async def story() -> None:
        world = Counted(manifest(spares=1))
        await world.train(step=12)
        assert world.of_job("fthsdp_job_replicas", state="Active") == 3
        assert world.of_job("fthsdp_job_replicas", state="Spare") == 1
        assert world.of_job("fthsdp_job_replicas", state="Backoff") == 0
        states = {state: world.of_job("fthsdp_job_state", state=state) for state in JobState}
        assert states == {state: float(state is JobState.RUNNING) for state in JobState}
        assert world.of_job("fthsdp_job_step") == 12

    asyncio.run(story())


def test_how_a_changed_template_stands_is_one_and_who_has_not_got_it_is_counted() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        assert (rolls(world), world.of_job("fthsdp_job_outdated_replicas")) == ({"UpToDate"}, 0)
        world.user_changes(template={"spec": {"containers": [{"name": "train", "image": "y"}]}})
        await world.settle()
        assert (rolls(world), world.of_job("fthsdp_job_outdated_replicas")) == ({"Rolling"}, 2)
        for index in range(2):
            world.vanish(f"r2-a0-{index}")
        world.kubelets_start_everything()
        world.exits("r2-a1-0", 1)
        await world.settle()
        assert (rolls(world), world.of_job("fthsdp_job_outdated_replicas")) == ({"RollStalled"}, 2)
        world.user_changes(suspend=True)
        await world.settle()
        assert (rolls(world), world.of_job("fthsdp_job_outdated_replicas")) == ({"NotRunning"}, 0)

    asyncio.run(story())


def rolls(world: Counted) -> set[str]:
    """The words that are true of a job's roll, of all that there are."""
    values = {word: world.of_job("fthsdp_job_roll", state=word) for word in ROLLS}
    assert None not in values.values()
    return {word for word, value in values.items() if value}


def test_time_is_summed_over_replicas_and_a_missing_one_only_as_desired() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        await world.passes(10)
        assert world.of_job("fthsdp_available_replica_seconds_total") == 30
        world.exits("r2-a0-0", 1)
        await world.passes(5)  # it still counted as active until this look
        await world.passes(20)
        assert world.of_job("fthsdp_available_replica_seconds_total") == 30 + 15 + 40
        assert world.of_job("fthsdp_desired_replica_seconds_total") == 30 + 15 + 60

    asyncio.run(story())


def test_while_the_job_is_paused_nobody_trains() -> None:
    async def story() -> None:
        world = Counted(manifest(minReplicas=3))
        await world.train()
        world.exits("r2-a0-0", 1)
        await world.settle()
        assert world.job.status.state is JobState.PAUSED
        before = world.of_job("fthsdp_available_replica_seconds_total")
        await world.passes(20)
        assert world.of_job("fthsdp_available_replica_seconds_total") == before

    asyncio.run(story())


def test_time_that_nobody_saw_is_not_counted() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        await world.passes(3600)
        assert world.of_job("fthsdp_available_replica_seconds_total") == 0
        assert world.of_job("fthsdp_desired_replica_seconds_total") == 0

    asyncio.run(story())


def test_nodes_that_are_avoided_are_counted_and_who_is_on_them_for_lack_of_others() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        counts = ("fthsdp_job_avoided_nodes", "fthsdp_job_replicas_on_avoided_nodes")
        assert [world.of_job(it) for it in counts] == [0, 0]
        for name in ("r2-a0-0", "r2-a0-1"):
            world.pod(name)["spec"]["nodeName"] = "ill"
        world.node_views["ill"] = NodeView(name="ill", ready="True", conditions=frozenset({("GPUMissing", "True")}))
        await world.settle()
        world.vanish("r2-a0-0")
        world.vanish("r2-a0-1")
        world.kubelets_start_everything()
        await world.passes(1)
        assert [world.of_job(it) for it in counts] == [1, 0]
        world.pod("r2-a1-1")["spec"]["nodeName"] = "ill"
        world.pod("r2-a1-1")["metadata"]["creationTimestamp"] = format_time(world.now)
        await world.passes(1)
        assert [world.of_job(it) for it in counts] == [1, 1]
        world.now += 3600
        world.node_views.clear()
        await world.passes(1)
        assert [world.of_job(it) for it in counts] == [0, 0]

    asyncio.run(story())


def test_a_job_that_does_not_run_avoids_no_nodes() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        for name in ("r2-a0-0", "r2-a0-1"):
            world.pod(name)["spec"]["nodeName"] = "ill"
        world.node_views["ill"] = NodeView(name="ill", ready="True", conditions=frozenset({("GPUMissing", "True")}))
        await world.settle()
        assert world.of_job("fthsdp_job_avoided_nodes") == 1
        world.user_changes(suspend=True)
        await world.settle()
        assert world.of_job("fthsdp_job_avoided_nodes") == 0

    asyncio.run(story())


def test_a_suspended_job_desires_nothing() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        world.user_changes(suspend=True)
        await world.passes(0)
        await world.passes(30)
        assert world.of_job("fthsdp_desired_replica_seconds_total") == 0
        assert world.of_job("fthsdp_job_replicas", state="Suspended") == 3

    asyncio.run(story())


def test_each_stage_of_a_recovery_is_measured_by_what_looks_see() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        world.exits("r2-a0-1", 1)
        await world.passes(2)  # the exit is noticed; the old pods are deleted and the new ones created
        await world.passes(1)  # all old pods are seen to be asked to stop
        assert world.took("detect") == 2
        assert world.took("evict") == 1
        world.kubelet_places("r2-a1-0")
        await world.passes(3)
        assert world.took("schedule") is None
        world.kubelet_places("r2-a1-1")
        await world.passes(4)
        assert world.took("schedule") == 1 + 3 + 4
        world.kubelets_start_everything()
        await world.passes(5)
        assert world.took("start") == 5
        assert world.took("join") is None
        world.everybody_trains()
        await world.passes(6)
        assert world.took("join") == 6
        assert world.value("fthsdp_replica_outage_seconds_sum") == 1 + 3 + 4 + 5 + 6
        await world.passes(7)
        assert world.value("fthsdp_replica_outage_seconds_count") == 1

    asyncio.run(story())


def test_when_a_replica_fell_silent_nobody_knows_so_its_detection_is_not_measured() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        assert world.coordinator is not None
        verdict = Verdict(replica=2, attempt=0, cause=Cause.SILENT, reason="it was silent for 5 s")
        world.coordinator = world.coordinator.model_copy(update={"verdicts": (verdict,)})
        await world.passes(1)
        await world.passes(1)
        assert failures(world) == {("Silent", "RestartReplica"): 1}
        assert (world.took("detect"), world.took("evict")) == (None, 1)

    asyncio.run(story())


def test_backoff_is_part_of_the_outage_and_of_no_stage() -> None:
    async def story() -> None:
        world = Counted(manifest(failurePolicy={"backoff": {"initialSeconds": 40, "maxSeconds": 40}}))
        await world.train()
        world.exits("r2-a0-0", 1)
        await world.passes(0)
        world.kubelets_start_everything()
        world.exits("r2-a1-0", 1)
        await world.passes(10)  # the second failure waits
        assert world.job.status.replica_statuses[2].state is ReplicaState.BACKOFF
        await world.passes(40)
        world.kubelets_start_everything()
        world.everybody_trains()
        await world.passes(2)
        assert world.value("fthsdp_recovery_seconds_sum", stage="schedule") == 2
        assert world.value("fthsdp_replica_outage_seconds_sum") == 10 + 40 + 2
        assert world.value("fthsdp_replica_outage_seconds_count") == 1

    asyncio.run(story())


def test_a_recovery_whose_beginning_nobody_saw_is_not_measured() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        world.exits("r2-a0-0", 1)
        await world.passes(1)
        successor = Counted()
        successor.objects, successor.now = world.objects, world.now
        successor.kubelets_start_everything()
        successor.everybody_trains()
        await successor.passes(1)
        assert successor.job.status.replica_statuses[2].state is ReplicaState.ACTIVE
        assert successor.took("join") is None
        assert successor.value("fthsdp_replica_outage_seconds_count") == 0

    asyncio.run(story())


def failures(world: Counted) -> dict[tuple[str, str], float]:
    found = (family for family in world.metrics.registry.collect() if family.name == "fthsdp_replica_failures")
    return {
        (sample.labels["reason"], sample.labels["action"]): sample.value
        for family in found
        for sample in family.samples
    }


def test_a_failure_is_counted_once_with_its_reason_and_what_was_done() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        world.exits("r1-a0-0", 137, reason="OOMKilled")
        for _ in range(4):
            await world.passes(1)
        assert failures(world) == {("OOMKilled", "RestartReplica"): 1}

    asyncio.run(story())


def test_the_failure_that_ends_the_job_says_so() -> None:
    async def story() -> None:
        world = Counted(manifest(failurePolicy={"perReplica": {"limit": 0}, "onExhausted": "FailJob"}))
        await world.train()
        world.exits("r1-a0-0", 1)
        await world.settle()
        assert failures(world) == {("Error", "FailJob"): 1}
        assert world.of_job("fthsdp_job_state", state="Failed") == 1

    asyncio.run(story())


def test_a_replica_that_is_abandoned_is_counted_as_such_and_not_on_its_way_back() -> None:
    async def story() -> None:
        world = Counted(manifest(failurePolicy={"perReplica": {"limit": 0}}))
        await world.train()
        world.exits("r1-a0-0", 1)
        await world.settle()
        assert failures(world) == {("Error", "AbandonReplica"): 1}
        assert world.of_job("fthsdp_job_replicas", state="Abandoned") == 1
        assert world.value("fthsdp_replica_outage_seconds_count") == 0

    asyncio.run(story())


def test_an_exit_code_that_comes_later_is_no_second_failure() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        world.user_deletes("r0-a0-0")
        await world.passes(1)
        world.exits("r0-a0-0", 143)
        world.vanish("r0-a0-0")
        await world.passes(1)
        assert world.job.status.last_failure == f"r0 {NAME}-r0-a0-0 PodDeleted exit 143"
        assert failures(world) == {("PodDeleted", "RestartReplicaFree"): 1}

    asyncio.run(story())


@pytest.mark.parametrize(
    ("reason", "shown"), [("UnexpectedAdmissionError", "UnexpectedAdmissionError"), ("a b", "Other")]
)
def test_a_reason_that_is_no_word_makes_no_series_of_its_own(reason: str, shown: str) -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        world.pod("r0-a0-0")["status"] |= {"phase": "Failed", "reason": reason}
        await world.passes(1)
        assert {reason for reason, _ in failures(world)} == {shown}

    asyncio.run(story())


class Contested(Counted):
    """Somebody changes the job between our look and our write, once."""

    contested = False

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        if self.contested:
            self.contested = False
            raise Conflict("somebody else was faster")
        return await super().patch_status(namespace, name, status, resource_version=resource_version)


def test_a_plan_whose_status_was_not_written_counts_for_nothing() -> None:
    async def story() -> None:
        world = Contested()
        await world.train()
        world.exits("r1-a0-0", 1)
        world.contested = True
        await world.passes(1)
        assert failures(world) == {}
        await world.passes(1)
        assert failures(world) == {("Error", "RestartReplica"): 1}

    asyncio.run(story())


class Forbidden(Counted):
    """Nothing may be created any more."""

    forbidden = False

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        if self.forbidden:
            raise ClusterError("403 Forbidden: exceeded quota")
        return await super().create(manifest)


def test_a_call_that_fails_after_the_status_was_written_takes_nothing_back() -> None:
    async def story() -> None:
        world = Forbidden()
        await world.train()
        world.exits("r1-a0-0", 1)
        world.forbidden = True
        with pytest.raises(ClusterError):
            await world.passes(1)
        assert failures(world) == {("Error", "RestartReplica"): 1}

    asyncio.run(story())


def shown_jobs(world: Counted) -> set[str]:
    samples = (sample for family in world.metrics.registry.collect() for sample in family.samples)
    return {sample.labels["job"] for sample in samples if "job" in sample.labels}


def test_the_series_of_a_job_that_is_gone_are_gone() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        assert shown_jobs(world) == {NAME}
        world.vanish(NAME, kind=KIND)
        await world.look()
        assert shown_jobs(world) == set()

    asyncio.run(story())


def test_the_series_of_a_job_that_cannot_be_understood_any_more_are_gone() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        world.user_changes(replicas=0)
        await world.look()
        assert shown_jobs(world) == set()

    asyncio.run(story())


def test_no_series_names_a_pod_or_a_node() -> None:
    async def story() -> None:
        world = Counted()
        await world.train()
        world.exits("r1-a0-0", 1)
        await world.passes(1)
        labels = {
            label for family in world.metrics.registry.collect() for sample in family.samples for label in sample.labels
        }
        assert labels == {"namespace", "job", "state", "reason", "action", "stage", "le"}

    asyncio.run(story())
