"""The chart is upgraded while a job trains, from what it was before it was changed last; rolled back; uninstalled.

The job is of the version before, all of it: trainers and coordinator keep their images. Two operators run after the
upgrade, and the one that acts is killed while it restarts a replica of two pods. Beside it a job is made whose pods are
as people have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.kube.cluster import Cluster
from tests.cluster.kube.helm import CHART, Helm
from tests.cluster.kube.images import PROJECT
from tests.cluster.kube.inventory import Inventory, inventory, wait_until_left
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.shell import until
from tests.cluster.livejob import LiveJob, Outage, entry_of, trains_in_full
from tests.cluster.stage import (
    DEFINITION,
    ENDLESS,
    NAMESPACE,
    NOTICED,
    RELEASE,
    SYSTEM,
    another_acts,
    diagnosis,
    example,
    helm_and_namespaces,
    image_values,
    no_new_pods,
    refused_by_quota,
)
from tests.cluster.template import CROWDED, SHARED_MEMORY, crowded
from tests.upgrade.history import NoHistoryError, check_out_before

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
Pods = dict[str, tuple[str, int, str, bool]]
JOB = "tiny-llama"
STEPS = 30
FEW = ("--steps", f"{STEPS}", *ENDLESS[2:])
STARTED = 240.0
"""Seconds within which processes that import torch begin to train, on two busy cores."""
NAMESPACES = frozenset({SYSTEM, NAMESPACE, "default"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What could be seen."""

    pods: list[Pods]
    """Those of replica 0: at first, and after the upgrade, the loss of the operator, the rollback, the uninstall."""
    coordinators: list[str]
    """The uid of the coordinator's pod, each time."""
    operators: list[int]
    """How many operators were there: after the upgrade and after the rollback."""
    checked: str
    """What ``helm test`` said."""
    outage: Outage
    """Of replica 1."""
    group: set[str]
    """The pods of replica 1 after it."""
    crowd: Crowd


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What could be seen of the job whose pods are as people have them."""

    pods: dict[str, Object]
    """When all of them ran."""
    shared_memory: int
    """Bytes of /dev/shm of one of them."""
    status: Object
    """When it was complete."""
    steps: list[Object]
    """What its coordinator printed."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give what was before; where nobody knows, what is now: then only its values are others after the upgrade."""
    folder = tmp_path_factory.mktemp("before")
    try:
        print("upgrading from", check_out_before(folder))
    except NoHistoryError as reason:
        print(reason)
        return PROJECT
    return folder


@pytest.fixture(scope="module")
def run(cluster: Cluster, source: Path) -> Iterator[Run]:
    """Do all of it; what is left behind at the end fails the fixture, and so every test."""
    kubectl = cluster.kubectl
    with helm_and_namespaces(cluster) as helm:
        try:
            empty = everything(kubectl)
            seen = live_through(cluster, helm, source, empty)
        except Exception as error:
            error.add_note(diagnosis(kubectl, JOB, CROWDED))
            raise
        finally:
            here = ("--all", "--namespace", NAMESPACE)
            kubectl("delete", "fthsdp", *here, "--timeout=60s")
            kubectl("delete", "pods", *here, "--grace-period=0", "--force")
        wait_until_left(kubectl, namespaces=NAMESPACES, expected=empty | {DEFINITION})
        yield seen


def everything(kubectl: Kubectl) -> Inventory:
    return inventory(kubectl, namespaces=NAMESPACES)


def live_through(cluster: Cluster, helm: Helm, source: Path, empty: Inventory) -> Run:
    kubectl = cluster.kubectl
    job, crowd = (LiveJob(kubectl=kubectl, namespace=NAMESPACE, name=name) for name in (JOB, CROWDED))
    pods, coordinators = [], []

    def look() -> None:
        job.trains_on()
        pods.append(job.pods_of(0))
        coordinators.append(kubectl.get("pod", f"{JOB}-coordinator", "--namespace", NAMESPACE)["metadata"]["uid"])

    helm.install(RELEASE, source / "charts" / CHART.name, image_values(cluster, source))
    kubectl.apply(lasting(example(cluster.training(source), ENDLESS, source)))
    job.until(trains_in_full, "the job trains in full", timeout=STARTED)
    look()
    helm.upgrade(RELEASE, CHART, image_values(cluster) | {"replicaCount": 2})
    operators = [operators_of(kubectl)]
    checked = helm.test(RELEASE)
    look()
    kubectl.apply(crowded(cluster.training(), a_worker(kubectl), FEW, interface=interface_of(cluster)))
    until(lambda: running(crowd.pods()), f"the pods of {CROWDED} run", timeout=STARTED)
    there = crowd.pods()
    memory = "import os; it = os.statvfs('/dev/shm'); print(it.f_frsize * it.f_blocks)"
    shared = int(crowd.on("exec", crowd.pod(0), "--container", "trainer", "--", "python3", "-c", memory))
    with job.outage(1) as outage, no_new_pods(kubectl):
        job.on("delete", "pod", f"{JOB}-r1-a0-1", "--wait=false")
        job.until(refused_by_quota, "it has made room, and put nothing there", timeout=NOTICED)
        with another_acts(kubectl):
            pass
    group = {name for name in job.pods() if "-r1-" in name}
    look()
    status = crowd.until(lambda status: status.get("state") == "Complete", "it is complete", timeout=STARTED)
    until(lambda: not crowd.pods(), "no proxy runs on", timeout=NOTICED)
    steps = crowd.steps(lines=400)
    helm.rollback(RELEASE, 1)
    operators.append(operators_of(kubectl))
    look()
    helm.uninstall(RELEASE)
    until(
        lambda: {it for it in everything(kubectl) - empty if it[1] != NAMESPACE} == {DEFINITION},
        "nothing but the definition is left of the release",
        timeout=NOTICED,
    )
    assert not kubectl.items("leases", "--namespace", SYSTEM)
    look()
    return Run(
        pods=pods,
        coordinators=coordinators,
        operators=operators,
        checked=checked,
        outage=outage,
        group=group,
        crowd=Crowd(pods=there, shared_memory=shared, status=status, steps=steps),
    )


def lasting(job: Object) -> Object:
    """Return the example as a job of two replicas of two pods, of which one is enough."""
    job["spec"] |= {"replicas": 2, "minReplicas": 1, "podsPerReplica": 2, "retainFailedPods": 0}
    return job


def running(pods: dict[str, Object]) -> bool:
    """Return whether two replicas of two pods run."""
    return [pod["status"]["phase"] for pod in pods.values()] == ["Running"] * 4


def operators_of(kubectl: Kubectl) -> int:
    found = kubectl.items("pods", "--namespace", SYSTEM, f"--selector=app.kubernetes.io/instance={RELEASE}")
    return sum("deletionTimestamp" not in pod["metadata"] for pod in found)


def a_worker(kubectl: Kubectl) -> str:
    return next(str(it["metadata"]["name"]) for it in kubectl.items("nodes") if not it["spec"].get("taints"))


def interface_of(cluster: Cluster) -> str | None:
    """Nodes that are network namespaces of one machine have its name, and that leads to the machine."""
    return None if cluster.hardware is None else "eth0"


def test_the_chart_was_another_one(source: Path) -> None:
    if source == PROJECT:
        pytest.skip("this is no checkout with the history of its chart")
    assert files(source / "charts") != files(PROJECT / "charts")


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_pod_of_a_job_is_touched(run: Run) -> None:
    assert len(run.pods) == 5
    assert len(run.pods[0]) == 2
    assert all(pods == run.pods[0] for pods in run.pods)
    assert len(set(run.coordinators)) == 1


def test_the_upgraded_release_has_what_its_values_say_and_is_healthy(run: Run) -> None:
    assert run.operators == [2, 1]
    assert "Succeeded" in run.checked


def test_another_operator_continues_when_the_one_that_acts_is_killed(run: Run) -> None:
    assert run.group == {f"{JOB}-r1-a1-{index}" for index in (0, 1)}
    assert run.outage.restarts(1) == 1
    assert run.outage.failure(1)["reason"] == "PodDeleted"
    assert run.outage.meanwhile > 0


def test_pods_of_one_job_share_a_node_and_its_network(run: Run) -> None:
    pods = run.crowd.pods.values()
    assert len(pods) == 4
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 1
    assert {pod["status"]["podIP"] for pod in pods} == {pod["status"]["hostIP"] for pod in pods}
    assert all(len(pod["metadata"]["name"]) > len(CROWDED) == 40 for pod in pods)
    assert run.crowd.shared_memory == SHARED_MEMORY


def test_their_job_is_complete_though_containers_beside_the_training_never_exit(run: Run) -> None:
    assert [step["step"] for step in run.crowd.steps] == list(range(1, STEPS + 1))
    assert all(step["contributors"] == [0, 1] for step in run.crowd.steps)
    entries = [entry_of(run.crowd.status, replica) for replica in (0, 1)]
    assert [(entry["attempt"], entry["restarts"], entry["state"]) for entry in entries] == [(0, 0, "Finished")] * 2
