"""``Cluster`` on a Kubernetes API server. Apart from ``cluster.py`` so that ``fthsdp run`` need not load the client."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Collection as Group
from typing import Any
from urllib.parse import quote

import aiohttp

from fthsdp.coordinator.messages import Exited, Status
from fthsdp.errors import ConfigError
from fthsdp_operator.api import API_VERSION, JOB_LABEL, KIND, PLURAL, Job, coordinator_name, format_time
from fthsdp_operator.cluster import AlreadyExists, ClusterError, Conflict, Manifest, NamespaceEnding, Unanswered
from fthsdp_operator.informers.sight import EVERYWHERE, Sight
from fthsdp_operator.kube.collection import Collection
from fthsdp_operator.kube.coordinators import Coordinators
from fthsdp_operator.kube.requests import Access, NotFound, Requests
from fthsdp_operator.manifests.gang import GROUP_API, group_kind
from fthsdp_operator.manifests.render import BUDGET
from fthsdp_operator.observed.known import JobPods
from fthsdp_operator.observed.observe import NodeView, PodView, view
from fthsdp_operator.rules.actions import Event

__all__ = ["KubernetesCluster"]

log = logging.getLogger(__name__)

PROBE_TIMEOUT = 3.0
"""Seconds for the question whether the API server answers at all: a kubelet waits for what follows from it."""

_COLLECTIONS = {
    KIND: f"apis/{API_VERSION}/namespaces/{{}}/{PLURAL}",
    "Pod": "api/v1/namespaces/{}/pods",
    "Secret": "api/v1/namespaces/{}/secrets",
    "ConfigMap": "api/v1/namespaces/{}/configmaps",
    "ServiceAccount": "api/v1/namespaces/{}/serviceaccounts",
    "Service": "api/v1/namespaces/{}/services",
    "Event": "api/v1/namespaces/{}/events",
    "Lease": "apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "Role": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    BUDGET: "apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    **{group_kind(provider): f"apis/{api}/namespaces/{{}}/podgroups" for provider, api in GROUP_API.items()},
}


class KubernetesCluster:
    """Jobs, pods and everything else as objects of an API server."""

    def __init__(self, requests: Requests, *, coordinator_image: str) -> None:
        self.coordinator_image = coordinator_image
        self._requests = requests
        self._sight = Sight(pods={})
        self._coordinators = Coordinators(self.get)

    @classmethod
    async def connect(
        cls,
        access: Access,
        *,
        coordinator_image: str,
        traces: Sequence[aiohttp.TraceConfig] = (),
        most: int | None = None,
    ) -> KubernetesCluster:
        """Connect; ``traces`` are told of every request, ``most``: connections at a time, 0 for any number.

        Raises ConfigError when there is no access.
        """
        requests = await Requests.connect(access, traces=traces, most=most)
        return cls(requests, coordinator_image=coordinator_image)

    def sight(self, namespaces: Sequence[str]) -> Sight:
        """Return what can be seen over these connections once somebody follows it; no namespaces: all of them."""
        pods = {
            namespace: Collection(self._requests, _everywhere("pods", namespace), selector=JOB_LABEL)
            for namespace in namespaces or [EVERYWHERE]
        }
        return Sight(pods=pods, nodes=Collection(self._requests, "api/v1/nodes"))

    def see(self, sight: Sight) -> None:
        """Take pods and nodes from there from now on, and tell it of pods that are created, read or deleted here."""
        self._sight = sight

    def only_while(self, time_left: Callable[[], float]) -> None:
        """Ask this before each call from now on: it returns the seconds that one may take, or does not return."""
        self._requests.only_while(time_left)

    async def check(self) -> None:
        """Make sure that the API server answers and knows our kind; raises ConfigError."""
        try:
            await self._requests.make("GET", f"apis/{API_VERSION}")
        except NotFound as error:
            raise ConfigError(
                f"the cluster has no {KIND}: install its definition with 'kubectl apply -f crds/{PLURAL}.yaml'"
                " or with the Helm chart"
            ) from error
        except ClusterError as error:
            raise ConfigError(str(error)) from error

    async def answers(self) -> bool:
        """The API server answers within a few seconds, whatever it says."""
        try:
            await self._requests.make("GET", f"apis/{API_VERSION}", timeout=PROBE_TIMEOUT)
        except Unanswered:
            return False
        except ClusterError:
            return True
        return True

    async def close(self) -> None:
        """Close all connections."""
        await self._coordinators.close()
        await self._requests.close()

    # --- objects ---

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        """Return the job, or None when it is gone."""
        job = await self.get(KIND, namespace, name)
        if job is None:
            await self._coordinators.hang_up((namespace, name))
        return job

    def known_pods(self, namespace: str, job: str) -> JobPods:
        """Return all pods labelled with the job's name, as far as they are known; raises ClusterError before that."""
        return self._sight.pods(namespace, job)

    async def list_pods(self, namespace: str, job: str) -> Group[PodView]:
        """Return all pods labelled with the job's name, as they are now."""
        pages = Collection(self._requests, _path("Pod", namespace), selector=f"{JOB_LABEL}={job}").list()
        pods = [pod async for page, _ in pages for pod in page]
        for pod in pods:
            self._sight.put(pod)
        return [seen for seen in map(view, pods) if seen is not None]

    def nodes(self) -> Mapping[str, NodeView]:
        """Return the nodes that are known, by name: none where the operator may not see nodes."""
        return self._sight.nodes()

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return an object as it is now, or None."""
        try:
            found = await self._requests.make("GET", _path(kind, namespace, name))
        except NotFound:
            return None
        if kind == "Pod":
            self._sight.put(found)
        return found

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        """Create an object; raises AlreadyExists."""
        path = _path(_kind(manifest), manifest["metadata"]["namespace"])
        made = await self._requests.make("POST", path, body=manifest)
        if manifest["kind"] == "Pod":
            self._sight.put(made)
        return made

    async def replace(self, manifest: Mapping[str, Any]) -> Manifest:
        """Replace an object; raises Conflict when it is not at the version that the manifest names any more."""
        metadata = manifest["metadata"]
        return await self._requests.make(
            "PUT", _path(manifest["kind"], metadata["namespace"], metadata["name"]), body=manifest
        )

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        """Delete the object with this uid; one that is gone, or has another uid by now, is left alone."""
        options: Manifest = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            left = await self._requests.make("DELETE", _path(kind, namespace, name), body=options)
        except NotFound:
            gone = True
        except Conflict:
            there = await self.get(kind, namespace, name)
            gone = there is None or there["metadata"]["uid"] != uid
        else:
            gone = grace_seconds == 0 or not _is_going(left)
            gone = gone and not left["metadata"].get("finalizers")
            if kind == "Pod" and not gone:
                self._sight.put(left)
        if kind == "Pod" and gone:
            self._sight.forget(namespace, uid)

    async def label_pod(self, namespace: str, name: str, labels: Mapping[str, str], *, uid: str) -> None:
        """Set labels of the pod with this uid; one that is gone, or has another uid by now, is left alone."""
        patch = {"metadata": {"uid": uid, "labels": dict(labels)}}
        path = _path("Pod", namespace, name)
        try:
            changed = await self._requests.make("PATCH", path, body=patch, content_type="application/merge-patch+json")
        except (NotFound, Conflict):
            return
        self._sight.put(changed)

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        """Replace the job's status; raises Conflict when the job is not at this version any more."""
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = f"{_path(KIND, namespace, name)}/status"
        try:
            return await self._requests.make("PATCH", path, body=patch, content_type="application/json-patch+json")
        except NotFound as error:
            raise Conflict(str(error)) from error

    # --- the coordinator ---

    async def tell_coordinator(self, job: Job, message: Exited) -> None:
        """Send a message to the job's coordinator. One that does not listen is no error: it is told again."""
        self._requests.time_left()
        await self._coordinators.tell(job, self._address(job), message)

    async def coordinator_status(self, job: Job) -> Status | None:
        """Ask the job's coordinator; None when it does not answer at once."""
        return await self._coordinators.status(job, self._address(job))

    def _address(self, job: Job) -> str:
        name = coordinator_name(job.name)
        pods = self.known_pods(job.namespace, job.name).replica(None)
        return next((pod.address for pod in pods if pod.name == name and pod.job_uid == job.metadata.uid), "")

    # --- events ---

    async def record_event(self, job: Job, event: Event, now: float) -> None:
        """Let people see what happened; never raises. The same event again counts up instead of filling the list."""
        digest = hashlib.sha256(f"{job.metadata.uid} {event.reason} {event.message}".encode()).hexdigest()[:16]
        name = f"{job.name}.{digest}"
        try:
            await self.create(_event(job, event, name, now))
        except AlreadyExists:
            await self._count_up(job.namespace, name, now)
        except NamespaceEnding:
            log.debug("%s/%s: no event is taken any more: the namespace is being deleted", job.namespace, job.name)
        except ClusterError as error:
            log.warning("%s/%s: event not recorded: %s", job.namespace, job.name, error)

    async def _count_up(self, namespace: str, name: str, now: float) -> None:
        try:
            count = ((await self.get("Event", namespace, name)) or {}).get("count", 1) + 1
            patch = {"count": count, "lastTimestamp": _seconds(now)}
            path = _path("Event", namespace, name)
            await self._requests.make("PATCH", path, body=patch, content_type="application/merge-patch+json")
        except ClusterError as error:
            log.warning("%s/%s: event not counted: %s", namespace, name, error)


def _kind(manifest: Mapping[str, Any]) -> str:
    """Return what we call its kind: several groups have a PodGroup."""
    kind: str = manifest["kind"]
    return kind if kind in _COLLECTIONS else f"{kind}.{manifest['apiVersion'].partition('/')[0]}"


def _path(kind: str, namespace: str, name: str | None = None) -> str:
    collection = _COLLECTIONS[kind].format(quote(namespace, safe=""))
    return collection if name is None else f"{collection}/{quote(name, safe='')}"


def _is_going(pod: Manifest) -> bool:
    """A pod that was deleted is still there: it has time to stop. One that is gone is shown as it was before."""
    return bool(pod["metadata"].get("deletionTimestamp")) and pod["metadata"].get("deletionGracePeriodSeconds") != 0


def _everywhere(plural: str, namespace: str) -> str:
    return f"api/v1/namespaces/{quote(namespace, safe='')}/{plural}" if namespace else f"api/v1/{plural}"


def _seconds(now: float) -> str:
    """Times of events have whole seconds."""
    return format_time(now)[:19] + "Z"


def _event(job: Job, event: Event, name: str, now: float) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.metadata.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:1024],
        "source": {"component": "fthsdp-operator"},
        "firstTimestamp": _seconds(now),
        "lastTimestamp": _seconds(now),
        "count": 1,
    }
