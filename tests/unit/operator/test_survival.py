"""Whatever becomes of any one call, the end is the same, nothing is restarted twice, and nobody healthy is touched.

In each of these stories each call to the cluster goes wrong once: the operator is killed before or after it, or it is
refused, or its answer is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import pytest
from tests.unit.operator.world import NAME, NAMESPACE, Killed, World, manifest, template

from fthsdp.coordinator.messages import Exited, Status
from fthsdp_operator.api import KIND, Job
from fthsdp_operator.cluster import ClusterError, Conflict, Manifest
from fthsdp_operator.execute import reconcile
from fthsdp_operator.observed.observe import NodeView, PodView
from fthsdp_operator.rules.actions import Event

Step = Callable[[World], None]


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


def change_the_template(world: World) -> None:
    world.user_changes(template=template())


def keep_checkpoints_and_change_all_at_once(world: World) -> None:
    checkpoint = {"path": "/checkpoints", "everySteps": 10}
    world.user_changes(checkpoint=checkpoint, updatePolicy={"type": "Recreate"})
    change_the_template(world)


STORIES: list[Step] = [
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
    change_the_template,
    keep_checkpoints_and_change_all_at_once,
]


def begin(world: World) -> None:
    """The job has just been created."""


def everything_has_stopped(world: World) -> None:
    for kind, name in list(world.objects):
        if kind == "Pod":
            world.vanish(name)
    world.coordinator = None


def trainers_have_stopped(world: World) -> None:
    for name in world.pods.keys() | {
        key[1] for key, it in world.objects.items() if "deletionTimestamp" in it["metadata"]
    }:
        world.vanish(name)


def resume(world: World) -> None:
    world.user_changes(suspend=False)


def its_time_is_up(world: World) -> None:
    world.now += 100


def _puts_on_a_node(world: World, node: NodeView) -> None:
    """Both pods of replica 2 are there."""
    for index in range(2):
        world.pod(f"r2-a0-{index}")["spec"]["nodeName"] = node.name
    world.node_views[node.name] = node


def their_node_falls_ill(world: World) -> None:
    _puts_on_a_node(world, NodeView(name="node-7", ready="True", conditions=frozenset({("GPUMissing", "True")})))


def their_node_is_lost(world: World) -> None:
    world.user_changes(nodePolicy={"forceDelete": True})
    _puts_on_a_node(world, NodeView(name="node-7", ready="Unknown", not_ready_since=world.now - 60))
    assert world.coordinator is not None
    heard = tuple(it for it in world.coordinator.replicas if it.replica != 2)
    world.coordinator = world.coordinator.model_copy(update={"replicas": heard})


def ask_for_a_budget(world: World) -> None:
    world.user_changes(nodePolicy={"disruptionBudget": "MinReplicas"})


def ask_for_another_one(world: World) -> None:
    world.user_changes(minReplicas=1)


def ask_for_none(world: World) -> None:
    world.user_changes(nodePolicy={})


LONGER = {
    "make_a_budget_and_another_one": [ask_for_a_budget, ask_for_another_one],
    "make_a_budget_and_have_none": [ask_for_a_budget, ask_for_none],
    "leave_an_ill_node": [their_node_falls_ill],
    "leave_a_lost_node_by_force": [their_node_is_lost, its_time_is_up],
    "suspend_and_resume": [suspend, everything_has_stopped, resume],
    "change_all_and_start_again": [keep_checkpoints_and_change_all_at_once, trainers_have_stopped, begin],
    "finish_and_go": [finish, its_time_is_up],
}
CASES = {"first_start": [begin], **{story.__name__: [story] for story in STORIES}, **LONGER}


class Fault(Enum):
    """What becomes of one call."""

    KILLED_BEFORE = "the operator is killed before it"
    KILLED_AFTER = "the operator is killed when it was made"
    CONFLICT = "somebody else has changed the object"
    REFUSED = "the API server does not do it"
    ANSWER_LOST = "it is done, and the answer is lost"


KILLED = (Fault.KILLED_BEFORE, Fault.KILLED_AFTER)
MADE = (Fault.KILLED_AFTER, Fault.ANSWER_LOST)
T = TypeVar("T")


class Shaky:
    """Passes calls on to a world; one of them goes wrong. Implements ``fthsdp_operator.cluster.Cluster``."""

    def __init__(self, world: World, fault: Fault, at: int) -> None:
        self.coordinator_image = world.coordinator_image
        self.calls = 0
        self.struck = False
        """The call that goes wrong was made."""
        self._world = world
        self._fault = fault
        self._at = at

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        return await self._read(lambda: self._world.get_job(namespace, name))

    def known_pods(self, namespace: str, job: str) -> list[PodView]:
        return self._world.known_pods(namespace, job)

    async def list_pods(self, namespace: str, job: str) -> list[PodView]:
        return await self._read(lambda: self._world.list_pods(namespace, job))

    def nodes(self) -> Mapping[str, NodeView]:
        return self._world.nodes()

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return await self._read(lambda: self._world.get(kind, namespace, name))

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        return await self._call(lambda: self._world.create(manifest))

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        await self._call(lambda: self._world.delete(kind, namespace, name, uid=uid, grace_seconds=grace_seconds))

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        return await self._call(
            lambda: self._world.patch_status(namespace, name, status, resource_version=resource_version)
        )

    async def tell_coordinator(self, job: Job, message: Exited) -> None:
        await self._call(lambda: self._world.tell_coordinator(job, message))

    async def coordinator_status(self, job: Job) -> Status | None:
        return await self._read(lambda: self._world.coordinator_status(job))

    async def record_event(self, job: Job, event: Event, now: float) -> None:
        try:
            await self._call(lambda: self._world.record_event(job, event, now))
        except ClusterError:
            return  # as the seam has it: an event that is lost is lost

    async def _read(self, call: Callable[[], Awaitable[T]]) -> T:
        """Of a call that changes nothing, the other faults are those of the one before or after it."""
        goes_wrong = self._fault is Fault.REFUSED or (self._fault in KILLED and self.struck)
        return await (self._call(call) if goes_wrong else call())

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        if self.struck and self._fault in KILLED:
            raise Killed
        self.calls += 1
        if self.calls <= self._at or self.struck:
            return await call()
        self.struck = True
        if self._fault in MADE:
            await call()
        if self._fault in KILLED:
            raise Killed
        raise (Conflict if self._fault is Fault.CONFLICT else ClusterError)(self._fault.value)


async def settle(world: World, cluster: Shaky) -> Shaky:
    """Reconcile until that changes nothing, as the operator's workers would; another one goes on for one that died."""
    for _ in range(40):
        before = len(world.writes)
        try:
            wait = await reconcile(cluster, NAMESPACE, NAME, world.now, last_words=world.last_words)
        except Killed:
            world.last_words.clear()  # they died with it
            cluster = Shaky(world, Fault.REFUSED, at=10**9)
            continue
        except ClusterError:
            continue
        if wait > 0 and len(world.writes) == before:
            return cluster
    raise AssertionError(f"it never settles: {world.writes[-10:]}")


async def play(steps: Sequence[Step], fault: Fault, at: int) -> tuple[World, dict[str, str], bool]:
    """Return the world after a story, the pods that there were before it, and whether a call went wrong in it."""
    world = World(manifest(ttlSecondsAfterFinished=100))
    if steps[0] is not begin:
        await world.train()
    before = world.pods
    world.writes.clear()
    world.events.clear()
    shaky = cluster = Shaky(world, fault, at)
    for step in steps:
        step(world)
        cluster = await settle(world, cluster)
    return world, before, shaky.struck


def picture(world: World) -> object:
    """What counts about the outcome; UIDs are made anew by each test."""
    objects = sorted((kind, name, "deletionTimestamp" in it["metadata"]) for (kind, name), it in world.objects.items())
    if (KIND, NAME) not in world.objects:
        return objects
    status = world.job.status
    entries = [
        (it.index, it.state, it.attempt, it.restarts, it.recent_restarts, it.next_restart_time)
        for it in status.replica_statuses
    ]
    told = world.coordinator.abandoned if world.coordinator else ()
    counts = (status.restarts, status.abandoned_replicas, status.coordinator.starts)
    return status.state, status.ready, counts, entries, objects, told


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_whatever_becomes_of_any_call_the_end_is_the_same(steps: Sequence[Step], fault: Fault) -> None:
    async def check() -> None:
        whole, before, _ = await play(steps, fault, at=10**9)
        untouched = before.items() & whole.pods.items()
        at, struck = 0, True
        while struck:
            world, _, struck = await play(steps, fault, at)
            assert picture(world) == picture(whole), f"call {at}"
            assert untouched <= world.pods.items(), f"call {at}"
            told = Counter((it.reason, it.message) for it in world.events if it.reason != "CallFailed")
            assert told <= Counter((it.reason, it.message) for it in whole.events), f"call {at}"
            at += 1
        assert at > 1

    asyncio.run(check())
