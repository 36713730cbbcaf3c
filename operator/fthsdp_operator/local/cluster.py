"""A cluster of one machine: the seam of ``fthsdp_operator.cluster`` with processes in place of pods.

Everything that decides is the operator's own code, here as on Kubernetes. What the API server's storage, a kubelet and
a name service do for it there, ``Objects``, ``Kubelet`` and ``Addresses`` do here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from fthsdp.coordinator.client import OperatorClient
from fthsdp.coordinator.messages import Exited, Status
from fthsdp.errors import WireError
from fthsdp_operator.api import ATTEMPT_LABEL, JOB_LABEL, KIND, POD_INDEX_LABEL, REPLICA_LABEL, Job, Role
from fthsdp_operator.cluster import AlreadyExists, Conflict, Manifest
from fthsdp_operator.local.addresses import Addresses
from fthsdp_operator.local.containers import contents
from fthsdp_operator.local.folder import RunFolder
from fthsdp_operator.local.inject import Injection
from fthsdp_operator.local.kubelet import Kubelet
from fthsdp_operator.local.objects import Objects
from fthsdp_operator.manifests.render import secret_name
from fthsdp_operator.observed.observe import NodeView, PodView, view
from fthsdp_operator.rules.actions import Event

__all__ = ["LocalCluster"]

_COORDINATOR_TIMEOUT = 1.0
"""Seconds for an answer of the coordinator, which is a process on this machine."""


class LocalCluster:
    """The objects and processes of one job; ``on_event`` hears what the operator has to say to people."""

    coordinator_image = "this machine"

    def __init__(self, *, folder: RunFolder, on_event: Callable[[Event], None]) -> None:
        self.changed = asyncio.Event()
        """Set whenever something changes that a plan depends on."""
        self.last_words: deque[PodView] = deque(maxlen=256)
        """Pods as they were when they were forgotten."""
        self._objects = Objects()
        self._addresses = Addresses()
        self._kubelet = Kubelet(
            objects=self._objects,
            folder=folder,
            addresses=self._addresses,
            changed=self.changed.set,
            forgotten=self._forgotten,
        )
        self._on_event = on_event
        self._coordinator: OperatorClient | None = None

    # --- the seam -----------------------------------------------------------------------------------------------------

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        """Return the job, or None when it is gone."""
        return self._objects.get(KIND, namespace, name)

    def known_pods(self, namespace: str, job: str) -> list[PodView]:
        """Return all pods labelled with the job's name."""
        return [seen for seen in map(view, self._objects.list("Pod", namespace, {JOB_LABEL: job})) if seen is not None]

    async def list_pods(self, namespace: str, job: str) -> list[PodView]:
        """Return the same: nothing here is ever late."""
        return self.known_pods(namespace, job)

    def nodes(self) -> Mapping[str, NodeView]:
        """Return nothing: there is one machine, and whoever asks runs on it."""
        return {}

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return an object, or None."""
        return self._objects.get(kind, namespace, name)

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        """Store an object, and start it if it is a pod; raises AlreadyExists."""
        stored = self._objects.add(dict(manifest))
        if stored is None:
            raise AlreadyExists(f"{manifest['kind']} {manifest['metadata']['name']} is there already")
        if stored["kind"] == "Pod":
            await self._kubelet.start(stored)
        self.changed.set()
        return stored

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        """Delete the object with this uid; a pod goes once its processes have ended."""
        item = self._objects.get(kind, namespace, name)
        if item is None or item["metadata"]["uid"] != uid:
            return
        if kind == "Pod":
            self._kubelet.stop(namespace, name, grace=grace_seconds)
        else:
            self._objects.remove(kind, namespace, name)
        self.changed.set()

    async def label_pod(self, namespace: str, name: str, labels: Mapping[str, str], *, uid: str) -> None:
        """Set labels of the pod with this uid; a pod that shows them in a file does so at once."""
        pod = self._objects.get("Pod", namespace, name)
        if pod is not None and pod["metadata"]["uid"] == uid:
            self._kubelet.label(namespace, name, labels)

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        """Replace the job's status; raises Conflict when the job is not at this version any more."""
        job = self._objects.get(KIND, namespace, name)
        if job is None or job["metadata"]["resourceVersion"] != resource_version:
            raise Conflict(f"{KIND} {name} has changed")
        changed = self._objects.change(KIND, namespace, name, lambda item: item.update(status=dict(status)))
        assert changed is not None
        return changed

    async def tell_coordinator(self, job: Job, message: Exited) -> None:
        """Send a message to the job's coordinator; one that does not listen is no error."""
        try:
            await self._client(job).exited(message)
        except WireError:
            return

    async def coordinator_status(self, job: Job) -> Status | None:
        """Ask the job's coordinator; None when it does not answer."""
        try:
            return await self._client(job).status()
        except WireError:
            return None

    async def record_event(self, job: Job, event: Event, now: float) -> None:
        """Let people see what happened."""
        self._on_event(event)

    # --- beyond the seam: what only a launcher on the same machine can do ---------------------------------------------

    def submit(self, manifest: Manifest) -> Manifest:
        """Store the job, as ``kubectl apply`` would."""
        stored = self._objects.add(manifest)
        assert stored is not None
        return stored

    async def inject(self, job: Job, injection: Injection) -> list[str]:
        """Do what an injection says to the newest attempt of its replica; return the names of the pods it hit."""
        pods = self._objects.list("Pod", job.namespace, {JOB_LABEL: job.name, REPLICA_LABEL: str(injection.replica)})
        newest = max((pod["metadata"]["labels"][ATTEMPT_LABEL] for pod in pods), key=int, default="")
        hit = []
        for pod in pods:
            labels, name = pod["metadata"]["labels"], pod["metadata"]["name"]
            chosen = injection.pod is None or labels[POD_INDEX_LABEL] == str(injection.pod)
            if labels[ATTEMPT_LABEL] != newest or not chosen or pod["status"].get("phase") != "Running":
                continue
            hit.append(name)
            if injection.kind.signal is None:
                await self.delete("Pod", job.namespace, name, uid=pod["metadata"]["uid"], grace_seconds=None)
            else:
                self._kubelet.signal(job.namespace, name, injection.kind.signal)
        return hit

    async def close(self, *, grace: float) -> None:
        """End everything: the coordinator first, so that it writes its record before it sees the others go."""
        if self._coordinator is not None:
            await self._coordinator.close()
        await self._kubelet.end_all(role=Role.COORDINATOR, grace=grace)
        await self._kubelet.end_all(role=Role.TRAINER, grace=grace)

    def _forgotten(self, pod: Manifest) -> None:
        seen = view(pod)
        assert seen is not None
        self.last_words.append(seen)

    def _client(self, job: Job) -> OperatorClient:
        if self._coordinator is None:
            secret = self._objects.get("Secret", job.namespace, secret_name(job.name))
            if secret is None:
                raise WireError("the job has no key yet")
            key = contents(secret)["key"].strip()
            self._coordinator = OperatorClient(
                self._addresses.coordinator, key, job=job.name, timeout=_COORDINATOR_TIMEOUT
            )
        return self._coordinator
