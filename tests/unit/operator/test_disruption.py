"""The disruption budget of a job: there where it is asked for, with the right number, and in nobody's way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.operator.world import NAME, NAMESPACE, NOW, Killed, World, manifest

from fthsdp_operator.api import (
    JOB_LABEL,
    KIND,
    MAX_JOB_NAME,
    POD_INDEX_LABEL,
    ROLE_LABEL,
    Job,
    ReplicaState,
    ReplicaStatus,
    parse_job,
)
from fthsdp_operator.cluster import Forbidden, Manifest
from fthsdp_operator.execute import SUPPORT_KNOWN, Memory, reconcile
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import BudgetView, Observed, budget_view
from fthsdp_operator.preview import preview
from fthsdp_operator.rules.actions import Create, Delete
from fthsdp_operator.rules.disruption import keep_budget
from fthsdp_operator.rules.plan import plan

BUDGET = ("PodDisruptionBudget", "llama-min-replicas")
ON, OFF = {"disruptionBudget": "MinReplicas"}, {"disruptionBudget": "None"}
FULL = 5
"""What the job of these tests asks for: two of its three replicas have to train, and each has two pods."""


def job_of(**spec: Any) -> Job:
    return parse_job(manifest(**{"nodePolicy": ON, **spec}))


# --- what it says ---


@pytest.mark.parametrize(
    ("replicas", "least", "pods", "wanted"),
    [(3, 2, 2, 5), (3, 1, 2, 4), (3, 3, 2, 5), (8, 1, 1, 1), (8, 7, 1, 7), (1, 1, 1, 0), (1, 1, 4, 3), (2, 2, 1, 1)],
)
def test_evictions_leave_min_replicas_whole_and_one_is_always_possible_while_all_are_there(
    replicas: int, least: int, pods: int, wanted: int
) -> None:
    job = job_of(replicas=replicas, minReplicas=least, podsPerReplica=pods)
    assert render.min_available(job) == wanted
    assert wanted < replicas * pods  # else no drain would ever end
    gone = replicas * pods - wanted  # each may be of another replica, which goes as well
    assert replicas - gone >= min(least, replicas - 1)


def test_spares_may_take_the_place_of_who_is_evicted() -> None:
    assert render.min_available(job_of(spares=2)) == 5 * 2 - 3


def test_a_replica_that_was_abandoned_is_not_waited_for() -> None:
    job = job_of(minReplicas=1)
    gone = ReplicaStatus(index=2, attempt=1, state=ReplicaState.ABANDONED)
    status = job.status.model_copy(update={"replica_statuses": (gone,)})
    assert render.min_available(job.model_copy(update={"status": status})) == 2 * 2 - 1


def test_it_selects_the_training_pods_and_goes_with_the_job() -> None:
    job = job_of()
    made = render.disruption_budget(job)
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == ("policy/v1", *BUDGET)
    assert made["metadata"]["ownerReferences"][0]["uid"] == "job-1"
    assert (made["spec"]["minAvailable"], made["spec"]["unhealthyPodEvictionPolicy"]) == (FULL, "AlwaysAllow")
    selected = made["spec"]["selector"]["matchLabels"]
    assert selected == {JOB_LABEL: NAME, ROLE_LABEL: "trainer"}
    pod = render.training_pod(job, replica=1, attempt=2, index=0)
    assert selected.items() <= pod["metadata"]["labels"].items()
    assert not selected.items() <= render.coordinator_pod(job, image="x")["metadata"]["labels"].items()


def test_its_name_is_legal_and_no_other_object_of_the_job_has_it() -> None:
    name = render.budget_name("a" * MAX_JOB_NAME)
    assert len(name) <= 63
    assert name not in {it["metadata"]["name"] for it in render.support(job_of(), key="k")}


def test_without_the_field_there_is_none() -> None:
    assert render.min_available(parse_job(manifest())) is None


# --- what is planned ---

OURS = BudgetView(uid="u", min_available=FULL)


def told(job: Job, budget: BudgetView | None) -> list[str]:
    observed = Observed(budget=budget, last_words={}, fresh_key="k", coordinator_image="x")
    said = []
    for action in keep_budget(job, observed):
        assert isinstance(action, Create | Delete)
        said.append(f"delete {action.uid}" if isinstance(action, Delete) else "create")
    return said


@pytest.mark.parametrize(
    ("policy", "budget", "wanted"),
    [
        pytest.param(ON, BudgetView(), ["create"], id="there is none"),
        pytest.param(ON, OURS, [], id="it is as it should be"),
        pytest.param(ON, BudgetView(uid="u", min_available=3), ["delete u", "create"], id="its number is another one"),
        pytest.param(ON, BudgetView(uid="u", min_available="50%"), ["delete u", "create"], id="somebody changed it"),
        pytest.param(ON, BudgetView(uid="u", min_available=FULL, foreign=True), [], id="it is not ours"),
        pytest.param(ON, BudgetView(uid="u", min_available=3, going=True), [], id="it is on its way out"),
        pytest.param(ON, None, [], id="nobody may look"),
        pytest.param(OFF, OURS, ["delete u"], id="it is not wanted any more"),
        pytest.param(OFF, BudgetView(uid="u"), ["delete u"], id="nor is one that somebody changed"),
        pytest.param(OFF, BudgetView(), [], id="there is none, as it should be"),
        pytest.param(OFF, BudgetView(uid="u", foreign=True), [], id="somebody else has one"),
    ],
)
def test_it_is_made_and_made_anew_and_deleted(policy: Any, budget: BudgetView | None, wanted: list[str]) -> None:
    assert told(job_of(nodePolicy=policy), budget) == wanted


def test_a_job_that_is_suspended_or_over_leaves_its_budget_alone() -> None:
    stale = BudgetView(uid="u", min_available=1)
    observed = Observed(budget=stale, last_words={}, fresh_key="k", coordinator_image="x")
    suspended = job_of(suspend=True)
    ended = job_of().model_copy(update={"status": suspended.status.model_copy(update={"state": "Complete"})})
    for job in (suspended, ended):
        assert not [it for it in plan(job, observed, NOW).actions if isinstance(it, Delete) and it.kind == BUDGET[0]]


# --- what becomes of it ---


class Watched(World):
    """A cluster that notes what is asked of budgets, and whose operator remembers."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(manifest(**spec))
        self.asked = 0
        self.refused: set[str] = set()
        """Verbs to which the operator has no right."""
        self.trouble = ""
        self.memory = Memory()

    def _may(self, verb: str, kind: str) -> None:
        if kind == BUDGET[0] and verb in self.refused:
            raise Forbidden(f'cannot {verb} resource "poddisruptionbudgets"')

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        self.asked += kind == BUDGET[0]
        self._may("get", kind)
        return await super().get(kind, namespace, name)

    async def create(self, manifest: Any) -> Manifest:
        self._may("create", manifest["kind"])
        return await super().create(manifest)

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        self._may("delete", kind)
        await super().delete(kind, namespace, name, uid=uid, grace_seconds=grace_seconds)

    async def look(self) -> float:
        words, memory = self.last_words, self.memory
        return await reconcile(self, NAMESPACE, NAME, self.now, last_words=words, memory=memory, trouble=self.trouble)

    def user_changes(self, **spec: Any) -> None:
        super().user_changes(**spec)
        self.memory.told(self.objects[KIND, NAME])

    @property
    def least(self) -> int | None:
        """What the budget asks for; None where there is none."""
        there = self.objects.get(BUDGET)
        return None if there is None else there["spec"]["minAvailable"]

    def budgets(self) -> list[str]:
        return [write.partition(" ")[0] for write in self.writes if BUDGET[1] in write]

    def stranger(self) -> None:
        """Somebody makes a budget of this name."""
        self.objects[BUDGET] = {
            "kind": BUDGET[0],
            "metadata": {"name": BUDGET[1], "uid": "theirs"},
            "spec": {"minAvailable": 1},
        }


def test_it_is_made_once_and_asked_for_ever_so_often() -> None:
    async def story() -> None:
        world = Watched(nodePolicy=ON)
        await world.train()
        assert (world.least, world.job.status.disruption_budget) == (FULL, FULL)
        assert world.budgets() == ["create"]
        before = world.asked
        for _ in range(5):
            await world.look()
        assert world.asked == before
        world.objects.pop(BUDGET)
        world.now += SUPPORT_KNOWN
        await world.settle()
        assert world.least == FULL

    asyncio.run(story())


@pytest.mark.parametrize(
    ("change", "wanted"),
    [({"minReplicas": 1}, 4), ({"replicas": 5}, 7), ({"spares": 1}, 6), ({"replicas": 5, "minReplicas": 4}, 9)],
)
def test_it_follows_the_job(change: dict[str, int], wanted: int) -> None:
    async def story() -> None:
        world = Watched(nodePolicy=ON)
        await world.train()
        world.writes.clear()
        world.user_changes(**change)
        await world.settle()
        assert (world.least, world.job.status.disruption_budget) == (wanted, wanted)
        assert world.budgets() == ["delete", "create"]

    asyncio.run(story())


def test_a_job_without_one_asks_for_none_and_one_that_is_not_wanted_any_more_goes() -> None:
    async def story() -> None:
        world = Watched()
        await world.train()
        assert (world.asked, world.least) == (0, None)
        world.user_changes(nodePolicy=ON)
        await world.settle()
        assert world.least == FULL
        world.user_changes(nodePolicy=OFF)
        await world.settle()
        await world.look()
        assert (world.least, world.job.status.disruption_budget) == (None, None)
        before = world.asked
        world.now += SUPPORT_KNOWN
        await world.settle()
        assert world.asked == before

    asyncio.run(story())


@pytest.mark.parametrize("policy", [ON, OFF])
def test_while_the_job_is_suspended_nothing_becomes_of_it_and_nobody_asks(policy: dict[str, str]) -> None:
    async def story() -> None:
        world = Watched(nodePolicy=ON)
        await world.train()
        world.user_changes(suspend=True, minReplicas=1, nodePolicy=policy)
        await world.settle()
        world.the_deleted_vanish()
        await world.settle()
        before = world.asked
        world.writes.clear()
        await world.settle()
        assert (world.least, world.job.status.disruption_budget) == (FULL, FULL)
        assert (world.asked, world.writes) == (before, [])
        world.user_changes(suspend=False)
        await world.settle()
        assert world.least == (4 if policy is ON else None)

    asyncio.run(story())


def test_one_of_somebody_else_is_left_alone_and_the_job_starts_and_says_so() -> None:
    async def story() -> None:
        world = Watched(nodePolicy=ON)
        world.stranger()
        await world.train()
        assert (world.objects[BUDGET]["metadata"]["uid"], world.job.status.disruption_budget) == ("theirs", None)
        assert len(world.pods) == 6
        stalled = world.condition("Stalled")
        assert (stalled.status, stalled.reason) == ("True", "BudgetNameTaken")
        assert stalled.message.startswith("PodDisruptionBudget llama-min-replicas: there already and not of this job")
        assert world.condition("Accepted").status == "True"
        world.objects.pop(BUDGET)
        await world.settle()
        assert (world.least, world.condition("Stalled").status) == (FULL, "False")
        world.stranger()
        world.user_changes(nodePolicy=OFF)
        await world.settle()
        assert (world.objects[BUDGET]["metadata"]["uid"], world.condition("Stalled").status) == ("theirs", "False")

    asyncio.run(story())


@pytest.mark.parametrize("at", range(4))
def test_an_operator_that_is_killed_while_it_makes_it_anew_goes_on(at: int) -> None:
    async def story() -> None:
        world = Watched(nodePolicy=ON)
        await world.train()
        world.writes.clear()
        world.user_changes(minReplicas=1)
        world.kill_at = at  # before the status, the deletion of the coordinator, that of the budget, the new budget
        with pytest.raises(Killed):
            await world.look()
        assert world.least == (None if at == 3 else FULL)
        world.kill_at, world.memory = None, Memory()
        await world.settle()
        assert world.least == 4

    asyncio.run(story())


@pytest.mark.parametrize("verb", ["get", "create"])
def test_without_the_right_to_it_the_job_starts_and_says_so(verb: str) -> None:
    async def story() -> None:
        world, words = Watched(nodePolicy=ON), f'cannot {verb} resource "poddisruptionbudgets"'
        world.refused = {verb}
        for _ in range(2):
            with pytest.raises(Forbidden, match=words):
                await world.look()
            world.trouble = words
        assert (len(world.pods), world.least) == (6, None)
        stalled = world.condition("Stalled")
        assert (stalled.status, stalled.reason, stalled.message) == ("True", "CallRefused", words)
        # Who may not look has made none, and a job that does not want it any more is left in peace.
        assert world.job.status.disruption_budget == (None if verb == "get" else FULL)
        world.trouble = ""
        world.user_changes(nodePolicy=OFF)
        await world.settle()
        assert world.job.status.disruption_budget is None

    asyncio.run(story())


def test_without_the_right_to_delete_it_the_job_says_so_for_as_long() -> None:
    async def story() -> None:
        world = Watched(nodePolicy=ON)
        await world.train()
        world.refused = {"delete"}
        world.user_changes(nodePolicy=OFF)
        for _ in range(2):
            with pytest.raises(Forbidden, match="cannot delete"):
                await world.look()
        assert (world.least, world.job.status.disruption_budget) == (FULL, FULL)
        world.refused = set()
        await world.settle()
        await world.look()
        assert (world.least, world.job.status.disruption_budget) == (None, None)

    asyncio.run(story())


def test_a_quota_that_refuses_pods_keeps_nobody_from_having_it() -> None:
    class Full(Watched):
        async def create(self, manifest: Any) -> Manifest:
            if POD_INDEX_LABEL in manifest["metadata"]["labels"]:
                raise Forbidden("exceeded quota")
            return await super().create(manifest)

    async def story() -> None:
        world = Full(nodePolicy=ON)
        with pytest.raises(Forbidden, match="exceeded quota"):
            await world.look()
        assert world.least == FULL

    asyncio.run(story())


# --- what ``fthsdp plan`` says of it ---


def foreseen(world: World, *objects: Manifest) -> str:
    pods = [it for (kind, _), it in world.objects.items() if kind == "Pod"]
    given = [world.objects[KIND, NAME], *pods, *objects]
    return "\n".join(preview(given, world.now, coordinator_image=world.coordinator_image, with_pods=True).words())


def test_it_is_foreseen() -> None:
    world = Watched(nodePolicy=ON)
    assert "create PodDisruptionBudget llama-min-replicas: the job needs it\n" in foreseen(world)
    asyncio.run(world.train())
    world.coordinator = None
    assumed = "Its PodDisruptionBudget is taken to be there, with minAvailable 5.\n"
    assert assumed in foreseen(world)
    assert "Nothing is to be done." in foreseen(world)
    world.user_changes(minReplicas=3, nodePolicy=OFF)
    there = world.objects[BUDGET]
    assert assumed not in foreseen(world, there)
    line = "delete PodDisruptionBudget llama-min-replicas: the job wants no disruption budget\n"
    assert line in foreseen(world)
    assert line in foreseen(world, there)
    assert "PodDisruptionBudget llama-min-replicas: there already" not in foreseen(world, there)


def test_what_is_seen_of_it() -> None:
    job = job_of()
    assert budget_view(job, None) == BudgetView()
    made = render.disruption_budget(job)
    made["metadata"]["uid"] = "u"
    assert budget_view(job, made) == OURS
    made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert budget_view(job, made).going
