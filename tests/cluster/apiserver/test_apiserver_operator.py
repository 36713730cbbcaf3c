"""The operator against a real API server; the tests say what kubelets would say. No coordinator, no training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_crd import GOOD
from tests.cluster.kube.shell import until

pytestmark = pytest.mark.cluster

DEADLINE = 60.0
TRAINERS = [f"llama-r{replica}-a0-{index}" for replica in range(3) for index in range(2)]


class Story:
    """A namespace with a job in it, and the hand of a kubelet."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path) -> None:
        self.server = server
        self.namespace = namespace
        self.log = folder / "operator.log"

    @contextmanager
    def operator(self, *options: str, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """Run the operator as people do outside of a cluster; it must leave when it is asked to."""
        command = [sys.executable, "-m", "fthsdp_operator.cli", "operator", "--namespace", self.namespace, *options]
        with (log or self.log).open("ab") as out:
            process = subprocess.Popen(
                [*command, "--kubeconfig", str(self.server.kubeconfig)], stdout=out, stderr=out, env=os.environ
            )
            try:
                yield process
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(timeout=30) == 0
            finally:
                process.kill()
                process.wait(timeout=30)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.server.kubectl("-n", self.namespace, *arguments, stdin=stdin)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        until(holds, what, timeout=DEADLINE, log=self.log)

    def pods(self) -> dict[str, dict[str, Any]]:
        return self.server.items("pods", self.namespace)

    def job(self) -> dict[str, Any]:
        return self.server.items("fthsdp", self.namespace)["llama"]

    def start(self, **spec: Any) -> None:
        """Apply the job and wait for its pods."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps({**GOOD, "spec": {**GOOD["spec"], **spec}}))
        self.until(lambda: {*TRAINERS, "llama-coordinator"} <= self.pods().keys(), "all pods exist")

    def kubelet_starts(self, *names: str) -> None:
        for name in names:
            target = {"apiVersion": "v1", "kind": "Node", "name": "node-7"}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/binding"
            self.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))
            self.says(name, {"phase": "Running"})

    def kubelet_ends(self, name: str, code: int, *, phase: str) -> None:
        ended = {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}}
        container = {"name": "train", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": ended}
        self.says(name, {"phase": phase, "containerStatuses": [container]})

    def says(self, name: str, status: Mapping[str, Any]) -> None:
        patch = json.dumps({"status": status})
        self.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)


@pytest.fixture
def story(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Story:
    return Story(apiserver, namespace, tmp_path)


def uids(pods: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in pods.items() if "deletionTimestamp" not in pod["metadata"]}


def test_a_coordinators_pod_that_a_finalizer_keeps_is_named_and_replaced_when_it_is_gone(story: Story) -> None:
    def stalled() -> str:
        (found,) = (it for it in story.job()["status"]["conditions"] if it["type"] == "Stalled")
        return f"{found['reason']}: {found.get('message', '')}"

    with story.operator():
        story.start()
        story.kubelet_starts(*TRAINERS, "llama-coordinator")
        before = uids(story.pods())
        patch = json.dumps({"metadata": {"finalizers": ["example.com/audit"]}})
        story.kubectl("patch", "pod", "llama-coordinator", "--type=merge", "-p", patch)
        story.kubectl("delete", "pod", "llama-coordinator", "--grace-period=1", "--wait=false")
        story.until(lambda: stalled().startswith("CoordinatorHeld"), "the job says so")
        assert stalled().endswith("no other coordinator can be started: its finalizers keep it: example.com/audit")
        assert "CoordinatorHeld" in story.kubectl("describe", "fthsdp", "llama")
        patch = json.dumps({"metadata": {"finalizers": None}})
        story.kubectl("patch", "pod", "llama-coordinator", "--type=merge", "-p", patch)
        story.until(lambda: stalled().startswith("NobodyWaits"), "the job says that it is over")
        after = uids(story.pods())
        assert {name for name in before if before[name] != after[name]} == {"llama-coordinator"}


def test_a_deleted_pod_restarts_its_replica_only_and_the_status_says_why(story: Story) -> None:
    with story.operator():
        story.start()
        story.kubelet_starts(*TRAINERS)
        story.until(lambda: story.job()["status"]["state"] == "Starting", "the job starts")
        before = uids(story.pods())

        story.kubectl("delete", "pod", "llama-r2-a0-1", "--wait=false")
        story.until(lambda: {"llama-r2-a1-0", "llama-r2-a1-1"} <= story.pods().keys(), "replica 2 is back")
        story.kubelet_ends("llama-r2-a0-1", 143, phase="Failed")
        story.kubectl("delete", "pod", "llama-r2-a0-1", "--grace-period=0", "--force")
        line = "r2 llama-r2-a0-1 PodDeleted exit 143"
        story.until(lambda: story.job()["status"].get("lastFailure") == line, "the status has the exit code")

        others = {name: uid for name, uid in before.items() if "-r2-" not in name}
        assert others.items() <= uids(story.pods()).items()
        entry = story.job()["status"]["replicaStatuses"][2]
        assert (entry["attempt"], entry["restarts"]) == (1, 1)
        assert entry["lastFailure"]["node"] == "node-7"
        assert line in story.kubectl("get", "fthsdp")
        assert "ReplicaFailed" in story.kubectl("describe", "fthsdp", "llama")


def test_an_operator_that_was_killed_goes_on_where_it_stopped(story: Story) -> None:
    with story.operator() as killed:
        story.start()
        story.kubelet_starts(*TRAINERS)
        story.until(lambda: story.job()["status"]["state"] == "Starting", "the job starts")
        killed.kill()
        killed.wait(timeout=30)
    story.kubectl("delete", "pod", "llama-r0-a0-0", "--grace-period=0", "--force")
    with story.operator():
        story.until(lambda: {"llama-r0-a1-0", "llama-r0-a1-1"} <= story.pods().keys(), "replica 0 is back")
        assert story.job()["status"]["restarts"] == 1


def test_a_job_is_complete_when_its_pods_have_finished_and_is_deleted_in_time(story: Story) -> None:
    with story.operator():
        story.start(ttlSecondsAfterFinished=3)
        story.kubelet_starts(*TRAINERS)
        for name in TRAINERS:
            story.kubelet_ends(name, 0, phase="Succeeded")
        story.until(lambda: "llama" not in story.server.items("fthsdp", story.namespace), "the job is gone")
        story.until(lambda: not story.pods(), "the garbage collector took its pods")


def test_suspending_takes_the_pods_away_and_scaling_adds_some(story: Story) -> None:
    with story.operator():
        story.start()
        story.kubectl("scale", "fthsdp/llama", "--replicas=4")
        story.until(lambda: {"llama-r3-a0-0", "llama-r3-a0-1"} <= story.pods().keys(), "replica 3 exists")
        story.kubectl("patch", "fthsdp", "llama", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        story.until(lambda: not story.pods(), "no pod is left")
        story.until(lambda: story.job()["status"]["state"] == "Suspended", "the job says so")


def test_a_changed_template_reaches_pods_that_do_not_run_and_the_same_in_other_words_reaches_none(
    story: Story,
) -> None:
    def template(**container: Any) -> str:
        said = {"name": "train", "image": "x", "env": [{"name": "A", "value": "b"}], **container}
        return json.dumps({"spec": {"template": {"spec": {"containers": [said]}}}})

    with story.operator():
        story.start()
        before = uids(story.pods())
        story.kubectl("patch", "fthsdp", "llama", "--type=merge", "-p", template(resources={}, volumeMounts=[]))
        generation = story.job()["metadata"]["generation"]
        story.until(lambda: story.job()["status"]["observedGeneration"] == generation, "the operator has looked")
        assert uids(story.pods()) == before
        story.kubectl("patch", "fthsdp", "llama", "--type=merge", "-p", template(image="y"))
        second = {f"llama-r{replica}-a1-{index}" for replica in range(3) for index in range(2)}
        story.until(lambda: story.pods().keys() == {*second, "llama-coordinator"}, "all pods are new ones")
        revision = story.job()["status"]["updateRevision"]
        pods = story.pods()
        assert {pods[name]["metadata"]["labels"]["fthsdp.dev/revision"] for name in second} == {revision}
        assert {pods[name]["spec"]["containers"][0]["image"] for name in second} == {"y"}
        assert story.job()["status"]["restarts"] == 0


def test_nothing_of_a_job_is_marked_by_us_and_deleting_it_leaves_nothing(story: Story) -> None:
    kinds = ("pods", "secrets", "services", "roles", "rolebindings", "configmaps", "serviceaccounts")

    def ours() -> list[str]:
        return [name for kind in kinds for name in story.server.items(kind, story.namespace) if "llama" in name]

    with story.operator():
        story.start()
        story.kubelet_starts(*TRAINERS)
        for it in (story.job(), *story.pods().values()):
            assert "finalizers" not in it["metadata"]
            assert not [name for name in it["metadata"].get("annotations", {}) if "kopf" in name]
        assert len(ours()) == len(TRAINERS) + 7
    story.kubectl("delete", "fthsdp", "llama", "--timeout=30s")  # with no operator there
    for name in story.pods():
        story.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--ignore-not-found")
    story.until(lambda: not ours(), "nothing is left")
