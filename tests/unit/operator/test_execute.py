"""A plan is carried out only after its status was written, and what fails is said and tried again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.unit.operator.world import NAME, NAMESPACE, World, manifest, template

from fthsdp_operator import execute
from fthsdp_operator.api import JOB_UID_LABEL, KIND, ReplicaState
from fthsdp_operator.cluster import ClusterError, Conflict, Manifest
from fthsdp_operator.execute import GLANCE, JOB_KNOWN, Memory, reconcile
from fthsdp_operator.observed.observe import PodView
from fthsdp_operator.rules import in_place
from fthsdp_operator.rules.plan import LONGEST_POLL, POLL


class Quota(World):
    """A namespace in which no more pods may be created."""

    quota = 2

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        if manifest["kind"] == "Pod" and len(self.pods) >= self.quota:
            raise ClusterError(f"403 Forbidden: exceeded quota: pods={self.quota}")
        return await super().create(manifest)


class Contested(World):
    """Somebody changes the job between our look and our write."""

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        raise Conflict("somebody else was faster")


def test_nothing_is_done_when_the_status_could_not_be_written() -> None:
    async def story() -> None:
        world = Contested()
        assert await world.look() == 0
        assert list(world.objects) == [(KIND, NAME)]
        assert world.events == []

    asyncio.run(story())


def test_a_job_that_is_gone_is_forgotten() -> None:
    async def story() -> None:
        world = World()
        world.vanish(NAME, kind=KIND)
        assert await world.look() == math.inf
        assert world.writes == []

    asyncio.run(story())


def test_a_call_that_fails_is_told_and_the_others_of_its_kind_are_made() -> None:
    async def story() -> None:
        world = Quota()
        with pytest.raises(ClusterError, match="exceeded quota"):
            await world.look()
        assert [(event.reason, event.message) for event in world.events] == [
            ("CallFailed", "403 Forbidden: exceeded quota: pods=2")
        ]
        assert len(world.pods) == 2
        assert world.job.status.restarts == 0

    asyncio.run(story())


def test_it_goes_on_when_calls_succeed_again() -> None:
    async def story() -> None:
        world = Quota()
        with pytest.raises(ClusterError):
            await world.look()
        free = World()
        free.objects = world.objects
        await free.settle()
        assert len(free.pods) == 6

    asyncio.run(story())


@pytest.mark.parametrize("resources", ["large", {"limits": ["nvidia.com/gpu"]}])
def test_a_template_of_which_no_plan_can_be_made_is_said_in_the_job_and_what_runs_is_not_touched(
    resources: Any,
) -> None:
    async def story() -> None:
        world = World()
        await world.train()
        before = world.pods
        wrong = template("y")
        wrong["spec"]["containers"][0]["resources"] = resources
        world.user_changes(template=wrong)
        for _ in range(2):
            world.writes.clear()
            with pytest.raises((AttributeError, TypeError)):
                await world.look()
        accepted = world.condition("Accepted")
        assert (accepted.status, accepted.reason) == ("False", "InvalidSpec")
        assert "spec.template" in accepted.message
        assert (world.writes, world.pods) == ([], before)
        world.user_changes(template=template("y"))
        await world.look()
        assert world.condition("Accepted").status == "True"

    asyncio.run(story())


def test_no_pod_is_deleted_for_what_a_job_said_before_another_operator_took_over() -> None:
    async def story() -> None:
        world, memory = World(), Memory()
        await world.train()
        world.user_changes(suspend=True)
        for _ in range(3):
            await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
        world.the_deleted_vanish()
        await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
        world.user_changes(suspend=False)  # and our watch does not tell
        await world.train()  # another operator looks after it
        before = world.pods
        for _ in range(3):
            world.now += 1
            await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
        assert len(before) == 6
        assert world.pods == before
        assert not [name for name in before if "deletionTimestamp" in world.pod(name)["metadata"]]

    asyncio.run(story())


# --- what is known may be late ----------------------------------------------------------------------------------------


class Late(Quota):
    """What is known of the pods is what was there when it was told last."""

    quota = 1000

    def __init__(self, job: Manifest | None = None) -> None:
        super().__init__(job)
        self.heard: list[PodView] | None = None
        self.asked: list[str] = []

    def tell(self) -> None:
        """Nothing is told from now on; what is there is known."""
        self.heard = super().known_pods(NAMESPACE, NAME)

    def known_pods(self, namespace: str, job: str) -> list[PodView]:
        return super().known_pods(namespace, job) if self.heard is None else self.heard

    async def list_pods(self, namespace: str, job: str) -> list[PodView]:
        self.asked.append("pods")
        return super().known_pods(namespace, job)

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        self.asked.append(kind)
        return await super().get(kind, namespace, name)

    @property
    def asked_for_pods(self) -> int:
        return self.asked.count("pods") + self.asked.count("Pod")


@pytest.fixture(params=[0, 16], ids=["all at once", "one by one"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to how many pods that are missing are asked for one by one."""
    monkeypatch.setattr(execute, "FEW", request.param)


@pytest.mark.usefixtures("few")
def test_pods_that_another_operator_saw_and_that_nobody_told_us_of_are_not_taken_for_deleted() -> None:
    async def story() -> None:
        world = Late()
        world.tell()
        world.heard, late = None, world.heard  # another operator knows of all pods
        await world.train()
        world.heard = late
        before = world.pods
        await world.settle()
        assert world.asked_for_pods
        assert world.pods == before
        assert world.job.status.restarts == 0

    asyncio.run(story())


@pytest.mark.usefixtures("few")
def test_a_pod_that_is_gone_without_a_word_is_a_failure_once_the_server_says_so() -> None:
    async def story() -> None:
        world = Late()
        await world.train()
        world.vanish("r2-a0-1")
        world.last_words.clear()
        world.tell()
        world.asked.clear()
        await world.look()
        assert world.asked_for_pods == 1
        assert world.job.status.restarts == 1

    asyncio.run(story())


@pytest.mark.usefixtures("few")
def test_while_a_coordinator_waits_for_its_restart_the_server_is_asked_for_it_once() -> None:
    async def story() -> None:
        world, memory = Late(manifest(failurePolicy={"backoff": {"initialSeconds": 60}})), Memory()
        await world.train()
        world.vanish("coordinator")
        await world.look()  # its first restart does not wait
        await world.settle()
        world.vanish("coordinator")
        world.last_words.clear()
        world.asked.clear()
        for _ in range(10):
            world.now += 2
            await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
        assert ("Pod", f"{NAME}-coordinator") not in world.objects
        assert world.asked_for_pods == 1
        world.now += 60
        await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
        assert world.job.status.coordinator.starts == 3
        assert world.asked_for_pods == 1

    asyncio.run(story())


@pytest.mark.usefixtures("few")
def test_a_pod_that_is_missing_again_after_it_was_there_is_asked_for_again() -> None:
    async def story() -> None:
        world, memory = Late(manifest(failurePolicy={"backoff": {"initialSeconds": 0}})), Memory()
        await world.train()
        for asked in (1, 2, 3):
            world.vanish("coordinator")
            world.last_words.clear()
            for _ in range(4):
                await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
            assert ("Pod", f"{NAME}-coordinator") in world.objects
            assert world.asked_for_pods == asked

    asyncio.run(story())


def test_the_server_is_asked_for_no_pods_while_all_of_them_are_known_or_their_end_was_told() -> None:
    async def story() -> None:
        world = Late()
        await world.train()
        world.vanish("r2-a0-1")
        await world.look()
        assert world.job.status.restarts == 1
        assert not world.asked_for_pods

    asyncio.run(story())


def test_a_pod_that_exists_and_is_not_known_yet_is_looked_at_and_not_complained_about() -> None:
    async def story() -> None:
        world = Late()
        await world.look()
        world.heard = []
        world.asked.clear()
        await world.look()
        assert world.asked.count("Pod") == 7
        assert [event.reason for event in world.events if event.warning] == []

    asyncio.run(story())


def test_a_pod_of_somebody_else_that_has_a_name_of_ours_is_named() -> None:
    async def story() -> None:
        world = World()
        world.objects["Pod", "llama-r1-a0-0"] = {
            "kind": "Pod",
            "metadata": {"name": "llama-r1-a0-0", "namespace": NAMESPACE, "uid": "a user's"},
            "status": {"phase": "Running"},
        }
        words = "Pod llama-r1-a0-0 is there already and not of this job: delete it, or give the job another name"
        with pytest.raises(ClusterError, match=words):
            await world.look()
        assert [event.message for event in world.events] == [words]
        world.vanish("llama-r1-a0-0")
        await world.settle()
        assert len(world.pods) == 6

    asyncio.run(story())


def test_nothing_is_created_under_a_name_that_a_pod_of_an_earlier_job_still_has() -> None:
    async def story() -> None:
        earlier = World()
        await earlier.settle()
        world = World()
        world.objects |= {name: it for name, it in earlier.objects.items() if name[0] == "Pod"}
        for it in world.objects.values():
            if it["kind"] == "Pod":
                it["metadata"]["labels"][JOB_UID_LABEL] = "an earlier one"
        await world.settle()
        assert [write for write in world.writes if write.startswith("create Pod")] == []
        world.vanish("r2-a0-1")
        await world.settle()
        assert [write for write in world.writes if write.startswith("create Pod")] == ["create Pod llama-r2-a0-1"]
        assert world.job.status.restarts == 0

    asyncio.run(story())


def test_what_pods_lean_on_is_looked_for_again_after_some_minutes_and_when_a_call_has_failed() -> None:
    async def story() -> None:
        world, memory = Late(), Memory()

        async def questions() -> list[str]:
            world.asked.clear()
            await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
            return world.asked

        assert "Service" in await questions()
        assert "Service" in await questions()  # it was not there before
        assert await questions() == []
        world.now += 301
        assert "Service" in await questions()
        world.vanish(NAME, kind="Service")
        assert await questions() == []
        world.quota = 0
        world.vanish("r2-a0-1")
        world.kubelets_start_everything()
        with pytest.raises(ClusterError, match="quota"):
            await questions()
        world.quota = 1000
        assert "Service" in await questions()
        assert ("Service", NAME) in world.objects

    asyncio.run(story())


# --- while thousands of pods are created ------------------------------------------------------------------------------


class Slow(World):
    """A world in which it takes long to create pods, and something happens when half of them are there."""

    def __init__(self, happens: Callable[[World, Memory], None]) -> None:
        super().__init__(manifest(podsPerReplica=200))
        self.memory = Memory()
        self._happens = happens

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        made = await super().create(manifest)
        if len(self.pods) == 300 and self.pod("r1-a0-99") is made:
            self._happens(self, self.memory)
        await asyncio.sleep(GLANCE / 2)  # so that at least two glances follow what happens
        return made


def a_pod_exits(world: World, memory: Memory) -> None:
    world.exits("r0-a0-0", 1)


def a_pod_is_deleted(world: World, memory: Memory) -> None:
    world.vanish("r0-a0-0")


def the_coordinator_is_lost(world: World, memory: Memory) -> None:
    world.vanish("coordinator")


def the_user_suspends_the_job(world: World, memory: Memory) -> None:
    world.user_changes(suspend=True)
    memory.told(world.objects[KIND, NAME])


def nothing(world: World, memory: Memory) -> None:
    """All goes as planned."""


@pytest.mark.parametrize(
    ("happens", "goes_on"),
    [
        (a_pod_exits, False),
        (a_pod_is_deleted, False),
        (the_coordinator_is_lost, False),
        (the_user_suspends_the_job, False),
        (nothing, True),
    ],
)
def test_what_happens_while_pods_are_created_does_not_wait_until_all_are(
    happens: Callable[[World, Memory], None], goes_on: bool
) -> None:
    async def story() -> None:
        world = Slow(happens)
        wait = await reconcile(world, NAMESPACE, NAME, world.now, memory=world.memory)
        assert (wait > 0) is goes_on
        assert (len(world.pods) == 600) is goes_on

    asyncio.run(story())


# --- a job is not read anew for every look ----------------------------------------------------------------------------


class Read(World):
    """A world that counts how often the job is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.memory = Memory()

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        self.reads += 1
        return await super().get_job(namespace, name)

    async def looks(self, times: int = 1) -> int:
        """Look so often, and return how often the job was read for that."""
        before = self.reads
        for _ in range(times):
            await reconcile(self, NAMESPACE, NAME, self.now, memory=self.memory, last_words=self.last_words)
        return self.reads - before


def test_a_job_is_read_once_for_many_looks_but_not_for_ever() -> None:
    async def story() -> None:
        world = Read()
        assert await world.looks(5) == 1
        assert [entry.state for entry in world.job.status.replica_statuses] == [ReplicaState.STARTING] * 3
        world.exits("r2-a0-1", 1)
        assert await world.looks(5) == 0
        assert world.job.status.restarts == 1
        world.now += JOB_KNOWN
        assert await world.looks(5) == 1

    asyncio.run(story())


def test_a_job_is_read_anew_when_the_watch_tells_of_another_version() -> None:
    async def story() -> None:
        world = Read()
        await world.looks()
        world.memory.told(world.objects[KIND, NAME])
        assert await world.looks() == 0  # it is the one that we have written
        world.user_changes(suspend=True)
        world.memory.told(world.objects[KIND, NAME])
        assert await world.looks() == 1
        assert world.pods == {}

    asyncio.run(story())


def test_an_answer_that_is_older_than_what_the_watch_told_is_not_relied_on() -> None:
    class Overtaken(Read):
        async def patch_status(self, *some: Any, **options: Any) -> Manifest:
            answer = await super().patch_status(*some, **options)
            self.user_changes(suspend=True)
            self.memory.told(self.objects[KIND, NAME])
            return answer

    async def story() -> None:
        world = Overtaken()
        await world.looks()
        assert await world.looks() == 1

    asyncio.run(story())


def test_a_job_that_was_changed_and_that_nobody_told_us_of_is_read_anew_and_nothing_done_for_the_old_one() -> None:
    async def story() -> None:
        world = Read()
        await world.looks(2)
        world.kubelets_start_everything()
        await world.looks(2)
        world.user_changes(replicas=4)
        world.exits("r2-a0-1", 1)
        world.writes.clear()
        assert await world.looks() == 0
        assert world.writes == ["status"]  # which was refused
        assert await world.looks() == 1
        assert world.job.status.restarts == 1

    asyncio.run(story())


def test_after_a_call_that_failed_a_job_is_read_anew() -> None:
    class Broken(Read):
        fails = False

        async def create(self, manifest: Mapping[str, Any]) -> Manifest:
            if self.fails:
                raise ClusterError("503")
            return await super().create(manifest)

    async def story() -> None:
        world = Broken()
        world.fails = True
        with pytest.raises(ClusterError):
            await world.looks()
        world.fails = False
        assert await world.looks() == 1

    asyncio.run(story())


def test_a_job_that_is_gone_is_forgotten_and_one_of_its_name_read() -> None:
    async def story() -> None:
        world = Read()
        await world.looks()
        there = world.objects.pop((KIND, NAME))
        world.memory.told({"metadata": there["metadata"] | {"resourceVersion": "1000"}})
        assert await world.looks() == 1
        world.objects[KIND, NAME] = manifest()  # whose versions are small here
        assert await world.looks() == 1
        assert await world.looks() == 0

    asyncio.run(story())


def test_what_is_known_of_a_job_is_not_taken_for_that_of_the_next_one_of_its_name() -> None:
    memory, names = Memory(), frozenset({("Service", NAME)})
    job = World().job
    memory.learn(job, names, 0.0)
    other = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "job-2"})})
    assert memory.knows(job, names, 1.0)
    assert not memory.knows(other, names, 1.0)
    assert not memory.knows(job, names | {("Secret", NAME)}, 1.0)
    memory.forget((NAMESPACE, NAME))
    assert not memory.knows(job, names, 1.0)


def test_a_replica_of_many_pods_is_replaced_with_two_calls_for_each_and_a_few_for_all() -> None:
    async def story() -> None:
        world, memory = Late(manifest(podsPerReplica=100)), Memory()
        await world.train()
        await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
        world.exits("r2-a0-7", 1)
        world.writes.clear()
        world.asked.clear()
        world.events.clear()
        for _ in range(5):
            await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
        calls = [*world.asked, *world.writes, *world.events]
        assert len([write for write in world.writes if write.startswith("create Pod")]) == 100
        assert len(calls) <= 2.2 * 100

    asyncio.run(story())


def test_nothing_is_done_for_a_job_whose_pods_are_not_known_yet() -> None:
    class Blind(World):
        def known_pods(self, namespace: str, job: str) -> list[PodView]:
            raise ClusterError("not known yet")

    async def story() -> None:
        world = Blind()
        with pytest.raises(ClusterError, match="not known yet"):
            await world.look()
        assert world.writes == []
        assert world.events == []

    asyncio.run(story())


# --- who does not answer is asked ever more rarely -------------------------------------------------------------------


async def looks(world: World, memory: Memory, *, seconds: float) -> list[float]:
    """Look whenever the plan wants to for so long; return how long each of them was waited for."""
    waits, end = [], world.now + seconds
    while world.now < end:
        waits.append(await reconcile(world, NAMESPACE, NAME, world.now, memory=memory))
        world.now += waits[-1]
    return waits


def test_a_coordinator_that_is_silent_is_asked_ever_more_rarely_until_it_answers() -> None:
    async def story() -> None:
        world, memory = World(), Memory()
        await world.train()
        answers = world.coordinator
        assert set(await looks(world, memory, seconds=100)) == {POLL}
        world.coordinator = None
        silent = await looks(world, memory, seconds=300)
        assert silent == sorted(silent)
        assert (silent[0], silent[-1]) == (POLL, LONGEST_POLL)
        world.coordinator = answers
        assert set(await looks(world, memory, seconds=100)) == {POLL}

    asyncio.run(story())


def test_another_coordinator_has_not_been_silent() -> None:
    """It has just been started, and what it says first is waited for."""

    async def story() -> None:
        world, memory = World(), Memory()
        await world.train()
        world.coordinator = None
        assert (await looks(world, memory, seconds=300))[-1] == LONGEST_POLL
        world.vanish("coordinator")
        await reconcile(world, NAMESPACE, NAME, world.now, memory=memory, last_words=world.last_words)
        while await reconcile(world, NAMESPACE, NAME, world.now, memory=memory) != POLL:
            world.now += 1.0
        world.pod("coordinator")["status"] |= {"phase": "Running", "podIP": "10.0.0.7"}
        assert (await looks(world, memory, seconds=1.0)) == [POLL]

    asyncio.run(story())


def test_a_clock_that_is_set_back_makes_nobody_wait() -> None:
    async def story() -> None:
        world, memory = World(), Memory()
        await world.train()
        world.coordinator = None
        await looks(world, memory, seconds=300)
        world.now -= 3600
        assert (await looks(world, memory, seconds=1.0)) == [POLL]

    asyncio.run(story())


def test_pods_with_launchers_of_a_silent_coordinator_are_looked_at_no_more_often_than_others() -> None:
    async def story() -> None:
        world, memory = World(manifest(failurePolicy={"inPlace": {}})), Memory()
        await world.train()
        assert set(await looks(world, memory, seconds=10)) == {in_place.POLL}
        world.coordinator = None
        assert (await looks(world, memory, seconds=300))[-1] == LONGEST_POLL

    asyncio.run(story())


# --- a definition that is older than the operator ---------------------------------------------------------------------


class Older(World):
    """The definition of a job knows neither how many pods run, nor of which template a replica is."""

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        kept = {field: value for field, value in status.items() if field != "replicas"}
        entries = [{name: it[name] for name in it if name != "revision"} for it in kept["replicaStatuses"]]
        kept["replicaStatuses"] = entries
        return await super().patch_status(namespace, name, kept, resource_version=resource_version)


def test_an_operator_whose_fields_are_dropped_says_once_that_the_definition_is_older(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        memory = Memory()
        for world in (World(), Older(), Older()):
            for _ in range(3):
                await reconcile(world, NAMESPACE, NAME, world.now, memory=memory)
                world.kubelets_start_everything()
                world.everybody_trains()
            memory.lose((NAMESPACE, NAME))

    asyncio.run(story())
    (said,) = [it.getMessage() for it in caplog.records if "older than this operator" in it.getMessage()]
    assert said.endswith("upgrade it (replicaStatuses.revision, replicas)")
