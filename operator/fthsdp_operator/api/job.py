"""The object as a whole."""

from __future__ import annotations

from fthsdp_operator.api.parts import StatusPart
from fthsdp_operator.api.spec import JobSpec
from fthsdp_operator.api.status import JobStatus

__all__ = ["Job", "Metadata"]


class Metadata(StatusPart):
    """The part of an object's metadata that rules look at."""

    name: str
    namespace: str = "default"
    uid: str = ""
    resource_version: str = ""
    generation: int | None = None
    deletion_timestamp: str | None = None


class Job(StatusPart):
    """An FTHSDPJob."""

    metadata: Metadata
    spec: JobSpec
    status: JobStatus = JobStatus()

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Namespace of the job."""
        return self.metadata.namespace
