"""What is measured: the operator's own process, and the jobs it is given."""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.bench.operator.client import Api
from tests.bench.operator.ground import GPUS, Ground
from tests.bench.processes import BenchmarkFailed, Child, environment
from tests.cluster.kube.shell import ClusterError, until
from tests.ports import free_port

from fthsdp_operator.api import API_VERSION, KIND, PLURAL

__all__ = [
    "NAMESPACE",
    "Operator",
    "container",
    "create_job",
    "job",
    "jobs_path",
    "operator",
    "sure",
    "wait_until",
    "warm_up",
]

NAMESPACE = "default"
STARTS = 60.0
"""Seconds in which the operator, or a peer, has to be up."""


class Operator:
    """The operator, as people run it outside of a cluster."""

    def __init__(self, ground: Ground) -> None:
        self._port = free_port()
        command = [
            *(sys.executable, "-m", "fthsdp_operator.cli", "operator", "--kubeconfig", str(ground.kubeconfig)),
            *("--metrics-port", str(self._port), "--log-level", "warning"),
        ]
        self.process = Child("operator", command, log=ground.folder / "operator.log", env=environment())

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + STARTS
        while True:
            try:
                self.metrics()
                return
            except OSError:
                if not self.process.alive:
                    raise self.process.failure("ended while it started") from None
                if time.monotonic() > end:
                    raise self.process.failure(f"was not up after {STARTS:g} s") from None
                time.sleep(0.05)

    def metrics(self) -> dict[str, Metric]:
        """Return what it tells Prometheus, by name."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as answer:
            return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}

    def calls(self) -> dict[str, float]:
        """Return how many requests it has made to the API server, by verb, by its own count."""
        counted: dict[str, float] = {}
        for sample in self.metrics()["fthsdp_api_requests"].samples:
            counted[sample.labels["verb"]] = counted.get(sample.labels["verb"], 0.0) + sample.value
        return counted

    @property
    def memory(self) -> float:
        """MiB that it has in memory now."""
        return self._kilobytes("VmRSS") / 1024

    @property
    def peak_memory(self) -> float:
        """MiB that it had in memory at most."""
        return self._kilobytes("VmHWM") / 1024

    def _kilobytes(self, field: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1])

    def idle(self, seconds: float) -> float:
        """Watch it for so long and return the part of a core that it used."""
        began, before = time.monotonic(), self.process.processor_seconds
        time.sleep(seconds)
        return (self.process.processor_seconds - before) / (time.monotonic() - began)


@contextmanager
def operator(ground: Ground) -> Iterator[Operator]:
    """Run the operator; it is killed at the end."""
    running = Operator(ground)
    try:
        running.wait()
        yield running
    finally:
        running.process.end()


def container() -> dict[str, Any]:
    """Return the container of a training pod, ours and the peer's alike."""
    return {"name": "train", "image": "trainer", "resources": {"limits": {"nvidia.com/gpu": str(GPUS)}}}


def job(name: str, replicas: int, pods_per_replica: int) -> dict[str, Any]:
    """Return a job whose groups may be lost any number of times without waiting before they come back."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "podsPerReplica": pods_per_replica,
            "failurePolicy": {"backoff": {"initialSeconds": 0}},
            "template": {"spec": {"containers": [container()], "terminationGracePeriodSeconds": 1}},
        },
    }


def warm_up(api: Api, path: str, manifest: Callable[[str, int, int], dict[str, Any]]) -> None:
    """See one object of two pods come and go: whoever watches has begun to by then, and every path was taken once."""
    before = len(api.call("GET", _PODS)["items"])
    api.call("POST", path, manifest("warm-up", 1, 2))
    wait_until(lambda: _running(api) >= before + 2, "the pods of the warm-up run")
    api.call("DELETE", f"{path}/warm-up", {"propagationPolicy": "Background"})
    wait_until(lambda: len(api.call("GET", _PODS)["items"]) == before, "the pods of the warm-up are gone")


_PODS = f"api/v1/namespaces/{NAMESPACE}/pods"


def _running(api: Api) -> int:
    return sum(pod["status"].get("phase") == "Running" for pod in api.call("GET", _PODS)["items"])


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds, for as long as things take to start; raises BenchmarkFailed."""
    try:
        until(holds, what, timeout=STARTS)
    except ClusterError as error:
        raise BenchmarkFailed(str(error)) from error


def create_job(api: Api, manifest: Mapping[str, Any]) -> float:
    """Create a job and return when that was asked for."""
    began = time.monotonic()
    api.call("POST", jobs_path(), manifest)
    return began


def jobs_path() -> str:
    """Return where jobs are."""
    return f"apis/{API_VERSION}/namespaces/{NAMESPACE}/{PLURAL}"


def sure(condition: bool, words: str) -> None:
    """Raise BenchmarkFailed unless something holds without which the figure would mean nothing."""
    if not condition:
        raise BenchmarkFailed(words)
