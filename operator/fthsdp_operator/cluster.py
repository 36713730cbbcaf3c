"""The one seam to the outside: what a plan is executed on. Kubernetes here; processes on this machine in ``local``.

Manifests go in and come out as Kubernetes writes them, as plain mappings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from fthsdp.coordinator.messages import Exited, Status
from fthsdp.errors import FthsdpError
from fthsdp_operator.api import Job
from fthsdp_operator.observed.observe import NodeView, PodView
from fthsdp_operator.rules.actions import Event

__all__ = [
    "AlreadyExists",
    "Busy",
    "Cluster",
    "ClusterError",
    "Conflict",
    "Forbidden",
    "Manifest",
    "NamespaceEnding",
    "Refused",
    "Unanswered",
]

Manifest = dict[str, Any]


class ClusterError(FthsdpError):
    """The cluster did not do what it was asked to; the message is its own."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        """``retry_after``: seconds for which it does not want to be asked again."""
        super().__init__(message)
        self.retry_after = retry_after


class Unanswered(ClusterError):
    """Nobody answered, or not in time."""


class Busy(ClusterError):
    """It answered that it cannot do it now."""


class Refused(ClusterError):
    """It will not do it, now or later, unless somebody changes something: a quota, a limit, a right, our manifest."""


class Forbidden(Refused):
    """We have no right to it."""


class NamespaceEnding(Refused):
    """The namespace is being deleted, and takes nothing new."""


class Conflict(ClusterError):
    """The object has changed since it was read."""


class AlreadyExists(ClusterError):
    """An object of that kind and name is there."""


class Cluster(Protocol):
    """What the executor needs. Kinds are those of ``render`` and the job itself."""

    coordinator_image: str
    """Image for coordinators of jobs that name none."""

    async def get_job(self, namespace: str, name: str) -> Manifest | None:
        """Return the job, or None when it is gone."""
        ...

    def known_pods(self, namespace: str, job: str) -> Collection[PodView]:
        """Return all pods labelled with the job's name, as far as they are known; what we did ourselves is.

        Raises ClusterError while nothing is known.
        """
        ...

    async def list_pods(self, namespace: str, job: str) -> Collection[PodView]:
        """Return all pods labelled with the job's name, as they are now."""
        ...

    def nodes(self) -> Mapping[str, NodeView]:
        """Return the nodes that are known, by name: none where the operator may not see nodes."""
        ...

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return an object as it is now, or None."""
        ...

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        """Create an object; raises AlreadyExists."""
        ...

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str, grace_seconds: int | None) -> None:
        """Delete the object with this uid; one that is gone, or has another uid by now, is left alone.

        Without a uid whichever has that name is meant.
        """
        ...

    async def label_pod(self, namespace: str, name: str, labels: Mapping[str, str], *, uid: str) -> None:
        """Set labels of the pod with this uid; one that is gone, or has another uid by now, is left alone."""
        ...

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        """Replace the job's status; raises Conflict when the job is not at this version any more."""
        ...

    async def tell_coordinator(self, job: Job, message: Exited) -> None:
        """Send a message to the job's coordinator. One that does not listen is no error: it is told again."""
        ...

    async def coordinator_status(self, job: Job) -> Status | None:
        """Ask the job's coordinator; None when it does not answer at once."""
        ...

    async def record_event(self, job: Job, event: Event, now: float) -> None:
        """Let people see what happened; never raises."""
        ...
