"""``Cluster`` on a Kubernetes API server, with the asyncio client of ``kubernetes``.

Requests are made with plain mappings: a job's pods are looked at through a handful of fields, and turning thousands of
them into client objects would cost more than all the rules. Apart from ``cluster.py`` so that ``fthsdp run`` does not
have to load the client.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from yaml import YAMLError

from fthsdp.coordinator.client import OperatorClient
from fthsdp.coordinator.messages import Exited, Status
from fthsdp.errors import ConfigError, WireError
from fthsdp.tls import Credentials, Tls
from fthsdp_operator.actions import Event
from fthsdp_operator.api import API_VERSION, JOB_LABEL, KIND, PLURAL, Job, coordinator_name, format_time
from fthsdp_operator.cluster import AlreadyExists, Busy, ClusterError, Conflict, Manifest, Unanswered
from fthsdp_operator.render import COORDINATOR_PORT, secret_name

__all__ = ["Access", "KubernetesCluster"]

log = logging.getLogger(__name__)

REQUEST_TIMEOUT = 30.0
"""Seconds for one request to the API server."""
LONGEST_RETRY_AFTER = 60.0
"""Seconds for which a job waits at most because a server, or what stands before it, asked for it."""
PROBE_TIMEOUT = 3.0
"""Seconds for the question whether the API server answers at all: a kubelet waits for what follows from it."""
COORDINATOR_TIMEOUT = 1.0
"""Seconds for one question to a coordinator: a reconcile waits for it, and can do without the answer."""

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
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
}


class _NotFound(ClusterError):
    """There is no such object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach the API server."""

    kubeconfig: str | None
    """Path of a kubeconfig file; None: as the service account of the pod that this runs in."""

    async def load(self) -> Configuration:
        """Return address and credentials as they are now; raises ConfigError."""
        settings = Configuration()
        try:
            if self.kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                await config.load_kube_config(config_file=self.kubeconfig, client_configuration=settings)
        # The last three: of a file that is YAML but no kubeconfig, the client takes parts that are not there.
        except (config.ConfigException, OSError, ValueError, YAMLError, TypeError, KeyError, AttributeError) as error:
            where = f"kubeconfig {self.kubeconfig}" if self.kubeconfig else "the service account of this pod"
            raise ConfigError(f"{where} gives no access to a cluster: {' '.join(str(error).split())}") from error
        return settings


class KubernetesCluster:
    """Jobs, pods and everything else as objects of an API server."""

    def __init__(self, client: ApiClient, *, coordinator_image: str) -> None:
        self.coordinator_image = coordinator_image
        self._client = client
        self._client.user_agent = "fthsdp-operator"
        self._time_left: Callable[[], float] = lambda: math.inf
        self._coordinators: dict[tuple[str, str], OperatorClient] = {}
        """Open connections, by namespace and name of the job."""

    @classmethod
    async def connect(
        cls, access: Access, *, coordinator_image: str, traces: Sequence[aiohttp.TraceConfig] = ()
    ) -> KubernetesCluster:
        """Connect; ``traces`` are told of every request. Raises ConfigError when there is no access."""
        settings = await access.load()
        settings.trace_configs = list(traces)
        return cls(ApiClient(settings), coordinator_image=coordinator_image)

    def only_while(self, time_left: Callable[[], float]) -> None:
        """Ask this before each call from now on: it returns the seconds that one may take, or does not return."""
        self._time_left = time_left

    async def check(self) -> None:
        """Make sure that the API server answers and knows our kind; raises ConfigError."""
        try:
            await self._request("GET", f"apis/{API_VERSION}")
        except _NotFound as error:
            raise ConfigError(
                f"the cluster has no {KIND}: install its definition with 'kubectl apply -f crds/{PLURAL}.yaml'"
                " or with the Helm chart"
            ) from error
        except ClusterError as error:
            raise ConfigError(str(error)) from error

    async def answers(self) -> bool:
        """The API server answers within a few seconds, whatever it says."""
        try:
            await self._request("GET", f"apis/{API_VERSION}", timeout=PROBE_TIMEOUT)
        except Unanswered:
            return False
        except ClusterError:
            return True
        return True

    async def close(self) -> None:
        """Close all connections."""
        for key in list(self._coordinators):
            await self._hang_up(key)
        await self._client.close()

    # --- objects ---

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        """Return the job, or None when it is gone."""
        job = await self.get(KIND, namespace, name)
        if job is None:
            await self._hang_up((namespace, name))
        return job

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return an object, or None."""
        try:
            return await self._request("GET", _path(kind, namespace, name))
        except _NotFound:
            return None

    async def list_pods(self, namespace: str, job: str) -> list[Manifest]:
        """Return all pods labelled with the job's name, as they are now."""
        answer = await self._request("GET", _path("Pod", namespace), query={"labelSelector": f"{JOB_LABEL}={job}"})
        items: list[Manifest] = answer.get("items") or []
        return items

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        """Create an object; raises AlreadyExists."""
        return await self._request("POST", _path(manifest["kind"], manifest["metadata"]["namespace"]), body=manifest)

    async def replace(self, manifest: Mapping[str, Any]) -> Manifest:
        """Replace an object; raises Conflict when it is not at the version that the manifest names any more."""
        metadata = manifest["metadata"]
        return await self._request(
            "PUT", _path(manifest["kind"], metadata["namespace"], metadata["name"]), body=manifest
        )

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        """Delete the object with this uid; one that is gone, or has another uid by now, is left alone."""
        options: Manifest = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            await self._request("DELETE", _path(kind, namespace, name), body=options)
        except (_NotFound, Conflict):
            return

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
            return await self._request("PATCH", path, body=patch, content_type="application/json-patch+json")
        except _NotFound as error:
            raise Conflict(str(error)) from error

    # --- the coordinator ---

    async def tell_coordinator(self, job: Job, message: Exited) -> None:
        """Send a message to the job's coordinator. One that does not listen is no error: it is told again."""
        coordinator = await self._coordinator(job)
        if coordinator is None:
            return
        self._time_left()
        try:
            await coordinator.exited(message)
        except WireError as error:
            who = {"replica": message.replica, "attempt": message.attempt}
            log.info("%s/%s: could not tell the coordinator: %s", job.namespace, job.name, error, extra=who)
            await self._hang_up((job.namespace, job.name))

    async def coordinator_status(self, job: Job) -> Status | None:
        """Ask the job's coordinator; None when it does not answer within a second."""
        coordinator = await self._coordinator(job)
        if coordinator is None:
            return None
        try:
            return await coordinator.status()
        except WireError as error:
            log.debug("%s/%s: no answer from the coordinator: %s", job.namespace, job.name, error)
            await self._hang_up((job.namespace, job.name))
            return None

    async def _coordinator(self, job: Job) -> OperatorClient | None:
        """Return the connection to a job's coordinator; it is found anew only after it was lost."""
        key = (job.namespace, job.name)
        if key not in self._coordinators:
            pod, secret, tls = await asyncio.gather(
                self.get("Pod", job.namespace, coordinator_name(job.name)),
                self.get("Secret", job.namespace, secret_name(job.name)),
                self._certificates(job),
            )
            address, word = (pod or {}).get("status", {}).get("podIP"), (secret or {}).get("data", {}).get("key")
            if not address or not word or (job.spec.tls is not None and tls is None):
                return None
            host = f"[{address}]" if ":" in address else address
            self._coordinators[key] = OperatorClient(
                f"{host}:{COORDINATOR_PORT}",
                base64.b64decode(word).strip(),
                job=job.name,
                timeout=COORDINATOR_TIMEOUT,
                tls=tls,
            )
        return self._coordinators[key]

    async def _certificates(self, job: Job) -> Tls | None:
        """Return those of the job; None without any that can be used."""
        if job.spec.tls is None:
            return None
        name = job.spec.tls.secret_name
        data = (await self.get("Secret", job.namespace, name) or {}).get("data") or {}
        try:
            certificate, key, authority = (base64.b64decode(data[file]) for file in ("tls.crt", "tls.key", "ca.crt"))
            return Tls(Credentials(certificate=certificate, key=key, authority=authority))
        except KeyError as error:
            log.warning("%s/%s: the Secret %s has no %s", job.namespace, job.name, name, error)
        except ConfigError as error:
            log.warning("%s/%s: the Secret %s: %s", job.namespace, job.name, name, error)
        return None

    async def _hang_up(self, key: tuple[str, str]) -> None:
        coordinator = self._coordinators.pop(key, None)
        if coordinator is not None:
            await coordinator.close()

    # --- events ---

    async def record_event(self, job: Job, event: Event, now: float) -> None:
        """Let people see what happened; never raises. The same event again counts up instead of filling the list."""
        digest = hashlib.sha256(f"{job.metadata.uid} {event.reason} {event.message}".encode()).hexdigest()[:16]
        name = f"{job.name}.{digest}"
        try:
            await self.create(_event(job, event, name, now))
        except AlreadyExists:
            await self._count_up(job.namespace, name, now)
        except ClusterError as error:
            log.warning("%s/%s: event not recorded: %s", job.namespace, job.name, error)

    async def _count_up(self, namespace: str, name: str, now: float) -> None:
        try:
            count = ((await self.get("Event", namespace, name)) or {}).get("count", 1) + 1
            patch = {"count": count, "lastTimestamp": _seconds(now)}
            path = _path("Event", namespace, name)
            await self._request("PATCH", path, body=patch, content_type="application/merge-patch+json")
        except ClusterError as error:
            log.warning("%s/%s: event not counted: %s", namespace, name, error)

    # --- requests ---

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | Sequence[Any] | None = None,
        content_type: str = "application/json",
        timeout: float = REQUEST_TIMEOUT,
    ) -> Manifest:
        """Make one request; raises ClusterError with what the server said."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        what = f"{method} {path}"
        try:
            arguments = await self._client.param_serialize(
                method,
                f"/{path}",
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            limit = min(timeout, self._time_left())
            response = await self._client.call_api(*arguments, _request_timeout=limit)
            content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unanswered(f"{what}: the API server does not answer: {error or type(error).__name__}") from error
        return _answer(what, response.status, content, retry_after=_retry_after(response.headers.get("Retry-After")))


def _retry_after(header: str | None) -> float:
    """Seconds; a date, which the API server never sends, counts as none."""
    return min(float(header), LONGEST_RETRY_AFTER) if header and header.isdecimal() else 0.0


def _answer(what: str, status: int, content: bytes, *, retry_after: float) -> Manifest:
    try:
        answer = json.loads(content)
    except ValueError:
        answer = {"message": content[:200].decode(errors="replace")}
    if status < 300 and isinstance(answer, dict):
        return answer
    words = answer if isinstance(answer, dict) else {}
    message = f"{what}: {status} {words.get('reason', '')}: {words.get('message', '')}"
    if status == 404:
        raise _NotFound(message)
    if status == 409:
        raise (AlreadyExists if words.get("reason") == "AlreadyExists" else Conflict)(message)
    raise (Busy if status == 429 or status >= 500 else ClusterError)(message, retry_after=retry_after)


def _path(kind: str, namespace: str, name: str | None = None) -> str:
    collection = _COLLECTIONS[kind].format(quote(namespace, safe=""))
    return collection if name is None else f"{collection}/{quote(name, safe='')}"


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
