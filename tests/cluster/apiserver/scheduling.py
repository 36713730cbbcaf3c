"""A scheduler for an API server, and nodes that are only entries: pods are given a node, and never run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.apiserver.server import ApiServer, daemon, programs
from tests.cluster.kube.shell import until

__all__ = ["Machines", "scheduler"]

DEADLINE = 60.0


@contextmanager
def scheduler(server: ApiServer, folder: Path, *options: str) -> Iterator[Path]:
    """Run the scheduler while this lasts; yields its log. Call it with one at a time for a server."""
    fixed = (f"--kubeconfig={server.kubeconfig}", "--leader-elect=false", "--secure-port=0")
    with daemon(folder, ["kube-scheduler", *fixed, *options]):
        yield folder / "kube-scheduler.log"


def why_no_scheduler() -> str:
    """Return what is missing, in words; empty when nothing is."""
    return "" if (programs() / "kube-scheduler").exists() else f"no kube-scheduler in {programs()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Nodes of one test, known by a label that its pods ask for, and closed to those of others."""

    server: ApiServer
    namespace: str

    def add(self, name: str, *, room: int, labels: Mapping[str, str] | None = None) -> None:
        """Add a node on which ``room`` pods fit that ask for one CPU each."""
        capacity = {"cpu": str(room), "memory": "64Gi", "pods": "110"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": f"{self.namespace}-{name}", "labels": {"test": self.namespace, **(labels or {})}},
            "spec": {"taints": [{"key": "test", "value": self.namespace, "effect": "NoSchedule"}]},
            "status": {"capacity": capacity, "allocatable": capacity},
        }
        self.server.kubectl("create", "-f", "-", stdin=json.dumps(node))

    def template(self, **pod: object) -> dict[str, object]:
        """Return a pod template whose pods fit here only."""
        resources = {"requests": {"cpu": "1"}}
        train = {"name": "train", "image": "x", "resources": resources}
        # The API server marks each new node as not ready, and nobody is here to say otherwise.
        ours = [{"key": "test", "value": self.namespace}, {"key": "node.kubernetes.io/not-ready", "operator": "Exists"}]
        here = {"nodeSelector": {"test": self.namespace}, "tolerations": ours}
        return {"spec": {**here, "containers": [train], **pod}}

    def places(self) -> dict[str, str]:
        """Return the node of each pod that has one, both by their short names."""
        pods = self.server.items("pods", self.namespace).values()
        placed = {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods}
        return {name: node.removeprefix(f"{self.namespace}-") for name, node in placed.items() if node}

    def wait(self, names: Sequence[str], log: Path) -> dict[str, str]:
        """Wait until these pods have a node, and return those of all that have."""
        until(lambda: set(names) <= self.places().keys(), f"{', '.join(names)} have a node", timeout=DEADLINE, log=log)
        return self.places()

    def refusal(self, pod: str) -> str:
        """Return why the scheduler finds no node for a pod; empty while it has not said so."""
        conditions = self.server.items("pods", self.namespace)[pod].get("status", {}).get("conditions", [])
        found = [it for it in conditions if it["type"] == "PodScheduled" and it["status"] == "False"]
        return found[0].get("message", "") if found else ""
