"""How soon those that train on are told: from a pod's deletion, over operator and coordinator, to the other leaders."""

from __future__ import annotations

import base64
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.figures import Figure, at_most
from tests.bench.operator.client import Api, Pods
from tests.bench.operator.ground import Ground, ground
from tests.bench.operator.large import DEADLINE, Say, group_of, p99
from tests.bench.operator.sizes import Size
from tests.bench.operator.subject import NAMESPACE, create_job, job, jobs_path, operator, sure, wait_until, warm_up
from tests.bench.processes import Child, environment
from tests.local.coordinator.conftest import Leader

from fthsdp.coordinator.messages import Break, FromCoordinator
from fthsdp_operator.api import JOB_LABEL, ROLE_LABEL, Role
from fthsdp_operator.manifests.render import COORDINATOR_PORT, secret_name

__all__ = ["survivors_are_told"]

NAME = "told"
REPLICAS, PODS_PER_REPLICA = 3, 2
PATIENCE = 60.0


class Survivor(Leader):
    """A leader that knows when it was told that somebody is gone."""

    def __init__(self, replica: int, attempt: int, key: bytes) -> None:
        self.breaks: list[float] = []
        """When it heard each Break, in seconds of the monotonic clock."""
        self.told = threading.Event()
        super().__init__(f"127.0.0.1:{COORDINATOR_PORT}", replica, attempt, job=NAME, key=key)

    def _hear(self, message: FromCoordinator) -> None:
        if isinstance(message, Break):
            self.breaks.append(time.monotonic())
            self.told.set()
        super()._hear(message)


def survivors_are_told(size: Size, say: Say, folder: Path) -> list[Figure]:
    """Delete a pod of a job that trains, again and again; its coordinator is real, and so are its leaders' calls."""
    with ground(folder / "told", silent_coordinators=False) as under:
        under.add_nodes(REPLICAS * PODS_PER_REPLICA + 4)
        with (
            Pods(under.api, NAMESPACE, f"{JOB_LABEL}={NAME},{ROLE_LABEL}={Role.TRAINER}") as pods,
            operator(under) as running,
        ):
            warm_up(under.api, jobs_path(), job)
            create_job(under.api, job(NAME, REPLICAS, PODS_PER_REPLICA))
            pods.until(lambda: len(pods.running) == REPLICAS * PODS_PER_REPLICA, "all pods run", DEADLINE)
            with _coordinator(under) as key:
                took = _losses(size, under, pods, key)
            sure(running.process.alive, "the operator has ended")
    say(f"pod deleted → survivors are told: median {statistics.median(took):.3f} s, p99 {p99(took):.3f} s")
    return [
        Figure(
            name="pod deleted → the other replicas' leaders are told to stop for it, p99",
            values=(p99(took),),
            must=at_most(0.2),
            note="from the call that deletes a pod, whose process lives, until the last of the other leaders hears from"
            f" the coordinator: median {statistics.median(took):.3f} s, most of {len(took)}; {REPLICAS} replicas",
        )
    ]


@contextmanager
def _coordinator(under: Ground) -> Iterator[bytes]:
    """Run what the coordinator's pod would run; yields the job's key."""
    key = base64.b64decode(under.api.call("GET", _secret())["data"]["key"]).strip()
    (under.folder / "key").write_bytes(key)
    options = {"--job": NAME, "--replicas": str(REPLICAS), "--min-replicas": "1", "--port": str(COORDINATOR_PORT)}
    options |= {"--key-file": str(under.folder / "key"), "--store": f"file:{under.folder / 'epoch'}"}
    command = [sys.executable, "-m", "fthsdp.coordinator", *(word for pair in options.items() for word in pair)]
    process = Child("coordinator", command, log=under.folder / "coordinator.log", env=environment())
    try:
        yield key
    finally:
        process.end()


def _secret() -> str:
    return f"api/v1/namespaces/{NAMESPACE}/secrets/{secret_name(NAME)}"


def _losses(size: Size, under: Ground, pods: Pods, key: bytes) -> list[float]:
    """Delete a pod of one replica after the other, and let it come back; returns how long the news took each time."""
    leaders = {replica: Survivor(replica, 0, key) for replica in range(REPLICAS)}
    took = []
    try:
        for leader in leaders.values():
            leader.wait_for_epoch(1)
            leader.steps(1)
            leader.change(step=1)
        for number in range(size.told):
            _all_train(under.api, leaders)
            replica = number % REPLICAS
            others = [leader for leader in leaders.values() if leader.replica != replica]
            for leader in others:
                leader.told.clear()
            group = group_of(pods, replica)
            began = under.api.delete_pod(NAMESPACE, max(group))
            for leader in others:
                sure(leader.told.wait(PATIENCE), f"replica {leader.replica} was not told")
            took.append(max(leader.breaks[-1] for leader in others) - began)
            leaders[replica].client.close(timeout=0)
            pods.replaced(group, REPLICAS * PODS_PER_REPLICA, DEADLINE)
            leaders[replica] = Survivor(replica, leaders[replica].attempt + 1, key)
            leaders[replica].wait(lambda me: me.state.epoch > 0, "an epoch as a shadow")
            leaders[replica].change(step=others[0].state.step)  # it has the state that they have
    finally:
        for leader in leaders.values():
            leader.client.close(timeout=0)
    return took


def _all_train(api: Api, leaders: dict[int, Survivor]) -> None:
    """Wait until all take part, and the operator knows."""

    def trains() -> bool:
        number = max(leader.state.epoch for leader in leaders.values())
        together = number > 0 and all(leader.state.epoch == number for leader in leaders.values())
        status = api.call("GET", f"{jobs_path()}/{NAME}").get("status", {})
        return bool(together and status.get("ready") == f"{REPLICAS}/{REPLICAS}")

    wait_until(trains, "all replicas train")
