"""A job on a real Kubernetes loses a pod, and only that pod's replica comes back.

One run is enough to look at from many sides: the operator is installed with Helm, a job of three replicas of two pods
trains, a pod of the last replica is deleted, the job completes, the job is deleted, the operator is uninstalled. Each
test then says one thing that must hold of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.kube.cluster import Cluster
from tests.cluster.kube.helm import CHART, Helm
from tests.cluster.kube.inventory import Inventory, inventory, wait_until_left
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.livejob import step_of
from tests.cluster.stage import (
    DEFINITION,
    NAMESPACE,
    RELEASE,
    SYSTEM,
    diagnosis,
    example,
    helm_and_namespaces,
    image_values,
)

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
JOB = "tiny-llama"
NAMESPACES = frozenset({SYSTEM, NAMESPACE, "default"})
STEPS = 150
ARGUMENTS = ("--steps", f"{STEPS}", "--batch-size", "8", "--micro-batch-size", "4", "--emulate-compute", "1.0")
VICTIM = f"{JOB}-r2-a0-1"
STARTED = 240.0
"""Seconds within which six processes that import torch begin to train, on two busy cores."""
RECOVERED = 180.0
FINISHED = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What could be seen of the run."""

    pods_before: dict[str, Object]
    """The training pods just before the deletion, by name."""
    pods_after: dict[str, Object]
    """All pods of the job at its end."""
    table: list[str]
    """The lines of ``kubectl get fthsdp --watch``."""
    steps: list[Object]
    """What the coordinator printed, a final step a line."""
    report: Object
    job: Object
    """At its end."""
    events: list[Object]
    """What Kubernetes and the operator noted about it."""
    nodes: set[str]
    notes: str
    """What helm install said."""
    checked: str
    """What helm test said."""
    told: str
    """What ``fthsdp report`` said."""
    fetched: dict[str, str | int]
    """What it left in its folder: the text of each file, the size of the picture."""


@pytest.fixture(scope="module")
def helm(cluster: Cluster) -> Iterator[Helm]:
    with helm_and_namespaces(cluster) as helm:
        yield helm


@pytest.fixture(scope="module")
def run(cluster: Cluster, helm: Helm) -> Run:
    """Do all of it; what is left behind at the end fails the fixture, and so every test."""
    kubectl = cluster.kubectl
    values, training = image_values(cluster), cluster.training()
    empty = everything(kubectl)
    try:
        notes = helm.install(RELEASE, CHART, values)
        installed = everything(kubectl)
        checked = helm.test(RELEASE)
        seen = train(cluster, example(training, ARGUMENTS), notes, checked)
    except Exception as error:
        error.add_note(diagnosis(kubectl, JOB))
        raise
    kubectl("delete", "fthsdp", JOB, "--namespace", NAMESPACE, "--timeout=60s")
    wait_until_left(kubectl, namespaces=NAMESPACES, expected=installed)
    helm.uninstall(RELEASE)
    wait_until_left(kubectl, namespaces=NAMESPACES, expected=empty | {DEFINITION})
    return seen


def everything(kubectl: Kubectl) -> Inventory:
    return inventory(kubectl, namespaces=NAMESPACES)


def fetch_report(cluster: Cluster) -> tuple[str, dict[str, str | int]]:
    """Fetch the job's record as a person would, and return what was said and what is in the folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fthsdp_operator.cli", "report", JOB, "--out", f"{folder}/run"]
        command += ["--namespace", NAMESPACE, "--kubeconfig", str(cluster.kubeconfig)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        files = [path for path in Path(folder, "run").rglob("*") if path.is_file()]
        return done.stdout, {f.name: f.stat().st_size if f.suffix == ".png" else f.read_text() for f in files}


def train(cluster: Cluster, manifest: Object, notes: str, checked: str) -> Run:
    """Start the job, delete a pod once all replicas train, and wait until the job is complete."""
    kubectl = cluster.kubectl
    here = ("--namespace", NAMESPACE)
    kubectl.apply(manifest)
    with kubectl.watch("get", "fthsdp", JOB, "--watch", *here) as table:
        table.wait_for(lambda line: " 3/3 " in line, "all replicas train", timeout=STARTED)
        coordinator = f"{JOB}-coordinator"
        with kubectl.watch("logs", "--follow", coordinator, *here) as log:
            log.wait_for(lambda line: step_of(line) >= 10, "ten steps are final", timeout=120)
            before = pods(kubectl, "fthsdp.dev/role=trainer")
            deleted_at = len(table.lines)
            kubectl("delete", "pod", VICTIM, "--wait=false", *here)
            down = table.wait_for(lambda line: " 2/3 " in line, "a replica is missing", timeout=60, after=deleted_at)
            alone = len(log.lines)
            table.wait_for(lambda line: " 3/3 " in line, "it is back", timeout=RECOVERED, after=down)
            log.wait_for(lambda line: 2 in contributors(line), "it contributes", timeout=60, after=alone)
            table.wait_for(lambda line: " Complete " in line, "the job is complete", timeout=FINISHED)
            log.wait_for_end(timeout=60)
            print(*(line for line in (*table.lines, *log.lines) if not step_of(line)), sep="\n")
            steps = [json.loads(line) for line in log.lines if step_of(line)]
            print(f"contributors of the last step: {steps[-1]['contributors']}")
        stored = kubectl.get("configmap", f"{JOB}-epoch", *here)
        print(stored["data"]["report.json"])
        told, fetched = fetch_report(cluster)
        print(told, *fetched)
        return Run(
            pods_before=before,
            pods_after=pods(kubectl, f"fthsdp.dev/job={JOB}"),
            table=list(table.lines),
            steps=steps,
            report=json.loads(stored["data"]["report.json"]),
            told=told,
            fetched=fetched,
            job=kubectl.get("fthsdp", JOB, *here),
            events=kubectl.items("events", *here),
            nodes={node["metadata"]["name"] for node in kubectl.items("nodes")},
            notes=notes,
            checked=checked,
        )


def contributors(line: str) -> list[int]:
    """Replicas that contributed to the step that a line speaks of."""
    return list(json.loads(line).get("contributors", ())) if line.startswith("{") else []


def pods(kubectl: Kubectl, selector: str) -> dict[str, Object]:
    found = kubectl.items("pods", "--namespace", NAMESPACE, "--selector", selector)
    return {pod["metadata"]["name"]: pod for pod in found}


def restarts(pod: Object) -> int:
    return sum(status["restartCount"] for status in pod["status"]["containerStatuses"])


def replica_statuses(run: Run) -> list[Object]:
    found: list[Object] = run.job["status"]["replicaStatuses"]
    return found


def test_the_install_tells_the_next_command(run: Run) -> None:
    assert "kubectl apply -f examples/tiny-llama.yaml" in run.notes


def test_what_is_installed_passes_the_charts_own_test(run: Run) -> None:
    assert f"{RELEASE}-operator-test" in run.checked
    assert "Succeeded" in run.checked


def test_the_job_ran_on_two_nodes(run: Run) -> None:
    nodes = {pod["spec"]["nodeName"] for pod in run.pods_before.values()}
    assert len(run.pods_before) == 6
    assert nodes <= run.nodes
    assert len(nodes) >= 2


def test_pods_of_healthy_replicas_were_not_touched(run: Run) -> None:
    for replica in (0, 1):
        for index in (0, 1):
            name = f"{JOB}-r{replica}-a0-{index}"
            before, after = run.pods_before[name], run.pods_after[name]
            assert after["metadata"]["uid"] == before["metadata"]["uid"]
            assert restarts(after) == restarts(before) == 0


def test_only_the_failed_replica_started_again(run: Run) -> None:
    healthy = {f"{JOB}-r{replica}-a0-{index}" for replica in (0, 1) for index in (0, 1)}
    again = {f"{JOB}-r2-a1-{index}" for index in (0, 1)}
    assert run.pods_after.keys() == healthy | again | {f"{JOB}-coordinator"}
    assert [status["attempt"] for status in replica_statuses(run)] == [0, 0, 1]
    assert restarts(run.pods_after[f"{JOB}-coordinator"]) == 0


def test_the_record_of_steps_has_no_gap(run: Run) -> None:
    assert [step["step"] for step in run.steps] == list(range(1, STEPS + 1))
    assert run.report["steps_final"] == STEPS


def test_the_others_trained_on_while_it_was_down(run: Run) -> None:
    alone = [step for step in run.steps if step["contributors"] == [0, 1]]
    assert alone
    assert {0, 1} <= set.intersection(*(set(step["contributors"]) for step in run.steps))


def test_the_replica_that_came_back_is_active_at_the_end(run: Run) -> None:
    assert sorted(run.steps[-1]["contributors"]) == [0, 1, 2]
    (join,) = [join for join in run.report["joins"] if join["replica"] == 2]
    assert join["attempt"] == 1
    assert join["bytes"] > 0


def test_one_failure_is_on_record(run: Run) -> None:
    failures = [(failure["replica"], failure["attempt"]) for failure in run.report["failures"]]
    leaves = [(leave["replica"], leave["attempt"]) for leave in run.report["leaves"]]
    assert failures + leaves == [(2, 0)]


def test_all_replicas_stayed_bit_identical(run: Run) -> None:
    assert run.report["digests"]["compared"] > 0
    assert run.report["digests"]["mismatched"] == 0


def test_every_sample_was_trained_exactly_once(run: Run) -> None:
    samples = run.report["samples"]
    assert samples["trained"] == sum(step["samples"] for step in run.steps)
    assert (samples["duplicated"], samples["missing"]) == (0, 0)


def test_the_table_shows_how_many_train_and_why_not_all(run: Run) -> None:
    header, *lines = run.table
    assert header.split() == ["NAME", "READY", "MIN", "STEP", "RESTARTS", "STATE", "LAST-FAILURE", "AGE"]
    down = [line for line in lines if " 2/3 " in line and VICTIM in line]
    assert down
    assert "PodDeleted" in down[0]
    assert "Degraded" in down[0]
    assert " 3/3 " in lines[-1]
    assert "Complete" in lines[-1]


def test_the_status_names_pod_node_and_exit_code_of_the_failure(run: Run) -> None:
    failure = replica_statuses(run)[2]["lastFailure"]
    assert failure["pod"] == VICTIM
    assert failure["node"] == run.pods_before[VICTIM]["spec"]["nodeName"]
    assert failure["reason"] == "PodDeleted"
    assert isinstance(failure["exitCode"], int)


def test_the_operators_calls_succeeded(run: Run) -> None:
    assert [event["message"] for event in run.events if event["reason"] == "CallFailed"] == []


def test_the_record_can_be_fetched_from_the_cluster(run: Run) -> None:
    assert "Complete: " in run.told
    assert "No sample was lost or repeated" in run.told
    assert json.loads(str(run.fetched["report.json"])) == run.report
    log = str(run.fetched[f"{JOB}-coordinator.log"]).splitlines()
    assert sum('"step": ' in line for line in log) == STEPS
    assert int(run.fetched["run.png"]) > 10_000


def test_the_job_is_complete(run: Run) -> None:
    conditions = {condition["type"]: condition["status"] for condition in run.job["status"]["conditions"]}
    assert conditions["Complete"] == "True"
    assert run.report["outcome"] == "complete"
    assert {pod["status"]["phase"] for pod in run.pods_after.values()} == {"Succeeded"}
