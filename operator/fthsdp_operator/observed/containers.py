"""How a pod stands whose training container is one of several. Pure: a pod as Kubernetes has it in, a judgement out.

The phase of a pod speaks of all its containers: a proxy that somebody's webhook puts beside the training container
keeps the pod Running after the training has ended, and one that crashes makes a pod Failed whose training went well. So
the training container is what counts, as soon as it has ended for good. For that it is known by name: a webhook may put
its own container first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fthsdp_operator.api import CONTAINER_ANNOTATION

__all__ = ["ENDED", "Exit", "exit_of", "exits_of", "main_container", "phase_of", "seconds", "still_runs"]

Manifest = Mapping[str, Any]

ENDED = ("Succeeded", "Failed")
"""Phases that are never left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a container ended."""

    container: str
    code: int
    reason: str
    message: str
    time: float | None
    """Unix time in seconds."""


def seconds(text: str | None) -> float | None:
    """Unix time in seconds of a time as Kubernetes writes it."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def main_container(pod: Manifest) -> str:
    """Return the name of the container that counts: the one that the operator named, else the pod's first."""
    named: str = (pod["metadata"].get("annotations") or {}).get(CONTAINER_ANNOTATION, "")
    containers = (pod.get("spec") or {}).get("containers") or ()
    return named or next((one.get("name", "") for one in containers), "")


def phase_of(pod: Manifest, main: str, *, lasting: bool) -> str:
    """Return the phase that the pod would have if there were only its container ``main``.

    ``lasting``: a crash of that container is mended by the kubelet, on the spot.
    """
    status = pod.get("status") or {}
    phase: str = status.get("phase") or "Pending"
    if phase == "Failed" and status.get("reason"):
        return phase  # the kubelet took it away: who is asked to stop may well exit with 0
    ended = _ended_for_good(pod, main, lasting=lasting)
    if ended is None:
        return phase
    return "Succeeded" if ended.get("exitCode", 0) == 0 else "Failed"


def exits_of(pod: Manifest) -> tuple[Exit, ...]:
    """Return how the containers ended, as far as they have; of init containers only those that failed count."""
    return tuple(
        Exit(
            container=container["name"],
            code=ended.get("exitCode", 0),
            reason=ended.get("reason") or "",
            message=ended.get("message") or "",
            time=seconds(ended.get("finishedAt")),
        )
        for field in ("initContainerStatuses", "containerStatuses")
        for container in (pod.get("status") or {}).get(field) or ()
        if (ended := _ended(container)) and (field == "containerStatuses" or ended.get("exitCode", 0) != 0)
    )


def exit_of(exits: tuple[Exit, ...], main: str) -> Exit | None:
    """Return the exit that stands for the pod: that of ``main``, else the first that failed, else the first."""
    own = (one for one in exits if one.container == main)
    bad = (one for one in exits if one.code != 0)
    return next(own, None) or next(bad, None) or next(iter(exits), None)


def still_runs(pod: Manifest) -> bool:
    """Whether a container of a pod runs, or is still to run; one of which nothing is said counts as running.

    The phase does not say so: a kubelet tells that the last container has ended a moment before it tells of the pod.
    """
    status = pod.get("status") or {}
    states: dict[str, Manifest] = {one["name"]: {} for one in (pod.get("spec") or {}).get("containers") or ()}
    states |= {one["name"]: one.get("state") or {} for one in status.get("containerStatuses") or ()}
    sidecars = [one.get("state") or {} for one in status.get("initContainerStatuses") or ()]
    return any("terminated" not in it for it in states.values()) or any("running" in it for it in sidecars)


def _ended_for_good(pod: Manifest, main: str, *, lasting: bool) -> Manifest | None:
    """Return how the container ended, if that is its end."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    ended = next((_ended(one) for one in statuses if one.get("name") == main), None)
    if ended is None or not lasting or ended.get("exitCode", 0) == 0:
        return ended
    return ended if (pod.get("spec") or {}).get("restartPolicy") == "Never" else None


def _ended(container: Manifest) -> Manifest | None:
    """Return how a container ended; one that the kubelet has started again has ended too.

    A pod's restart policy is Never, unless somebody's webhook has changed it. An attempt that comes back is let in by
    nobody, so it has to be replaced by the next one.
    """
    now, before = ((container.get(field) or {}).get("terminated") for field in ("state", "lastState"))
    ended: Manifest | None = now or before
    return ended
