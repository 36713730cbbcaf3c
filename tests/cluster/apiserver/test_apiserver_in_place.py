"""A crash in place, with a real API server and a real coordinator: pods keep their names and UIDs, and get a label."""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_operator import TRAINERS, Story, uids

from fthsdp.launcher.report import Crash, tell
from fthsdp_operator.api import ATTEMPT_LABEL
from fthsdp_operator.manifests.render import COORDINATOR_PORT

pytestmark = pytest.mark.cluster

TEMPLATE = {"spec": {"containers": [{"name": "train", "image": "x", "command": ["python", "train.py"]}]}}


@pytest.fixture
def story(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Story:
    return Story(apiserver, namespace, tmp_path)


@contextmanager
def coordinator(story: Story, folder: Path, *, host: str) -> Iterator[dict[str, str]]:
    """Run what the coordinator's pod would run, and say where; yields how a launcher of replica 2, pod 1 finds it."""
    key = json.loads(story.kubectl("get", "secret", "llama-key", "-o", "json"))["data"]["key"]
    (folder / "key").write_bytes(base64.b64decode(key))
    options = {"--job": "llama", "--replicas": "3", "--min-replicas": "2", "--host": host}
    options |= {"--port": str(COORDINATOR_PORT), "--key-file": str(folder / "key"), "--store": f"file:{folder}/epoch"}
    command = [sys.executable, "-m", "fthsdp.coordinator", *(word for pair in options.items() for word in pair)]
    with (folder / "coordinator.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    address = f"{host}:{COORDINATOR_PORT}"
    env = {"FTHSDP_COORDINATOR": address, "FTHSDP_JOB": "llama", "FTHSDP_JOB_KEY_FILE": str(folder / "key")}
    try:
        story.until(lambda: listens(host), "the coordinator listens")
        story.says("llama-coordinator", {"podIP": host, "podIPs": [{"ip": host}]})
        yield env | {"FTHSDP_REPLICA": "2", "FTHSDP_POD_INDEX": "1"}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def listens(host: str) -> bool:
    with suppress(OSError), socket.create_connection((host, COORDINATOR_PORT), timeout=1):
        return True
    return False


def told(env: dict[str, str], attempt: int) -> None:
    """The launcher of a pod of replica 2 tells of a crash."""
    tell(env)(Crash(attempt=attempt, code=7, words="it breaks", time=time.time()))


def crash(story: Story, env: dict[str, str], attempt: int) -> None:
    """The launcher of a pod of replica 2 tells of a crash, and the operator puts the next attempt on its pods."""
    told(env, attempt)
    story.until(lambda: set(labels(story).values()) == {str(attempt + 1)}, "the pods are told")


def labels(story: Story) -> dict[str, str]:
    pods = {name: pod["metadata"] for name, pod in story.pods().items() if "-r2-" in name}
    return {name: meta["labels"][ATTEMPT_LABEL] for name, meta in pods.items()}


def entry(story: Story) -> dict[str, Any]:
    found: dict[str, Any] = story.job()["status"]["replicaStatuses"][2]
    return found


def test_pods_of_a_crashed_replica_stay_and_are_told_the_next_attempt(story: Story, tmp_path: Path) -> None:
    with story.operator():
        story.start(template=TEMPLATE, failurePolicy={"inPlace": {}, "backoff": {"initialSeconds": 0}})
        story.kubelet_starts(*TRAINERS, "llama-coordinator")
        story.until(lambda: story.job()["status"]["state"] == "Starting", "the job starts")
        before = uids(story.pods())
        with coordinator(story, tmp_path, host="127.0.29.1") as env:
            crash(story, env, 0)
            assert uids(story.pods()) == before
            now = entry(story)
            assert (now["attempt"], now["podsAttempt"], now["restarts"]) == (1, 0, 1)
            assert now["lastFailure"]["exitCode"] == 7
            line = "r2 llama-r2-a0-1 Error exit 7: it breaks; attempt 1 starts now in its pods"
            story.until(lambda: line in story.kubectl("describe", "fthsdp", "llama"), "an event says so")
            # The second one before it was stable: new pods.
            told(env, 1)
            story.until(lambda: {"llama-r2-a2-0", "llama-r2-a2-1"} <= story.pods().keys(), "it has new pods")
            assert "podsAttempt" not in entry(story)
        others = {name: uid for name, uid in before.items() if "-r2-" not in name}
        assert others.items() <= uids(story.pods()).items()
