"""What an operator at a real API server shows and logs of a failure."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_operator import TRAINERS, Story
from tests.ports import free_port

pytestmark = pytest.mark.cluster


class Watched(Story):
    """A story whose operator can be asked for its numbers."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path) -> None:
        super().__init__(server, namespace, folder)
        self.port = free_port()
        self.options = (f"--metrics-port={self.port}", "--log-format=json")

    def metrics(self) -> dict[str, float]:
        """Return all series with their values."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
            lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def lines(self) -> list[dict[str, object]]:
        """Return all that was logged; every line is JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def story(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Watched:
    return Watched(apiserver, namespace, tmp_path)


def labelled(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}"


def stage(name: str) -> str:
    return labelled("fthsdp_recovery_seconds_count", {"stage": name})


def test_a_failure_and_what_became_of_it_are_counted_and_logged(story: Watched) -> None:
    with story.operator(*story.options):
        story.start()
        story.kubelet_starts(*TRAINERS)
        story.until(lambda: story.job()["status"]["state"] == "Starting", "the job starts")
        story.kubectl("delete", "pod", "llama-r2-a0-1", "--wait=false")
        story.until(lambda: {"llama-r2-a1-0", "llama-r2-a1-1"} <= story.pods().keys(), "replica 2 is back")
        story.kubelet_starts("llama-r2-a1-0", "llama-r2-a1-1")
        story.until(lambda: story.metrics().get(stage("start")) == 1, "the new pods are seen to run")
        shown = story.metrics()
        failures = labelled("fthsdp_replica_failures_total", {"action": "RestartReplicaFree", "reason": "PodDeleted"})
        assert shown[failures] == 1
        assert [shown.get(stage(name)) for name in ("detect", "evict", "schedule", "join")] == [1, 1, 1, None]
        of_job = {"job": "llama", "namespace": story.namespace}
        assert shown[labelled("fthsdp_job_replicas", {**of_job, "state": "Starting"})] == 3
        assert shown["fthsdp_reconcile_errors_total"] == 0
        story.kubectl("delete", "fthsdp", "llama")
        story.until(lambda: not any("llama" in series for series in story.metrics()), "its series are gone")
    failed = [line for line in story.lines() if "ReplicaFailed" in str(line["message"])]
    assert [(line["namespace"], line["job"], line["replica"], line["attempt"]) for line in failed] == [
        (story.namespace, "llama", 2, 0)
    ]
