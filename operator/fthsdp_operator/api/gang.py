"""What a user says about scheduling the pods of a replica all at once."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field

from fthsdp_operator.api.parts import SpecPart

__all__ = ["GANG_RULES", "GangProvider", "GangSpec", "gang_complaint"]

_QUEUE_RULE = "gang.queue is missing: Kueue needs the name of a LocalQueue of the job's namespace"
_QUEUES_RULE = "gang.queue is for the providers Volcano and Kueue: remove it, or choose one of them"
_TIMEOUT_RULE = "gang.scheduleTimeoutSeconds is for the provider Coscheduling: remove it, or choose that one"
GANG_RULES = (
    ("!has(self.provider) || self.provider != 'Kueue' || has(self.queue)", _QUEUE_RULE),
    ("!has(self.queue) || self.provider in ['Volcano', 'Kueue']", _QUEUES_RULE),
    ("!has(self.scheduleTimeoutSeconds) || self.provider == 'Coscheduling'", _TIMEOUT_RULE),
)


class GangProvider(StrEnum):
    """Who makes sure of it."""

    NONE = "None"
    """Nobody: each pod is placed as soon as it fits somewhere."""
    NATIVE = "Native"
    """Kubernetes' own scheduler, with its feature GenericWorkload."""
    VOLCANO = "Volcano"
    """The scheduler of that name."""
    COSCHEDULING = "Coscheduling"
    """The plugin of kubernetes-sigs/scheduler-plugins."""
    KUEUE = "Kueue"
    """Kueue's groups of plain pods."""


class GangSpec(SpecPart):
    """Whether the pods of a replica are placed all at once or not at all. Replicas never wait for each other."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in GANG_RULES]
        }
    )

    provider: GangProvider = Field(default=GangProvider.NONE, strict=False)
    """Who makes sure of it: None, Native, Volcano, Coscheduling or Kueue. All but None have to be installed."""
    queue: str | None = Field(default=None, min_length=1, max_length=63)
    """Queue of Volcano, whose default one counts where unset, or LocalQueue of Kueue."""
    schedule_timeout_seconds: int | None = Field(default=None, ge=1, le=7 * 24 * 3600)
    """Seconds for which Coscheduling holds what it has found for some pods while it looks for the others."""


def gang_complaint(gang: GangSpec) -> str:
    """Return what is wrong with it; empty when nothing is."""
    if gang.provider is GangProvider.KUEUE and gang.queue is None:
        return _QUEUE_RULE
    if gang.queue is not None and gang.provider not in (GangProvider.VOLCANO, GangProvider.KUEUE):
        return _QUEUES_RULE
    if gang.schedule_timeout_seconds is not None and gang.provider is not GangProvider.COSCHEDULING:
        return _TIMEOUT_RULE
    return ""
