"""Jobs whose pods somebody's webhook gives a proxy that never exits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.operator.world import NAME, World, manifest

from fthsdp_operator.api import JobState, ReplicaState, format_time

Manifest = dict[str, Any]
TRAINERS = [f"r{replica}-a0-{index}" for replica in range(3) for index in range(2)]


class Meshed(World):
    """A cluster whose pods have a proxy; a kubelet does not end a pod as long as it runs."""

    def ends(self, name: str, code: int, *, container: str = "train") -> None:
        """The container that counts ends, and its pod runs on."""
        ended = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": format_time(self.now)}}
        proxy = {"name": "istio-proxy", "state": {"running": {}}}
        self.pod(name)["status"]["containerStatuses"] = [proxy, {"name": container, "state": ended}]


def test_a_replica_whose_training_ended_is_restarted_though_the_proxy_runs_on() -> None:
    async def story() -> None:
        world = Meshed()
        await world.train()
        before = world.pods
        world.ends("r1-a0-1", 1)
        await world.look()
        assert {"r1-a1-0", "r1-a1-1"} <= world.pods.keys()
        assert not {"r1-a0-0", "r1-a0-1"} & world.pods.keys()  # the proxy has been told to end
        others = {name: uid for name, uid in before.items() if not name.startswith("r1-")}
        assert others.items() <= world.pods.items()
        failure = world.job.status.replica_statuses[1].last_failure
        assert failure is not None
        assert (failure.container, failure.exit_code, failure.reason) == ("train", 1, "Error")

    asyncio.run(story())


def test_a_job_is_complete_when_training_has_ended_and_its_proxies_are_stopped_then() -> None:
    async def story() -> None:
        world = Meshed(manifest(ttlSecondsAfterFinished=3600))
        await world.train()
        world.everybody_trains(finished=True)
        for name in TRAINERS[:-1]:
            world.ends(name, 0)
        await world.look()
        assert world.job.status.state is not JobState.COMPLETE
        assert world.pods.keys() == set(TRAINERS)  # logs stay while others run
        world.ends(TRAINERS[-1], 0)
        world.ends(f"{NAME}-coordinator", 0, container="coordinator")
        await world.settle()
        assert world.job.status.state is JobState.COMPLETE
        assert {entry.state for entry in world.job.status.replica_statuses} == {ReplicaState.FINISHED}
        assert world.pods == {}
        assert "deletionTimestamp" in world.pod("coordinator")["metadata"]

    asyncio.run(story())


def test_a_coordinator_that_ended_beside_a_proxy_is_replaced_while_the_run_goes_on() -> None:
    async def story() -> None:
        world = Meshed()
        await world.train()
        before = world.pod("coordinator")["metadata"]["uid"]
        world.coordinator = None
        spec = world.pod("coordinator")["spec"]
        spec["restartPolicy"] = "Never"  # as a webhook may leave it
        world.ends(f"{NAME}-coordinator", 1, container="coordinator")
        await world.look()
        world.now += 1
        await world.settle()
        assert world.pod("coordinator")["metadata"]["uid"] != before
        assert world.job.status.restarts == 0

    asyncio.run(story())


def test_an_abandoned_replica_leaves_no_proxy_behind() -> None:
    async def story() -> None:
        world = Meshed(manifest(failurePolicy={"perReplica": {"limit": 1}, "backoff": {"initialSeconds": 0}}))
        await world.train()
        world.ends("r2-a0-0", 1)
        await world.settle()
        world.kubelets_start_everything()
        world.everybody_trains()
        await world.settle()
        world.ends("r2-a1-0", 1)
        await world.settle()
        assert world.job.status.replica_statuses[2].state is ReplicaState.ABANDONED
        assert {name for name in world.pods if name.startswith("r2-")} == set()

    asyncio.run(story())


@pytest.mark.parametrize("code", [1, 137])
def test_a_proxy_that_crashes_takes_nobody_down(code: int) -> None:
    async def story() -> None:
        world = Meshed()
        await world.train()
        ended = {"terminated": {"exitCode": code, "reason": "OOMKilled", "finishedAt": format_time(world.now)}}
        running = {"name": "train", "state": {"running": {}}}
        world.pod("r0-a0-0")["status"]["containerStatuses"] = [{"name": "istio-proxy", "state": ended}, running]
        before = world.pods
        await world.settle()
        assert world.pods == before
        assert world.job.status.restarts == 0

    asyncio.run(story())
