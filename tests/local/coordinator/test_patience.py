"""An operator gets its answer from a coordinator that works, and does not wait for one that does not."""

from __future__ import annotations

import asyncio
import base64
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fthsdp.coordinator.messages import Exited
from fthsdp_operator.api import API_VERSION, KIND, Job, parse_job
from fthsdp_operator.kube.coordinators import PATIENCE, TIMEOUT, Coordinators

pytestmark = pytest.mark.local

KEY = b"k" * 32
HERE = "127.0.0.1"
SLACK = 0.5
"""Seconds that a machine with other things to do may add."""
AT_ONCE = 0.1
"""Seconds: less than half of what a look waits."""
DEADLINE = 30.0


@pytest.fixture
def process(coordinator: Callable[..., Any]) -> Any:
    return coordinator(replicas=3)


@pytest.fixture
def job() -> Job:
    template = {"spec": {"containers": [{"name": "train", "image": "x"}]}}
    spec = {"replicas": 3, "template": template}
    return parse_job({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "job"}, "spec": spec})


@pytest.fixture
def silent() -> Iterator[int]:
    """A port on which connections succeed and nobody says a word."""
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        listener.listen()
        yield listener.getsockname()[1]


class Secrets:
    """What the operator reads, and how often."""

    def __init__(self) -> None:
        self.read = 0

    async def __call__(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        assert (kind, name) == ("Secret", "job-key")
        self.read += 1
        return {"data": {"key": base64.b64encode(KEY).decode()}}


@asynccontextmanager
async def coordinators(port: int, secrets: Secrets) -> AsyncIterator[Coordinators]:
    talking = Coordinators(secrets, port=port)
    try:
        yield talking
    finally:
        await talking.close()
        assert len(asyncio.all_tasks()) == 1, "something goes on after it was closed"


def test_a_coordinator_that_works_answers_every_look_over_one_connection(process: Any, job: Job) -> None:
    secrets = Secrets()

    async def story() -> None:
        async with coordinators(process.port, secrets) as talking:
            for _ in range(5):
                assert await talking.status(job, HERE) is not None

    asyncio.run(story())
    assert secrets.read == 1


def test_a_coordinator_without_an_address_is_not_asked(job: Job) -> None:
    secrets = Secrets()

    async def story() -> None:
        async with coordinators(1, secrets) as talking:
            assert await talking.status(job, "") is None
            await talking.tell(job, "", exited())

    asyncio.run(story())
    assert secrets.read == 0


def test_one_that_says_nothing_is_waited_for_once_and_shortly(silent: int, job: Job) -> None:
    async def story() -> None:
        async with coordinators(silent, Secrets()) as talking:
            assert await seconds(talking.status(job, HERE)) < PATIENCE + SLACK
            for _ in range(3):
                assert await seconds(talking.status(job, HERE)) < AT_ONCE
                assert await seconds(talking.tell(job, HERE, exited())) < AT_ONCE

    asyncio.run(story())


def test_one_that_froze_is_heard_again_when_it_is_back(process: Any, job: Job) -> None:
    async def story() -> None:
        async with coordinators(process.port, Secrets()) as talking:
            assert await talking.status(job, HERE) is not None
            process.popen.send_signal(signal.SIGSTOP)
            assert await talking.status(job, HERE) is None
            process.popen.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + DEADLINE
            while await talking.status(job, HERE) is None:
                assert time.monotonic() < deadline
                await asyncio.sleep(TIMEOUT / 10)
            assert await talking.status(job, HERE) is not None, "it is waited for again"

    asyncio.run(story())


def test_a_job_of_the_same_name_is_not_told_what_the_one_before_was(process: Any, job: Job) -> None:
    secrets = Secrets()
    later = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "another"})})

    async def story() -> None:
        async with coordinators(process.port, secrets) as talking:
            assert await talking.status(job, HERE) is not None
            assert await talking.status(later, "") is None
            assert await talking.status(later, HERE) is not None

    asyncio.run(story())
    assert secrets.read == 2, "the key of the one before was used"


def test_an_answer_of_another_pod_is_none_of_this_one(silent: int, job: Job) -> None:
    async def story() -> None:
        async with coordinators(silent, Secrets()) as talking:
            assert await talking.status(job, HERE) is None
            asked = talking._lines[job.namespace, job.name].question
            assert await talking.status(job, "127.0.0.2") is None
            assert talking._lines[job.namespace, job.name].question is not asked

    asyncio.run(story())


def exited() -> Exited:
    return Exited(replica=1, attempt=0, reason="killed", detected=time.time())


async def seconds(call: Any) -> float:
    began = time.monotonic()
    await call
    return time.monotonic() - began
