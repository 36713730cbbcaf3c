"""Events only wake: each leads to a look at the right job, and a failed look is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.operator.reconciling import working
from tests.unit.operator.world import NAME, NAMESPACE, World

from fthsdp.coordinator.messages import Status
from fthsdp_operator import execute
from fthsdp_operator.api import KIND, Job
from fthsdp_operator.cluster import ClusterError, Conflict, Manifest
from fthsdp_operator.observed.observe import PodView, view
from fthsdp_operator.process.handlers import Reconciler

DEADLINE = 10.0


class Watched(World):
    """A world that says when it was looked at, and whose API server may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.failures: list[Exception] = []
        self.conflicts = 0
        self.looked = asyncio.Event()

    def _write(self, what: str) -> None:
        super()._write(what)
        self.looked.set()

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        assert (namespace, name) == (NAMESPACE, NAME)
        if self.failures:
            raise self.failures.pop(0)
        return await super().get_job(namespace, name)

    async def coordinator_status(self, job: Job) -> Status | None:
        self.looks += 1
        self.looked.set()
        return await super().coordinator_status(job)

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        if self.conflicts:
            self.conflicts -= 1
            raise Conflict("somebody else was faster")
        return await super().patch_status(namespace, name, status, resource_version=resource_version)

    async def until(self, holds: Any) -> None:
        """Wait until something holds, looking after each look of the operator."""
        async with asyncio.timeout(DEADLINE):
            while not holds():
                self.looked.clear()
                await self.looked.wait()


def test_a_new_job_is_looked_at() -> None:
    async def story() -> None:
        world = Watched()
        async with working(world) as reconciler:
            reconciler.job_event(world.objects[KIND, NAME], kind="ADDED")
            await world.until(lambda: len(world.pods) == 6)

    asyncio.run(story())


def test_a_job_whose_status_alone_changed_is_not_looked_at() -> None:
    async def story() -> None:
        world = Watched()
        async with working(world) as reconciler:
            reconciler.job_event(world.objects[KIND, NAME], kind="MODIFIED")
            await world.until(lambda: len(world.pods) == 6)
            seen = world.looks
            reconciler.job_event(world.objects[KIND, NAME], kind="MODIFIED")
            for _ in range(5):
                await asyncio.sleep(0)
            assert world.looks == seen

    asyncio.run(story())


def test_pods_that_come_up_are_looked_at_together() -> None:
    async def story() -> None:
        world = Watched()
        async with working(world) as reconciler:
            reconciler.job_event(world.objects[KIND, NAME], kind="ADDED")
            await world.until(lambda: len(world.pods) == 6)
            seen = world.looks
            for _ in range(100):
                reconciler.pods_event((NAMESPACE, NAME), None, True)
                await asyncio.sleep(0)
            assert world.looks == seen
            await world.until(lambda: world.looks > seen)
            assert world.looks == seen + 1

    asyncio.run(story())


async def loses_a_pod(world: Watched, reconciler: Reconciler) -> None:
    """A pod ends when it is deleted: the next attempt comes, and the exit code is known although the pod is gone."""
    gone = world.pod("r2-a0-1")
    world.exits("r2-a0-1", 143)
    del world.objects["Pod", f"{NAME}-r2-a0-1"]
    reconciler.pods_event((NAMESPACE, NAME), view(gone), False)
    await world.until(lambda: "r2-a1-0" in world.pods)
    assert world.job.status.last_failure == f"r2 {NAME}-r2-a0-1 PodDeleted exit 143"


def test_a_deleted_pod_wakes_its_job_and_its_last_words_are_heard() -> None:
    async def story() -> None:
        world = Watched()
        await world.train()
        async with working(world) as reconciler:
            await loses_a_pod(world, reconciler)

    asyncio.run(story())


def test_last_words_survive_a_look_that_failed() -> None:
    async def story() -> None:
        world = Watched()
        await world.train()
        world.failures = [ClusterError("503"), RuntimeError("a mistake of ours")]
        world.conflicts = 1
        async with working(world) as reconciler:
            await loses_a_pod(world, reconciler)

    asyncio.run(story())


def test_a_pod_whose_end_is_told_while_its_job_is_looked_at_is_not_one_without_a_word() -> None:
    class Busy(Watched):
        async def coordinator_status(self, job: Job) -> Status | None:
            if "r2-a0-1" in self.pods:
                self.exits("r2-a0-1", 143)
                reconciler.pods_event((NAMESPACE, NAME), view(self.objects.pop(("Pod", f"{NAME}-r2-a0-1"))), False)
            return await super().coordinator_status(job)

        async def list_pods(self, namespace: str, job: str) -> list[PodView]:
            asked.append(job)
            return await super().list_pods(namespace, job)

        async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
            if kind == "Pod":
                asked.append(name)
            return await super().get(kind, namespace, name)

    async def story() -> None:
        nonlocal reconciler
        trained, world = Watched(), Busy()
        await trained.train()
        world.objects, world.coordinator = trained.objects, trained.coordinator
        async with working(world) as reconciler:
            reconciler.pods_event((NAMESPACE, NAME), None, False)
            await world.until(lambda: "r2-a1-0" in world.pods)
            assert world.job.status.last_failure == f"r2 {NAME}-r2-a0-1 PodDeleted exit 143"
        assert asked == []

    reconciler: Reconciler
    asked: list[str] = []
    asyncio.run(story())


@pytest.mark.parametrize("few", [0, 16], ids=["all are listed", "one is asked for"])
@pytest.mark.parametrize("told_first", [True, False], ids=["told before the answer", "told after the answer"])
def test_how_a_pod_ended_is_known_though_it_ends_while_the_server_is_asked_for_another(
    told_first: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is missing without a word, so the API server is asked; its answer has neither."""
    monkeypatch.setattr(execute, "FEW", few)

    class Asked(Watched):
        ends: PodView | None = None
        """The pod whose end is not told yet."""

        def known_pods(self, namespace: str, job: str) -> list[PodView]:
            known = super().known_pods(namespace, job)
            return known if self.ends is None else [*known, self.ends]

        async def list_pods(self, namespace: str, job: str) -> list[PodView]:
            self.end_another()
            return super().known_pods(namespace, job)

        async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
            if kind == "Pod":
                self.end_another()
            return await super().get(kind, namespace, name)

        def end_another(self) -> None:
            if "r2-a0-1" in self.pods:
                running = view(self.pod("r2-a0-1"))
                self.exits("r2-a0-1", 143)
                ended = view(self.objects.pop(("Pod", f"{NAME}-r2-a0-1")))
                if told_first:
                    tell(ended)
                else:
                    self.ends = running
                    asyncio.get_running_loop().call_later(0.2, tell, ended)

    def tell(ended: PodView | None) -> None:
        world.ends = None
        reconciler.pods_event((NAMESPACE, NAME), ended, False)

    async def story() -> None:
        nonlocal reconciler, world
        trained, world = Watched(), Asked()
        await trained.train()
        world.objects, world.coordinator = trained.objects, trained.coordinator
        world.vanish("r0-a0-0")
        async with working(world) as reconciler:
            reconciler.pods_event((NAMESPACE, NAME), None, False)
            await world.until(lambda: {"r0-a1-0", "r2-a1-0"} <= world.pods.keys())
        failures = {entry.index: entry.last_failure for entry in world.job.status.replica_statuses}
        assert [failures[index] and failures[index].exit_code for index in (0, 2)] == [None, 143]

    reconciler: Reconciler
    world: Asked
    asyncio.run(story())
