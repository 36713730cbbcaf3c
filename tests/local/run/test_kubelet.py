"""Pods on this machine: their status, their deletion, their files."""

from __future__ import annotations

import asyncio
import os
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fthsdp_operator.api import ATTEMPT_LABEL, REPLICA_LABEL, ROLE_LABEL, Role
from fthsdp_operator.local.addresses import Addresses
from fthsdp_operator.local.folder import RunFolder
from fthsdp_operator.local.kubelet import Kubelet
from fthsdp_operator.local.objects import Objects

pytestmark = pytest.mark.local
DEADLINE = 20.0
Json = dict[str, Any]


class Node:
    """A kubelet with its store, and a way to wait for what should become of a pod."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.claim(path)
        self.objects = Objects()
        self.changes = asyncio.Event()
        self.forgotten: list[Json] = []
        self.kubelet = Kubelet(
            objects=self.objects,
            folder=self.folder,
            addresses=Addresses(),
            changed=self.changes.set,
            forgotten=self.forgotten.append,
        )

    async def start(self, script: str, **spec: Any) -> str:
        container = {"name": "main", "command": ["sh", "-c", script], **spec.pop("container", {})}
        labels = {ROLE_LABEL: "trainer", REPLICA_LABEL: "0", ATTEMPT_LABEL: "0"}
        meta = {"name": "pod", "namespace": "default", "labels": labels}
        pod = self.objects.add({"kind": "Pod", "metadata": meta, "spec": {"containers": [container], **spec}})
        assert pod is not None
        await self.kubelet.start(pod)
        return "pod"

    async def until(self, true: Callable[[Json | None], bool]) -> Json | None:
        while not true(pod := self.objects.get("Pod", "default", "pod")):
            await self.changes.wait()
            self.changes.clear()
        return pod


@asynccontextmanager
async def node(path: Path) -> AsyncIterator[Node]:
    there = Node(path / "run")
    async with asyncio.timeout(DEADLINE):
        yield there
        await there.kubelet.end_all(role=Role.TRAINER, grace=0)
    there.folder.close()


def run(test: Awaitable[None]) -> None:
    async def main() -> None:
        await test

    asyncio.run(main())


def phase(wanted: str) -> Callable[[Json | None], bool]:
    return lambda pod: pod is not None and pod["status"].get("phase") == wanted


def terminated(pod: Json | None) -> Json:
    assert pod is not None
    found: Json = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    return found


def test_a_pod_is_pending_then_running_then_succeeded(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            await there.start('read line < "$0"; exit 0', container={"args": [str(tmp_path / "fifo")]})
            assert phase("Pending")(there.objects.get("Pod", "default", "pod"))
            pod = await there.until(phase("Running"))
            assert pod is not None
            assert pod["status"]["podIP"] == "127.0.0.1"
            await asyncio.to_thread((tmp_path / "fifo").write_text, "go\n")
            ended = terminated(await there.until(phase("Succeeded")))
            assert (ended["exitCode"], ended["reason"]) == (0, "Completed")

    os.mkfifo(tmp_path / "fifo")
    run(check())


def test_a_failed_pod_tells_its_last_words(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            await there.start("echo 'data/x: no such folder' >&2; exit 2")
            ended = terminated(await there.until(phase("Failed")))
            assert (ended["exitCode"], ended["message"].strip()) == (2, "data/x: no such folder")

    run(check())


def test_a_pod_that_cannot_be_started_ends_as_a_configuration_error(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            await there.start("exit 0", volumes=[{"name": "key", "secret": {"secretName": "nobody"}}])
            ended = terminated(await there.until(phase("Failed")))
            assert ended["exitCode"] == 2
            assert "Secret nobody" in ended["message"]

    run(check())


def test_a_deleted_pod_may_end_by_itself_and_is_then_gone(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            ready, left = tmp_path / "ready", tmp_path / "left"
            os.mkfifo(ready)
            await there.start(f"trap 'echo left > {left}; exit 0' TERM; echo > {ready}; while :; do sleep 0.05; done")
            await asyncio.to_thread(ready.read_text)
            there.kubelet.stop("default", "pod", grace=60)
            pod = there.objects.get("Pod", "default", "pod")
            assert pod is not None
            assert pod["metadata"]["deletionGracePeriodSeconds"] == 60
            # As the API server writes it: when the grace period ends, not when the deletion was asked for.
            assert datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]) > datetime.now(UTC) + timedelta(
                seconds=30
            )
            await there.until(lambda pod: pod is None)
        assert (tmp_path / "left").read_text() == "left\n"

    run(check())


def test_a_deleted_pod_that_does_not_listen_is_killed_after_its_grace_period(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            ready = tmp_path / "ready"
            os.mkfifo(ready)
            await there.start(f"trap '' TERM; echo > {ready}; sleep 60", terminationGracePeriodSeconds=0.2)
            await asyncio.to_thread(ready.read_text)
            there.kubelet.stop("default", "pod", grace=None)
            await there.until(lambda pod: pod is None)
            assert terminated(there.forgotten[0])["exitCode"] == 137

    run(check())


def test_a_pod_that_has_ended_is_gone_as_soon_as_it_is_deleted(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            await there.start("exit 1")
            await there.until(phase("Failed"))
            there.kubelet.stop("default", "pod", grace=None)
            assert there.objects.get("Pod", "default", "pod") is None

    run(check())


def test_a_secret_is_a_private_file_that_goes_with_its_pod(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            key = {"key": b64encode(b"secret").decode()}
            there.objects.add({"kind": "Secret", "metadata": {"name": "j-key", "namespace": "default"}, "data": key})
            await there.start(
                'stat -c %a "$KEY"; cat "$KEY"; exit 1',
                container={
                    "volumeMounts": [{"name": "key", "mountPath": "/var/run/fthsdp"}],
                    "env": [{"name": "KEY", "value": "/var/run/fthsdp/key"}],
                },
                volumes=[{"name": "key", "secret": {"secretName": "j-key"}}],
            )
            assert terminated(await there.until(phase("Failed")))["message"] == "600\nsecret"
            there.kubelet.stop("default", "pod", grace=None)
            assert not there.folder.volume("pod").exists()

    run(check())


def test_a_container_with_restart_policy_on_failure_is_started_again_in_its_pod(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            mark = tmp_path / "mark"
            await there.start(f"test -e {mark} && exit 0; touch {mark}; exit 3", restartPolicy="OnFailure")
            pod = await there.until(phase("Succeeded"))
            assert pod is not None
            (status,) = pod["status"]["containerStatuses"]
            assert status["restartCount"] == 1
            assert status["lastState"]["terminated"]["exitCode"] == 3

    run(check())


def test_a_pod_that_waits_to_be_started_again_can_be_deleted(tmp_path: Path) -> None:
    async def check() -> None:
        async with node(tmp_path) as there:
            await there.start("exit 3", restartPolicy="OnFailure")
            await there.until(
                lambda pod: pod is not None and pod["status"]["containerStatuses"][0]["restartCount"] == 2
            )
            there.kubelet.stop("default", "pod", grace=None)
            assert there.objects.get("Pod", "default", "pod") is None

    run(check())
