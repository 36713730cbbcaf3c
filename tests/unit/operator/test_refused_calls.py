"""What an API server refuses is said in the job, tried again ever more rarely, and over when it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.operator.reconciling import working
from tests.unit.operator.world import NAME, NAMESPACE, World, manifest

from fthsdp_operator.cluster import Manifest, NamespaceEnding, Refused, Unanswered
from fthsdp_operator.execute import NAMESPACE_ENDING

DEADLINE = 10.0
WORDS = 'pods "llama-r1-a0-0" is forbidden: exceeded quota: team, requested: pods=1, used: pods=2, limited: pods=2'


class Strict(World):
    """An API server that takes only so many pods."""

    def __init__(self, *, room: int, error: Exception) -> None:
        super().__init__()
        self.room = room
        self.error = error
        self.refusals = 0
        self.changed = asyncio.Event()

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        if manifest["kind"] == "Pod" and len(self.pods) >= self.room and manifest["metadata"]["name"] not in self.pods:
            self.refusals += 1
            self.changed.set()
            raise self.error
        return await super().create(manifest)

    def _write(self, what: str) -> None:
        super()._write(what)
        self.changed.set()

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(DEADLINE):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    def stalled(self) -> tuple[str, str, str]:
        known = [it for it in self.job.status.conditions if it.type == "Stalled"]
        return (known[0].status, known[0].reason, known[0].message) if known else ("", "", "")


def test_the_job_says_what_is_refused_and_that_it_is_over() -> None:
    async def story() -> None:
        world = Strict(room=2, error=Refused(WORDS))
        async with working(world) as reconciler:
            reconciler.queue.add((NAMESPACE, NAME))
            await world.until(lambda: world.stalled() == ("True", "QuotaExceeded", WORDS))
            world.room = 100
            await world.until(lambda: world.stalled() == ("False", "NobodyWaits", ""))
        assert len(world.pods) == 6
        assert "CallFailed" in {event.reason for event in world.events}

    asyncio.run(story())


def test_what_is_refused_is_tried_ever_more_rarely_and_writes_nothing_new() -> None:
    async def story() -> None:
        world = Strict(room=0, error=Refused("maximum cpu usage per Pod is 4, but limit is 96"))
        async with working(world) as reconciler:
            reconciler.queue.add((NAMESPACE, NAME))
            await world.until(lambda: world.stalled()[0] == "True")
            written = world.writes.count("status")
            before = world.refusals
            await world.until(lambda: world.refusals >= before + 3)
        assert world.stalled()[1] == "CallRefused"
        assert world.writes.count("status") == written
        waits = [reconciler.queue.failed((NAMESPACE, NAME)) for _ in range(20)]
        assert waits == sorted(waits)
        assert waits[-1] > 10 * waits[0]

    asyncio.run(story())


def test_after_a_refusal_no_further_pod_is_tried_in_that_look() -> None:
    async def story() -> None:
        world = Strict(room=2, error=Refused(WORDS))
        with pytest.raises(Refused):
            await world.look()
        assert (len(world.pods), world.refusals) == (2, 1)  # and not one for each of a thousand pods

    asyncio.run(story())


class Guarded(World):
    """Somebody's admission webhook lets a pod not be deleted."""

    def __init__(self, job: Manifest, *, guarded: str, error: Exception) -> None:
        super().__init__(job)
        self.guarded = guarded
        self.error = error

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        if name == self.guarded:
            raise self.error
        await super().delete(kind, namespace, name, uid=uid, grace_seconds=grace_seconds)


@pytest.mark.parametrize(
    ("error", "come_back"), [(Refused("denied by a webhook"), True), (Unanswered("no API server"), False)]
)
def test_a_pod_that_may_not_be_deleted_keeps_nobody_from_coming_back(error: Exception, come_back: bool) -> None:
    async def story() -> None:
        world = Guarded(manifest(replicas=4), guarded=f"{NAME}-r0-a0-1", error=error)
        await world.train()
        for lost in ("r0-a0-0", "r1-a0-0", "r2-a0-1"):
            world.exits(lost, 1)
        world.vanish(f"{NAME}-coordinator")
        with pytest.raises(type(error)):
            await world.look()
        new = {f"r{replica}-a1-{index}" for replica in range(3) for index in range(2)}
        assert (new <= world.pods.keys()) is come_back
        assert (("Pod", f"{NAME}-coordinator") in world.objects) is come_back

    asyncio.run(story())


def test_a_namespace_that_is_being_deleted_is_left_in_peace() -> None:
    async def story() -> None:
        world = Strict(room=0, error=NamespaceEnding("team is being terminated"))
        assert await world.look() == NAMESPACE_ENDING
        assert [event for event in world.events if event.warning] == []
        assert world.stalled()[0] == "False"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"processesPerPod": 4}, "processesPerPod is 4, and the first container has 8 GPUs"),
        ({"host": True, "processesPerPod": 8}, "hostNetwork and dnsPolicy Default"),
    ],
)
def test_what_is_most_likely_a_mistake_is_said_once(spec: dict[str, Any], words: str) -> None:
    async def story() -> None:
        given = dict(spec)
        pod: dict[str, Any] = {"hostNetwork": True, "dnsPolicy": "Default"} if given.pop("host", False) else {}
        gpus = {"limits": {"nvidia.com/gpu": 8}}
        pod["containers"] = [{"name": "train", "image": "x", "resources": gpus}]
        world = World(manifest(template={"spec": pod}, **given))

        def warnings() -> list[str]:
            return [event.message for event in world.events if event.reason == "Questionable"]

        await world.settle()
        assert [words in message for message in warnings()] == [True]
        await world.look()
        assert len(warnings()) == 1
        world.user_changes(replicas=4)
        await world.settle()
        assert len(warnings()) == 2

    asyncio.run(story())


def test_a_job_that_is_as_it_should_be_warns_of_nothing() -> None:
    async def story() -> None:
        world = World()
        await world.train()
        assert [event for event in world.events if event.warning] == []

    asyncio.run(story())
