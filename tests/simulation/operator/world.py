"""A cluster in simulated time with one job in it: the operator's real rules, executor and queue, all else is played.

A run is a function of its seed and of the faults that are asked for: it can be replayed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import patch

from tests.simulation.operator.checks import Checks
from tests.simulation.operator.nodes import BAD_IMAGES, Nodes
from tests.simulation.operator.operators import AT_WORK, Operator
from tests.simulation.operator.server import Server, uid_of
from tests.simulation.operator.training import Training
from tests.timeline import Timeline

from fthsdp_operator import execute
from fthsdp_operator.api import (
    API_VERSION,
    ATTEMPT_LABEL,
    JOB_UID_LABEL,
    KIND,
    REPLICA_LABEL,
    Job,
    JobStatus,
    ReplicaStatus,
)
from fthsdp_operator.cluster import Manifest
from fthsdp_operator.manifests.render import config_map_name
from fthsdp_operator.observed.observe import Observed
from fthsdp_operator.rules import plan as rules
from fthsdp_operator.rules.actions import Plan

__all__ = ["World"]

BEGIN = 1_800_000_000.0
"""Unix time at which each run begins."""
NAMESPACE, NAME = "team", "llama"
PATIENCE = 3600.0
"""Seconds in which a job has to come to its end once nothing is in its way any more."""
CLEANING = 400.0
"""Seconds in which all of it has to be gone once it is deleted."""


class World:
    """One job, from its start to when nothing of it is left."""

    def __init__(
        self,
        seed: int,
        *,
        spec: dict[str, Any],
        steps: int,
        poll: float,
        share_of_stills: float = 0.1,
        meshed: bool = False,
    ) -> None:
        """``poll``: seconds between two looks of the operator without an event, instead of ``plan.POLL``.

        ``meshed``: a webhook puts a proxy that never exits into each pod.
        """
        self.seed = seed
        self.meshed = meshed
        self.random = Random(seed)
        self.loop = Timeline()
        self.loop.set_exception_handler(self._broke)
        self.history: list[str] = []
        """What happened, in words."""
        self.server = Server(self)
        self.pods_per_replica: int = spec["podsPerReplica"]
        groups = spec["replicas"] + spec.get("spares", 0) + 2
        self.nodes = Nodes(self, number=groups * self.pods_per_replica // 2 + 2, room=3)
        self.training = Training(self, steps=steps)
        self.checks = Checks(self, share_of_stills=share_of_stills)
        self.operators: list[Operator] = []
        self.happened: Counter[str] = Counter()
        """Faults, by kind."""
        self.mute = False
        """The coordinator does not answer the operator."""
        self.api_down = False
        self.gave_up = False
        """A training script ended with 0 before the last step."""
        self.ends: list[str] = []
        """How the jobs ended that were here."""
        self._poll = poll
        self._blames: dict[tuple[str, tuple[int, int]], list[str]] = {}
        self._error: BaseException | None = None
        self.job_uid = ""
        self.apply(spec)
        self.start_operator()
        self._tick()

    # --- time ---

    @property
    def now(self) -> float:
        """Unix time by the API server's clock."""
        return BEGIN + self.loop.time()

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do this after so many seconds."""
        self.loop.call_later(max(0.0, delay), action, *arguments)

    def note(self, text: str) -> None:
        """Remember this for whoever reads a counterexample."""
        self.history.append(f"{self.loop.time():9.2f}  {text}")

    def run(self, faults: list[tuple[float, Callable[[World], None]]]) -> None:
        """Run to the end, with these faults at their times in seconds; raises Violation."""
        noisy = logging.getLogger("fthsdp_operator")
        listener = _Listener(self)
        noisy.addHandler(listener)
        propagates, noisy.propagate = noisy.propagate, False
        try:
            with patch.object(execute, "plan", _watched), patch.object(rules, "POLL", self._poll):
                self.loop.run_until_complete(self._live(faults))
        finally:
            noisy.removeHandler(listener)
            noisy.propagate = propagates
            self.loop.close()

    async def _live(self, faults: list[tuple[float, Callable[[World], None]]]) -> None:
        try:
            for at, fault in faults:
                await self._until(lambda: False, at - self.loop.time())
                fault(self)
            await self._until(lambda: False, 30.0)
            await self._finish()
        finally:
            for operator in self.operators:
                operator.die()
            await asyncio.gather(*(operator.gone() for operator in self.operators))

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Let time pass until something holds, or for so long."""
        end = self.loop.time() + seconds
        while not holds() and self.loop.time() < end:
            await asyncio.sleep(min(3.0, end - self.loop.time()))
            if self._error is not None:
                raise self._error
            if self.checks.violation is not None:
                raise self.checks.violation

    async def _finish(self) -> None:
        """Nothing is in the way any more: the job comes to its end, and after its deletion there is nothing left."""
        self.heal()
        await self._until(lambda: self._ended() or self.job is None, PATIENCE)
        self.checks.comes_to_an_end(self.job)
        self.ends.append(self.state)
        await self._until(lambda: False, 150.0)
        self.checks.stops_everything(self.job)
        if self.job is not None and self.job["spec"].get("ttlSecondsAfterFinished") is None:
            self.delete_job()
        await self._until(lambda: not self.server.objects, CLEANING)
        self.checks.leaves_nothing()

    def _tick(self) -> None:
        self.training.tick()
        self.after(1.0, self._tick)

    def _broke(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._error = self._error or context.get("exception") or RuntimeError(context["message"])

    # --- the job ---

    @property
    def job(self) -> Manifest | None:
        """The job, if there is one."""
        return self.server.get(KIND, NAME)

    @property
    def state(self) -> str:
        """The job's state in one word."""
        return "gone" if self.job is None else str((self.job.get("status") or {}).get("state", "new"))

    def _ended(self) -> bool:
        return self.job is not None and JobStatus.model_validate(self.job.get("status") or {}).terminal

    def epoch_uid(self) -> str | None:
        """UID of the ConfigMap in which the coordinator keeps what it knows."""
        there = self.server.get("ConfigMap", config_map_name(NAME))
        return None if there is None else uid_of(there)

    def apply(self, spec: dict[str, Any]) -> None:
        """A user creates the job."""
        metadata = {"name": NAME, "namespace": NAMESPACE}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
        self.job_uid = uid_of(self.server.create(manifest))
        self.training.step = 0

    def change(self, **spec: Any) -> None:
        """A user edits the job."""
        if self.job is not None:
            self.note(f"the user sets {spec}")
            self.server.change_job(NAME, **spec)

    def change_template(self, image: str) -> None:
        """A user changes the image of the template."""
        if self.job is not None:
            (container,) = self.job["spec"]["template"]["spec"]["containers"]
            self.change(template={"spec": {"containers": [{**container, "image": image}]}})

    def correct_template(self) -> None:
        """A user corrects a template that does not work."""
        if self.job is not None and self.job["spec"]["template"]["spec"]["containers"][0]["image"] in BAD_IMAGES:
            self.change_template("corrected")

    def delete_job(self, *, foreground: bool = False) -> None:
        """A user deletes the job."""
        if self.job is not None:
            self.note("the user deletes the job")
            if foreground:
                self.server.delete_in_foreground(NAME)
            else:
                self.server.delete(KIND, NAME)

    # --- who is to blame ---

    def blame(self, job: str, who: tuple[int, int], why: str) -> None:
        """Something has happened to an attempt of a replica: whoever restarts it has a reason."""
        self._blames.setdefault((job, who), []).append(why)
        entry = self._restarted_in_place(who)
        if entry is not None:
            self._blames.setdefault((job, (entry.index, entry.attempt)), []).append(why)

    def _restarted_in_place(self, who: tuple[int, int]) -> ReplicaStatus | None:
        """Return the status of a replica whose pods are to run a newer attempt than this one, which is theirs too."""
        for job in self.server.jobs():
            entry = JobStatus.model_validate(job.get("status") or {}).replica(who[0])
            if entry is not None and entry.pods_attempt is not None and entry.pods_attempt <= who[1] < entry.attempt:
                return entry
        return None

    def happened_to(self, pod: Manifest, why: str) -> None:
        """Something has happened to a pod."""
        self.note(f"{pod['metadata']['name']}: {why}")
        self.blame_pod(pod, why)

    def blame_pod(self, pod: Manifest, why: str) -> None:
        """Something has happened to a pod, of which nobody has to read."""
        labels = pod["metadata"]["labels"]
        if REPLICA_LABEL in labels:
            self.blame(labels[JOB_UID_LABEL], (int(labels[REPLICA_LABEL]), int(labels[ATTEMPT_LABEL])), why)

    def blamed(self, job: str, who: tuple[int, int]) -> bool:
        """Whether something has happened to an attempt."""
        return (job, who) in self._blames

    def any_blamed(self) -> bool:
        """Whether something has happened to anybody."""
        return bool(self._blames)

    # --- operators ---

    def start_operator(self) -> None:
        """An operator starts."""
        name = f"operator {chr(ord('A') + len(self.operators) % 26)}"
        self.operators.append(Operator(self, name, skew=self.random.choice([0.0, 0.0, -3.0, 2.0])))

    def alive(self) -> list[Operator]:
        """Operators that run, the oldest first."""
        return [operator for operator in self.operators if not operator.dead]

    def heal(self) -> None:
        """Nothing is in the way any more."""
        self.note("everything is healed")
        self.mute = self.api_down = False
        self.training.hanging_starts = 0
        self.nodes.heal()
        for operator in self.alive():
            operator.dies_in, operator.slow, operator.late = None, 0.0, 0.0
            if operator.deaf:
                operator.hears_again(gap=True)
        if not self.alive():
            self.start_operator()
        self.correct_template()
        if self.job is not None and self.job["spec"].get("suspend"):
            self.change(suspend=False)


def _watched(job: Job, observed: Observed, now: float) -> Plan:
    operator = AT_WORK.get()
    checks = operator.world.checks
    try:
        todo = rules.plan(job, observed, now)
    except Exception as error:
        checks.fail(f"{operator.name} cannot plan: {error!r}")
        raise
    checks.planned(operator, job, observed, now, todo)
    return todo


class _Listener(logging.Handler):
    """A reconcile that breaks is an error; calls that fail are not."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and self._world.checks.violation is None:
            self._world._error = self._world._error or error
