"""The real operator, apart from kopf: its queue and its executor, at a seam where calls take time, fail, are late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from tests.shelf import Shelf
from tests.simulation.operator.server import name_of, uid_of

from fthsdp.coordinator.messages import Exited, Status
from fthsdp_operator.api import KIND, Job
from fthsdp_operator.cluster import ClusterError, Conflict, Manifest
from fthsdp_operator.informers.sight import EVERYWHERE, Sight
from fthsdp_operator.observed.observe import NodeView, PodView, view
from fthsdp_operator.process.handlers import Reconciler
from fthsdp_operator.rules.actions import Event, Plan

if TYPE_CHECKING:
    from tests.simulation.operator.world import World

__all__ = ["AT_WORK", "Operator"]

AT_WORK: ContextVar[Operator] = ContextVar("AT_WORK")
"""The operator that runs this coroutine."""

T = TypeVar("T")
LAG = 0.01
"""Seconds that an event takes to come."""


class Operator:
    """One process of the operator. Implements ``fthsdp_operator.cluster.Cluster`` for itself."""

    coordinator_image = "fthsdp:simulated"

    def __init__(self, world: World, name: str, *, skew: float) -> None:
        """``skew``: seconds by which its clock is ahead of the API server's."""
        self.name = name
        self.skew = skew
        self.dead = False
        self.deaf = False
        """Its watches are broken, and nobody has noticed."""
        self.slow = 0.0
        """Seconds that a call may take longer than usual."""
        self.late = 0.0
        """Seconds by which its watches are late beyond the usual."""
        self.dies_in: int | None = None
        """So many more calls that change something, and it dies before the next one."""
        self.job: Job | None = None
        """The job for which its newest plan was made."""
        self.todo: Plan | None = None
        self.saw: frozenset[str] = frozenset()
        """UIDs of the pods for which it was made."""
        self.knows_whole: frozenset[tuple[str, int, int]] = frozenset()
        """Attempts all of whose pods had been seen when it last read or wrote the job: its UID, replica and attempt."""
        self.looks: list[float] = []
        """Times of its newest plans."""
        self.world = world
        self._reconciler = Reconciler(self, clock=lambda: world.now + skew)
        self._shelf = Shelf(lag=lambda: LAG + self.late)
        self._sight = Sight(pods={EVERYWHERE: self._shelf}, clock=world.loop.time, chance=world.random.random)
        self._sight.listen(self._reconciler.pods_event)
        self._shelf.restore(*world.server.pods(), version=world.server.version)
        self._tasks = [world.loop.create_task(it) for it in (self._sight.follow(), self._work())]
        world.server.watchers.append(self._watch)
        self._list()
        world.note(f"{name} starts")

    async def _work(self) -> None:
        AT_WORK.set(self)
        await self._sight.settled()
        await self._reconciler.work()

    def die(self) -> None:
        """It ends here, whatever it was doing."""
        if not self.dead:
            self.world.note(f"{self.name} dies")
            self.dead = True
            self.world.server.watchers.remove(self._watch)
            for task in self._tasks:
                self.world.loop.call_soon(task.cancel)

    async def gone(self) -> None:
        """Wait until nothing of it is left."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- watches ---

    def hears_no_more(self) -> None:
        """Its connections stay open, and nothing comes on them."""
        self.deaf = self._shelf.frozen = True

    def hears_again(self, *, gap: bool) -> None:
        """Its watches begin anew: where they stopped, or with a list, if the server knows no more what has happened.

        Of jobs it hears what is there, and nothing about what went meanwhile.
        """
        self.deaf = self._shelf.frozen = False
        if self.dead:
            return
        if gap:
            self._shelf.compact()
        else:
            self._shelf.cut()
        self._list()

    def _list(self) -> None:
        for thing in list(self.world.server.jobs()):
            self._later(None, thing)

    def _watch(self, event: str, thing: Manifest) -> None:
        if thing["kind"] == "Pod":
            self._shelf.write(event, thing)
        elif not self.deaf:
            self._later(event, thing)

    def _later(self, event: str | None, job: Manifest) -> None:
        self.world.after(LAG + self.late, self._hear, event, job)

    def _hear(self, event: str | None, job: Manifest) -> None:
        if not self.dead:
            self._reconciler.job_event(job, kind=event)

    # --- the seam ---

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        def act() -> Manifest | None:
            self.knows_whole = self.world.checks.whole()
            return self.world.server.get(KIND, name)

        return await self._call(act)

    def known_pods(self, namespace: str, job: str) -> Collection[PodView]:
        return self._sight.pods(namespace, job)

    async def list_pods(self, namespace: str, job: str) -> Collection[PodView]:
        pods = await self._call(lambda: self.world.server.pods(job))
        for pod in pods:
            self._sight.put(pod)
        return [seen for seen in map(view, pods) if seen is not None]

    def nodes(self) -> Mapping[str, NodeView]:
        return {name: node.view() for name, node in self.world.nodes.all.items()}

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        found = await self._call(lambda: self.world.server.get(kind, name))
        if found is not None and kind == "Pod":
            self._sight.put(found)
        return found

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        def act() -> Manifest:
            self.world.checks.creates(self, manifest)
            made = self.world.server.create(manifest)
            self.world.note(f"{self.name} creates {made['kind']} {name_of(made)}")
            if made["kind"] == "Pod":
                self.world.nodes.created(made)
            return made

        made = await self._call(act, writes=True)
        if made["kind"] == "Pod":
            self._sight.put(made)
        return made

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        def act() -> Manifest | None:
            there = self.world.server.get(kind, name)
            if there is not None and there["metadata"]["uid"] == uid:
                self.world.checks.deletes(self, there, force=grace_seconds == 0)
                self.world.note(f"{self.name} deletes {kind} {name}")
                self.world.server.delete(kind, name, uid=uid, grace=grace_seconds)
            return self.world.server.get(kind, name)

        left = await self._call(act, writes=True)
        if kind == "Pod" and left is not None and uid_of(left) == uid:
            self._sight.put(left)
        elif kind == "Pod":
            self._sight.forget(namespace, uid)

    async def label_pod(self, namespace: str, name: str, labels: Mapping[str, str], *, uid: str) -> None:
        def act() -> None:
            there = self.world.server.get("Pod", name)
            if there is not None and there["metadata"]["uid"] == uid:
                self.world.checks.labels(self, there, labels)
                self.world.note(f"{self.name} labels Pod {name}: {', '.join(labels.values())}")
                whole = {**there["metadata"]["labels"], **labels}
                self.world.nodes.labelled(self.world.server.change(there, metadata={"labels": whole}))

        await self._call(act, writes=True)

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        def act() -> Manifest:
            before = self.world.server.get(KIND, name)
            try:
                after = self.world.server.patch_status(name, status, version=resource_version)
            except Conflict:
                self.world.note(f"{self.name} comes too late with its status")
                raise
            self.world.checks.writes_status(self, before or {}, after)
            self.knows_whole = self.world.checks.whole()
            return after

        return await self._call(act, writes=True)

    async def tell_coordinator(self, job: Job, message: Exited) -> None:
        def act() -> None:
            there = self.world.training.reached()
            if there is not None and there.process.job == job.metadata.uid and not self.world.mute:
                self.world.checks.tells(self, job, message)
                self.world.note(f"{self.name} tells of replica {message.replica} attempt {message.attempt}")
                there.exited(message)

        await self._call(act, writes=True, fails=False)

    async def coordinator_status(self, job: Job) -> Status | None:
        def act() -> Status | None:
            there = self.world.training.reached()
            right = there is not None and there.process.job == job.metadata.uid and not self.world.mute
            return there.status() if there is not None and right else None

        return await self._call(act, fails=False)

    async def record_event(self, job: Job, event: Event, now: float) -> None:
        if self.dead:
            raise asyncio.CancelledError
        self.world.note(f"{self.name} says {event.reason}: {event.message}")

    async def _call(self, act: Callable[[], T], *, writes: bool = False, fails: bool = True) -> T:
        await self._travel()
        if writes and self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                self.die()
        if self.dead:
            raise asyncio.CancelledError
        fate = self.world.random.random() if fails and self.world.api_down else 1.0
        if fate < 0.4:
            raise ClusterError("the API server does not answer")
        result = act()
        await self._travel()
        if fate < 0.7:
            raise ClusterError("the answer was lost")
        return result

    async def _travel(self) -> None:
        random = self.world.random
        await asyncio.sleep(random.uniform(0.0005, 0.01) + (random.uniform(0.0, self.slow) if self.slow else 0.0))
        if self.dead:
            raise asyncio.CancelledError
