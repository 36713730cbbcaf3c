"""What a plan consists of: a status, actions, events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fthsdp.coordinator.messages import Exited
from fthsdp_operator.api import EventReason, JobStatus
from fthsdp_operator.observed.observe import PodView

__all__ = ["Action", "Create", "Delete", "Event", "Label", "Plan", "Step", "Tell", "by_force", "delete", "tell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create an object; that it exists is fine."""

    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete an object; that it is gone, or another one by now, is fine."""

    kind: str
    name: str
    uid: str
    """Empty for one whose name only it can have."""
    grace_seconds: int | None = None
    """None: the object's own."""
    why: str = ""
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Tell the coordinator; that it does not listen is fine."""

    message: Exited


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Set labels of a pod; that it is gone, or another one by now, is fine."""

    name: str
    uid: str
    labels: Mapping[str, str]
    why: str = ""
    """For people."""


Action = Create | Delete | Label | Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that people should be able to read in ``kubectl describe``."""

    warning: bool = False
    reason: EventReason
    message: str
    replica: int | None = None
    """The replica that it speaks of, where it is one."""
    attempt: int | None = None

    @property
    def type(self) -> str:
        """What Kubernetes calls it: Normal or Warning."""
        return "Warning" if self.warning else "Normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do now."""

    status: JobStatus
    """To be written first, if it differs from what stands there."""
    actions: tuple[Action, ...] = ()
    """In this order."""
    events: tuple[Event, ...] = ()
    """To be recorded last."""
    wake_at: float = math.inf
    """Unix time in seconds at which to look again even if nothing happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What becomes of one part of a job: a replica, the coordinator."""

    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: float = math.inf


def tell(replica: int, attempt: int, reason: str, now: float, *, final: bool = False) -> Tell:
    """Tell the coordinator that an attempt is gone; ``final``: no other one comes."""
    return Tell(message=Exited(replica=replica, attempt=attempt, reason=reason, detected=now, final=final))


def delete(pods: Iterable[PodView], why: str) -> tuple[Delete, ...]:
    """Delete pods, but for those that are being deleted already."""
    return tuple(Delete(kind="Pod", name=pod.name, uid=pod.uid, why=why) for pod in pods if pod.deleted is None)


def by_force(pod: PodView, why: str) -> Delete:
    """Remove a pod from the API server without waiting for its node."""
    return Delete(kind="Pod", name=pod.name, uid=pod.uid, grace_seconds=0, why=why)
