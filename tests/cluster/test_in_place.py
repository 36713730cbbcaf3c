"""On a real Kubernetes: a process that crashes is started again in its pods; when it crashes again, new pods come."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.cluster.kube.cluster import Cluster
from tests.cluster.kube.helm import CHART
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.shell import until
from tests.cluster.stage import NAMESPACE, RELEASE, diagnosis, example, helm_and_namespaces, image_values

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
JOB = "tiny-llama"
ARGUMENTS = ("--steps", "100000", "--batch-size", "8", "--micro-batch-size", "4", "--emulate-compute", "1.0")
STARTED = 240.0
"""Seconds within which four processes that import torch begin to train, on two busy cores."""
BACK = 180.0
"""Seconds within which a replica is back, on two busy cores."""
KILL = """
import os, pathlib
for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdecimal() and int(folder.name) not in (1, os.getpid()):
        if (folder / "comm").read_text().strip() != "fthsdp-template":
            os.kill(int(folder.name), 9)
"""
"""Kills what runs in a container, apart from its launcher and the interpreter that waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What could be seen."""

    first: dict[str, str]
    """UIDs of the pods of each name: when all trained,"""
    after_one: dict[str, str]
    """when they did again after one crash,"""
    after_two: dict[str, str]
    """and after another one."""
    entries: list[Object]
    """The status of replica 1 then, each time."""
    restarts: list[int]
    """How often kubelets had restarted containers of the pods, each time."""


@pytest.fixture(scope="module")
def run(cluster: Cluster) -> Iterator[Run]:
    """Let the process of a pod crash twice."""
    kubectl = cluster.kubectl
    with helm_and_namespaces(cluster) as helm:
        helm.install(RELEASE, CHART, image_values(cluster))
        try:
            yield crash_twice(cluster)
        except Exception as error:
            error.add_note(diagnosis(kubectl, JOB))
            raise
        finally:
            kubectl("delete", "fthsdp", JOB, "--namespace", NAMESPACE, "--ignore-not-found", "--timeout=60s")


def crash_twice(cluster: Cluster) -> Run:
    kubectl, training = cluster.kubectl, cluster.training()
    victim, here = f"{JOB}-r1-a0-1", ("--namespace", NAMESPACE)
    manifest = example(training, ARGUMENTS)
    manifest["spec"] |= {
        "replicas": 2,
        "minReplicas": 1,
        "failurePolicy": {"inPlace": {}, "backoff": {"initialSeconds": 0}},
    }
    kubectl.apply(manifest)
    until(lambda: trains(kubectl, 0), "both replicas train", timeout=STARTED)
    seen, entries, restarts = [uids(kubectl)], [replica_1(kubectl)], [restarts_of(kubectl)]
    for crash in (1, 2):
        began = time.monotonic()
        kubectl("exec", victim, *here, "--", training.python, "-c", KILL)
        until(lambda: replica_1(kubectl)["attempt"] == crash, "the crash is noticed", timeout=60)  # noqa: B023
        noticed = time.monotonic()
        until(lambda: trains(kubectl, crash), "it trains again", timeout=BACK)  # noqa: B023
        print(f"crash {crash}: noticed after {noticed - began:.1f} s, active after {time.monotonic() - began:.1f} s")
        print(kubectl.answer("logs", victim, *here, "--tail=12", "--timestamps"))
        seen, entries = [*seen, uids(kubectl)], [*entries, replica_1(kubectl)]
        restarts = [*restarts, restarts_of(kubectl)]
    return Run(first=seen[0], after_one=seen[1], after_two=seen[2], entries=entries, restarts=restarts)


def job(kubectl: Kubectl) -> Object:
    return kubectl.get("fthsdp", JOB, "--namespace", NAMESPACE)


def replica_1(kubectl: Kubectl) -> Object:
    entries: list[Object] = job(kubectl).get("status", {}).get("replicaStatuses", [])
    return entries[1] if len(entries) > 1 else {"attempt": 0, "state": "Pending"}


def trains(kubectl: Kubectl, attempt: int) -> bool:
    now = replica_1(kubectl)
    return bool(job(kubectl).get("status", {}).get("state") == "Running" and now["attempt"] == attempt)


def uids(kubectl: Kubectl) -> dict[str, str]:
    found = pods(kubectl, "fthsdp.dev/role=trainer").values()
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found if "deletionTimestamp" not in pod["metadata"]
    }


def pods(kubectl: Kubectl, selector: str) -> dict[str, Object]:
    found = kubectl.items("pods", "--namespace", NAMESPACE, "--selector", selector)
    return {pod["metadata"]["name"]: pod for pod in found}


def restarts_of(kubectl: Kubectl) -> int:
    found = pods(kubectl, "fthsdp.dev/role=trainer").values()
    return sum(status["restartCount"] for pod in found for status in pod["status"]["containerStatuses"])


def test_after_a_crash_all_pods_are_those_from_before(run: Run) -> None:
    assert run.after_one == run.first
    assert len(run.first) == 4
    assert run.restarts == [0, 0, 0]


def test_the_status_says_how_it_crashed_and_that_its_pods_stayed(run: Run) -> None:
    now = run.entries[1]
    assert (now["attempt"], now["podsAttempt"], now["restarts"]) == (1, 0, 1)
    failure = now["lastFailure"]
    assert (failure["pod"], failure["exitCode"], failure["reason"]) == (f"{JOB}-r1-a0-1", 137, "Error"), json.dumps(now)


def test_after_the_second_crash_the_replica_has_new_pods_and_the_other_its_own(run: Run) -> None:
    assert {name for name in run.after_two if "-r1-" in name} == {f"{JOB}-r1-a2-0", f"{JOB}-r1-a2-1"}
    healthy = {name: uid for name, uid in run.first.items() if "-r0-" in name}
    assert healthy.items() <= run.after_two.items()
    assert "podsAttempt" not in run.entries[2]
