"""Evictions take one replica after the other: Kubernetes counts pods by the budget that the operator makes.

The disruption controller is the real one. The tests say which pods are Ready, as kubelets would.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_operator import TRAINERS, Story

pytestmark = pytest.mark.cluster

POLICY = {"disruptionBudget": "MinReplicas"}
NAME = "llama-min-replicas"
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


class Drained(Story):
    """A story in which pods are evicted."""

    def starts(self, *names: str) -> None:
        """The kubelet starts these pods, and says that they are Ready."""
        self.kubelet_starts(*names)
        for name in names:
            self.says(name, READY)

    def stops(self, *names: str) -> None:
        """The kubelet has stopped these pods."""
        self.kubectl("delete", "pod", *names, "--grace-period=0", "--force", "--ignore-not-found")

    def evict(self, name: str, *, refused: bool = False) -> None:
        """Ask for what a drain asks for."""
        metadata = {"name": name, "namespace": self.namespace}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        said = self.server.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction), fails=refused)
        assert not refused or "it would violate the pod's disruption budget" in said

    def budgets(self) -> dict[str, int]:
        """Return how many pods each budget asks for."""
        found = self.server.items("poddisruptionbudgets", self.namespace)
        return {name: it["spec"]["minAvailable"] for name, it in found.items()}

    def allows(self, evictions: int) -> None:
        """Wait until the budget allows that many evictions."""

        def does() -> bool:
            found = self.server.items("poddisruptionbudgets", self.namespace).get(NAME, {"metadata": {}})
            status = found.get("status", {})
            seen = status.get("observedGeneration", 0) == found["metadata"].get("generation")
            return bool(seen and status["disruptionsAllowed"] == evictions)

        self.until(does, f"{evictions} evictions are allowed")

    def change(self, **spec: object) -> None:
        self.kubectl("patch", "fthsdp", "llama", "--type=merge", "-p", json.dumps({"spec": spec}))


@pytest.fixture
def story(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Drained:
    return Drained(apiserver, namespace, tmp_path)


def test_evictions_take_one_replica_after_the_other(story: Drained) -> None:
    """Two of three replicas have to train, and each has two pods."""
    with story.operator():
        story.start(nodePolicy=POLICY)
        story.starts(*TRAINERS)
        story.allows(1)
        story.evict("llama-r1-a0-0")
        story.evict("llama-r2-a0-0", refused=True)
        again = ("llama-r1-a1-0", "llama-r1-a1-1")
        story.until(lambda: {*again} <= story.pods().keys(), "replica 1 has new pods")
        story.stops("llama-r1-a0-0", "llama-r1-a0-1")
        story.allows(0)
        story.evict("llama-r2-a0-0", refused=True)
        story.starts(*again)
        story.allows(1)
        story.evict("llama-r2-a0-0")
        story.until(lambda: {"llama-r2-a1-0", "llama-r2-a1-1"} <= story.pods().keys(), "replica 2 has new pods")


def test_who_is_not_ready_holds_no_drain_up(story: Drained) -> None:
    with story.operator():
        story.start(nodePolicy=POLICY, minReplicas=3)
        story.starts(*TRAINERS[1:])
        story.kubelet_starts(TRAINERS[0])
        story.allows(0)
        story.evict(TRAINERS[2], refused=True)
        story.evict(TRAINERS[0])


def test_the_budget_follows_the_job_and_goes_with_it(story: Drained) -> None:
    with story.operator():
        story.start(nodePolicy=POLICY)
        story.until(lambda: story.budgets() == {NAME: 5}, "there is a budget")
        story.change(minReplicas=1)
        story.until(lambda: story.budgets() == {NAME: 4}, "it is another one")
        story.change(nodePolicy={"disruptionBudget": "None"})
        story.until(lambda: story.budgets() == {}, "it is gone")
        story.until(lambda: "disruptionBudget" not in story.job()["status"], "the job knows that")
        story.change(nodePolicy=POLICY)
        story.until(lambda: story.budgets() == {NAME: 4}, "it is back")
    story.kubectl("delete", "fthsdp", "llama", "--timeout=30s")  # with no operator there
    story.until(lambda: story.budgets() == {}, "the garbage collector took it")


def test_a_budget_of_somebody_else_keeps_no_pod_from_being_created(story: Drained) -> None:
    story.kubectl("create", "poddisruptionbudget", NAME, "--selector=app=other", "--min-available=1")
    with story.operator():
        story.start(nodePolicy=POLICY)
        story.until(lambda: "BudgetNameTaken" in str(story.job()["status"]["conditions"]), "the job says so")
        story.kubectl("delete", "poddisruptionbudget", NAME)
        story.until(lambda: story.budgets() == {NAME: 5}, "it has its own")
