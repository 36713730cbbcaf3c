"""A job that trains on a cluster, and how a test looks at it while something happens to some of its replicas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.shell import until

__all__ = ["LiveJob", "Outage", "entry_of", "state_of", "step_of", "trains_in_full"]

Object = dict[str, Any]
RECOVERED = 120.0
"""Seconds within which a process that imports torch is back, on two busy cores."""
STEPS = 60.0
"""Seconds within which some steps become final."""


def trains_in_full(status: Object) -> bool:
    """Return whether as many replicas train as are wanted."""
    return bool(status.get("state") == "Running" and status["readyReplicas"] == status["replicas"])


def state_of(status: Object, replica: int) -> str:
    """Return the state of a replica; empty while the status does not know it."""
    return str(entry_of(status, replica).get("state", ""))


def _failed(status: Object) -> bool:
    return bool(status.get("state") == "Failed")


def entry_of(status: Object, replica: int) -> Object:
    """Return what the status says of a replica; nothing while it does not know it."""
    entries = status.get("replicaStatuses", ())
    return next((entry for entry in entries if entry["index"] == replica), {})


def step_of(line: str) -> int:
    """Return the number of the step that a line of a coordinator's log speaks of; 0 for other lines."""
    return int(json.loads(line).get("step", 0)) if line.startswith("{") else 0


@dataclass(slots=True, kw_only=True)
class Outage:
    """What was seen of replicas that were away for a while."""

    before: Object
    """The job's status just before."""
    began: int
    """The newest step then."""
    after: Object = field(default_factory=dict)
    """Its status once they trained again."""
    meanwhile: int = 0
    """Steps that the others trained without all of them."""

    def failure(self, replica: int) -> Object:
        """Return why a replica was away, as the status says it."""
        found: Object = entry_of(self.after, replica)["lastFailure"]
        return found

    def attempt(self, replica: int) -> int:
        """Return the attempt that it was before."""
        return int(entry_of(self.before, replica)["attempt"])

    def restarts(self, replica: int) -> int:
        """Return how often it was restarted."""
        return int(entry_of(self.after, replica)["restarts"]) - int(entry_of(self.before, replica)["restarts"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """One job of a cluster."""

    kubectl: Kubectl
    namespace: str
    name: str

    def on(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl in the job's namespace."""
        return self.kubectl("--namespace", self.namespace, *arguments, stdin=stdin)

    def status(self) -> Object:
        """Return the job's status."""
        job = self.kubectl.get("fthsdp", self.name, "--namespace", self.namespace)
        return dict(job.get("status") or {})

    def until(self, holds: Callable[[Object], bool], what: str, *, timeout: float = RECOVERED) -> Object:
        """Wait for a status and return it; raises AssertionError when it does not come, or the job fails before."""
        return self.watched_until(holds, what, timeout=timeout)[-1]

    def watched_until(self, holds: Callable[[Object], bool], what: str, *, timeout: float = RECOVERED) -> list[Object]:
        """Do the same, and return each status on the way."""
        path = '--output=jsonpath={.status}{"\\n"}'
        with self.kubectl.watch("get", "fthsdp", self.name, "--watch", path, "--namespace", self.namespace) as seen:
            found = seen.wait_for(
                lambda line: line.startswith("{") and (_failed(json.loads(line)) or holds(json.loads(line))),
                what,
                timeout=timeout,
            )
            statuses = [json.loads(line) for line in seen.lines[: found + 1] if line.startswith("{")]
            assert holds(statuses[-1]), f"{what}: the job has failed before: {statuses[-1]}"
            return statuses

    def patch(self, spec: Object) -> None:
        """Change the job's spec."""
        self.on("patch", "fthsdp", self.name, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def pods(self) -> dict[str, Object]:
        """Return the job's training pods by name."""
        selector = f"--selector=fthsdp.dev/job={self.name},fthsdp.dev/role=trainer"
        found = self.kubectl.items("pods", "--namespace", self.namespace, selector)
        return {pod["metadata"]["name"]: pod for pod in found}

    def pod(self, replica: int) -> str:
        """Return the name of the one pod of a replica's newest attempt."""
        return f"{self.name}-r{replica}-a{entry_of(self.status(), replica)['attempt']}-0"

    def node(self, pod: str) -> str:
        """Return the node on which a pod runs."""
        return str(self.kubectl.get("pod", pod, "--namespace", self.namespace)["spec"]["nodeName"])

    def pods_of(self, *replicas: int) -> dict[str, tuple[str, int, str, bool]]:
        """Return what may not change of pods that nobody may touch: uid, restarts, phase, whether they are deleted."""
        return {
            name: (
                pod["metadata"]["uid"],
                sum(container["restartCount"] for container in pod["status"].get("containerStatuses", ())),
                pod["status"]["phase"],
                "deletionTimestamp" in pod["metadata"],
            )
            for name, pod in self.pods().items()
            if int(pod["metadata"]["labels"]["fthsdp.dev/replica"]) in replicas
        }

    def wait_for_coordinator(self) -> None:
        """Wait until the coordinator that runs is the one that the job wants: another size needs another one."""
        size = self.kubectl.get("fthsdp", self.name, "--namespace", self.namespace)["spec"]["replicas"]
        until(lambda: self._coordinator_is_of(size), f"a coordinator of {size} replicas runs", timeout=RECOVERED)

    def _coordinator_is_of(self, size: int) -> bool:
        selector = f"--selector=fthsdp.dev/job={self.name},fthsdp.dev/role=coordinator"
        found = self.kubectl.items("pods", "--namespace", self.namespace, selector)
        return any(
            json.loads(pod["metadata"]["annotations"]["fthsdp.dev/coordinator-config"])["replicas"] == size
            and "deletionTimestamp" not in pod["metadata"]
            and any((it["type"], it["status"]) == ("Ready", "True") for it in pod["status"].get("conditions", ()))
            for pod in found
        )

    def steps(self, lines: int = 20) -> list[Object]:
        """Return what the coordinator printed of the newest steps, as far as that is among so many lines."""
        log = self.on("logs", f"{self.name}-coordinator", f"--tail={lines}").splitlines()
        return [json.loads(line) for line in log if step_of(line)]

    def step(self) -> int:
        """Return the newest final step that the coordinator has printed; 0 while it has printed none."""
        return max((int(step["step"]) for step in self.steps()), default=0)

    def checkpoint(self) -> int:
        """Return the step of the checkpoint from which the run has started, as its coordinator says."""
        log = self.on("logs", f"{self.name}-coordinator", "--tail=400")
        return int(re.findall(r"the run starts from the checkpoint of step (\d+)", log)[-1])

    def times_of_steps(self, *, since: str) -> list[str]:
        """Return when replica 0 has seen steps become final, as Kubernetes writes times in UTC: they compare as text.

        Of the replicas that contribute to a step the lowest one prints it, whoever can read that just then.
        """
        log = self.on("logs", self.pod(0), "--timestamps", f"--since-time={since}").splitlines()
        return [found[1] for line in log if (found := re.match(r"(\S+) step \d+  ", line))]

    def trains_without_coordinator(self, steps: int = 3) -> None:
        """Wait until replica 0 has seen that many further steps become final."""
        log = ("logs", "--follow", "--tail=0", self.pod(0), "--namespace", self.namespace)
        with self.kubectl.watch(*log) as seen:
            seen.wait_for(
                lambda _: sum(line.startswith("step ") for line in seen.lines) >= steps,
                f"{steps} further steps are final",
                timeout=STEPS,
            )

    def trains_on(self, steps: int = 2) -> Object:
        """Wait until that many further steps are final, and return the status then."""
        goal = self.step() + steps
        log = ("logs", "--follow", "--tail=20", f"{self.name}-coordinator", "--namespace", self.namespace)
        with self.kubectl.watch(*log) as seen:
            seen.wait_for(lambda line: step_of(line) >= goal, f"step {goal} is final", timeout=STEPS)
        return self.status()

    @contextmanager
    def outage(self, *replicas: int) -> Iterator[Outage]:
        """Let the block do something to replicas; they come back as a later attempt, and nobody touches the others.

        When it ends all replicas train, and go on.
        """
        before = self.status()
        there = [entry["index"] for entry in before["replicaStatuses"] if entry["state"] == "Active"]
        others = [replica for replica in there if replica not in replicas]
        untouched = self.pods_of(*others)
        seen = Outage(before=before, began=self.step())
        yield seen
        seen.after = self.until(
            lambda status: (
                trains_in_full(status)
                and all(int(entry_of(status, replica)["attempt"]) > seen.attempt(replica) for replica in replicas)
            ),
            f"replicas {replicas} train again",
        )
        for step in self.steps(lines=400):
            trained = set(step["contributors"])
            seen.meanwhile += step["step"] > seen.began and set(others) <= trained and not set(replicas) <= trained
        assert self.pods_of(*others) == untouched
        for replica in others:
            assert entry_of(seen.after, replica)["attempt"] == entry_of(before, replica)["attempt"]
        self.trains_on()
