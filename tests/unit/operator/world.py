"""A cluster in memory, at the operator's one seam, with a kubelet and a coordinator that do what a test tells them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from fthsdp.coordinator.messages import Cause, Crash, Exited, ReplicaStatus, Role, Status, Verdict
from fthsdp_operator.api import (
    API_VERSION,
    ATTEMPT_LABEL,
    JOB_LABEL,
    KIND,
    POD_INDEX_LABEL,
    REPLICA_LABEL,
    Condition,
    Job,
    format_time,
    parse_job,
)
from fthsdp_operator.cluster import AlreadyExists, Conflict, Manifest
from fthsdp_operator.execute import Witness, reconcile
from fthsdp_operator.observed.observe import NodeView, PodView, view
from fthsdp_operator.rules.actions import Event

NOW = 1_800_000_000.0
NAMESPACE, NAME = "team", "llama"
GRACE = 30.0


def template(image: str = "y") -> dict[str, Any]:
    """Return another template than that of ``manifest``."""
    return {"spec": {"containers": [{"name": "train", "image": image, "command": ["train"]}]}}


def manifest(**spec: Any) -> Manifest:
    """Return a job of three replicas with two pods each."""
    template = {"spec": {"containers": [{"name": "train", "image": "x", "command": ["train"]}]}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": NAME, "namespace": NAMESPACE, "uid": "job-1", "generation": 1, "resourceVersion": "1"},
        "spec": {
            "replicas": 3,
            "minReplicas": 2,
            "podsPerReplica": 2,
            "retainFailedPods": 0,
            "template": template,
            **spec,
        },
    }


class Killed(BaseException):
    """The operator was killed at this call."""


class World:
    """Implements ``fthsdp_operator.cluster.Cluster``."""

    def __init__(self, job: Manifest | None = None) -> None:
        self.coordinator_image = "fthsdp-operator:test"
        self.now = NOW
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.told: list[Exited] = []
        self.events: list[Event] = []
        self.writes: list[str] = []
        """Every call that changes something, in order."""
        self.kill_at: int | None = None
        """The number of the write before which the operator is killed."""
        self.coordinator: Status | None = None
        self.deaf = False
        """The coordinator does not hear what it is told."""
        self.last_words: list[PodView] = []
        self.node_views: dict[str, NodeView] = {}
        """Nodes of which something is known, by name."""
        self.witness: Witness | None = None
        self._uids = itertools.count(1)
        self.objects[KIND, NAME] = copy.deepcopy(job or manifest())

    # --- the seam ---

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        return await self.get(KIND, namespace, name)

    def known_pods(self, namespace: str, job: str) -> list[PodView]:
        pods = [it for (kind, _), it in self.objects.items() if kind == "Pod"]
        found = (view(pod) for pod in pods if pod["metadata"].get("labels", {}).get(JOB_LABEL) == job)
        return [seen for seen in found if seen is not None]

    async def list_pods(self, namespace: str, job: str) -> list[PodView]:
        return self.known_pods(namespace, job)

    def nodes(self) -> Mapping[str, NodeView]:
        return self.node_views

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return copy.deepcopy(self.objects.get((kind, name)))

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        key = (manifest["kind"], manifest["metadata"]["name"])
        self._write(f"create {' '.join(key)}")
        if key in self.objects:
            raise AlreadyExists(" ".join(key))
        made = copy.deepcopy(dict(manifest))
        made["metadata"] |= {"uid": f"uid-{next(self._uids)}"}
        if made["kind"] == "Pod":
            made["status"] = {"phase": "Pending"}
        self.objects[key] = made
        return made

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        self._write(f"delete {kind} {name}")
        kind = kind.partition(".")[0]
        there = self.objects.get((kind, name))
        if there is None or (uid and there["metadata"]["uid"] != uid):
            return
        if kind == "Pod" and grace_seconds != 0 and there["status"]["phase"] == "Running":
            self.user_deletes(name)
        else:
            self.vanish(name, kind=kind)

    async def label_pod(self, namespace: str, name: str, labels: Mapping[str, str], *, uid: str) -> None:
        self._write(f"label Pod {name} {' '.join(labels.values())}")
        there = self.objects.get(("Pod", name))
        if there is not None and there["metadata"]["uid"] == uid:
            there["metadata"]["labels"] |= labels

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        self._write("status")
        job = self.objects[KIND, name]
        if job["metadata"]["resourceVersion"] != resource_version:
            raise Conflict(name)
        job["status"] = copy.deepcopy(dict(status))
        job["metadata"]["resourceVersion"] = str(int(resource_version) + 1)
        return copy.deepcopy(job)

    async def tell_coordinator(self, job: Job, message: Exited) -> None:
        self._write(f"tell {message.replica}")
        self.told.append(message)
        if self.coordinator is not None and not self.deaf:
            others = [it for it in self.coordinator.replicas if (it.replica, it.attempt) != self._who(message)]
            gone = {*self.coordinator.abandoned, *([message.replica] if message.final else [])}
            heard = {"replicas": tuple(others), "abandoned": tuple(sorted(gone))}
            self.coordinator = self.coordinator.model_copy(update=heard)

    @staticmethod
    def _who(message: Exited) -> tuple[int, int]:
        return message.replica, message.attempt

    async def coordinator_status(self, job: Job) -> Status | None:
        return self.coordinator

    async def record_event(self, job: Job, event: Event, now: float) -> None:
        self.events.append(event)

    def _write(self, what: str) -> None:
        if self.kill_at is not None and len(self.writes) >= self.kill_at:
            raise Killed(what)
        self.writes.append(what)

    # --- what happens in it ---

    @property
    def job(self) -> Job:
        """The job as it stands."""
        return parse_job(self.objects[KIND, NAME])

    def condition(self, kind: str) -> Condition:
        """A condition of the job's status."""
        return next(it for it in self.job.status.conditions if it.type == kind)

    @property
    def pods(self) -> dict[str, str]:
        """UIDs of the training pods that nobody deleted, by name without the job's."""
        pods = (it["metadata"] for (kind, _), it in self.objects.items() if kind == "Pod")
        return {
            meta["name"].removeprefix(f"{NAME}-"): meta["uid"]
            for meta in pods
            if REPLICA_LABEL in meta["labels"] and "deletionTimestamp" not in meta
        }

    def pod(self, name: str) -> Manifest:
        """Return a pod by its name without the job's."""
        return self.objects["Pod", name if name.startswith(NAME) else f"{NAME}-{name}"]

    def user_changes(self, **spec: Any) -> None:
        """The user edits the job."""
        job = self.objects[KIND, NAME]
        job["spec"] |= spec
        job["metadata"]["generation"] += 1
        job["metadata"]["resourceVersion"] = str(int(job["metadata"]["resourceVersion"]) + 1)

    def user_deletes(self, name: str) -> None:
        """A running pod is asked to stop."""
        grace = {"deletionTimestamp": format_time(self.now + GRACE), "deletionGracePeriodSeconds": int(GRACE)}
        self.pod(name)["metadata"] |= grace

    def vanish(self, name: str, *, kind: str = "Pod") -> None:
        """An object is gone; of a pod the last words are heard."""
        key = (kind, name) if (kind, name) in self.objects else (kind, f"{NAME}-{name}")
        gone = self.objects.pop(key)
        if kind == "Pod":
            self.last_words += [last for last in [view(gone)] if last is not None]

    def the_deleted_vanish(self) -> None:
        """All that was asked to stop has."""
        for name in [key[1] for key, it in self.objects.items() if "deletionTimestamp" in it["metadata"]]:
            self.vanish(name)

    def exits(self, name: str, code: int, *, reason: str = "", words: str = "") -> None:
        """The container of a pod ends, with these last words."""
        ended = {"exitCode": code, "reason": reason or ("Completed" if code == 0 else "Error")}
        ended |= {"message": words} if words else {}
        state = {"terminated": ended | {"finishedAt": format_time(self.now)}}
        container = {"name": "train", "state": state}
        phase = "Succeeded" if code == 0 else "Failed"
        self.pod(name)["status"] |= {"phase": phase, "containerStatuses": [container]}

    def launcher_says(self, name: str, code: int, *, words: str = "", oom_killed: bool = False) -> None:
        """The command of a pod ended, and its launcher, whose container runs on, has told the coordinator."""
        assert self.coordinator is not None
        labels = self.pod(name)["metadata"]["labels"]
        replica, attempt, index = (int(labels[it]) for it in (REPLICA_LABEL, ATTEMPT_LABEL, POD_INDEX_LABEL))
        verdict = Verdict(
            replica=replica,
            attempt=attempt,
            cause=Cause.EXITED,
            reason=f"a training process ended with exit code {code}",
            crash=Crash(pod=index, exit_code=code, words=words, oom_killed=oom_killed),
        )
        others = tuple(it for it in self.coordinator.replicas if (it.replica, it.attempt) != (replica, attempt))
        heard = {"replicas": others, "verdicts": (*self.coordinator.verdicts, verdict)}
        self.coordinator = self.coordinator.model_copy(update=heard)

    def kubelet_places(self, name: str) -> None:
        """A pod has a node, and does not run yet."""
        self.pod(name)["spec"]["nodeName"] = "node-1"

    def kubelets_start_everything(self) -> None:
        """All pending pods run."""
        for (kind, _), it in self.objects.items():
            if kind == "Pod" and it["status"]["phase"] == "Pending":
                it["spec"]["nodeName"] = "node-1"
                it["status"]["phase"] = "Running"

    def everybody_trains(self, *, step: int = 10, finished: bool = False) -> None:
        """The coordinator has all running replicas as members; who trains goes on, and the first others fill up."""
        running = {
            (int(it["metadata"]["labels"][REPLICA_LABEL]), int(it["metadata"]["labels"][ATTEMPT_LABEL]))
            for (kind, _), it in self.objects.items()
            if kind == "Pod" and REPLICA_LABEL in it["metadata"]["labels"] and it["status"]["phase"] == "Running"
            if "deletionTimestamp" not in it["metadata"]
        }
        known = self.coordinator.replicas if self.coordinator else ()
        before = {(it.replica, it.attempt) for it in known if it.role is Role.ACTIVE}
        active = sorted(running, key=lambda who: (who not in before, who))[: self.job.spec.replicas]
        members = tuple(
            ReplicaStatus(
                replica=replica,
                attempt=attempt,
                role=Role.ACTIVE if (replica, attempt) in active else Role.SHADOW,
                step=step,
            )
            for replica, attempt in sorted(running)
        )
        self.coordinator = Status(epoch=1, paused=False, finished=finished, step=step, loss=2.5, replicas=members)

    async def look(self) -> float:
        """Reconcile once; returns when it wants to look again, in seconds from now."""
        return await reconcile(self, NAMESPACE, NAME, self.now, last_words=self.last_words, witness=self.witness)

    async def settle(self) -> None:
        """Reconcile until that changes nothing any more."""
        for _ in range(20):
            before = len(self.writes)
            await self.look()
            if len(self.writes) == before:
                return
        raise AssertionError(f"it never settles: {self.writes[-10:]}")

    async def train(self, *, step: int = 10) -> None:
        """Bring the job to where all replicas train."""
        await self.settle()
        self.kubelets_start_everything()
        self.everybody_trains(step=step)
        await self.settle()
