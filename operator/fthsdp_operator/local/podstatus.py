"""The status of a pod as a kubelet would write it. Pure: manifest changed in place, nothing else touched."""

from __future__ import annotations

from typing import Any

__all__ = ["container_state", "ended", "restarting", "running", "waiting"]

Json = dict[str, Any]


def waiting(pod: Json, *, now: str) -> None:
    """Accepted, on this node, not yet started."""
    pod["spec"]["nodeName"] = "localhost"
    pod["status"] = {"phase": "Pending", "startTime": now, "hostIP": "127.0.0.1", "podIP": "127.0.0.1"}
    _set(pod, ready=False, started=False, state={"waiting": {"reason": "ContainerCreating"}}, now=now)


def running(pod: Json, *, now: str) -> None:
    """The first process has been started."""
    pod["status"]["phase"] = "Running"
    _set(pod, ready=True, started=True, state={"running": {"startedAt": now}}, now=now)


def ended(pod: Json, *, code: int, message: str, reason: str, now: str) -> None:
    """The first process has ended and took the others with it."""
    pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
    began = container_state(pod).get("running", {}).get("startedAt", now)
    terminated = {"exitCode": code, "reason": reason, "message": message, "startedAt": began, "finishedAt": now}
    _set(pod, ready=False, started=False, state={"terminated": terminated}, now=now)


def restarting(pod: Json) -> None:
    """The first process has failed and is going to be started again."""
    pod["status"]["phase"] = "Running"
    (status,) = pod["status"]["containerStatuses"]
    status["restartCount"] += 1
    status["lastState"], status["state"] = status["state"], {"waiting": {"reason": "CrashLoopBackOff"}}


def container_state(pod: Json) -> Json:
    """Return the state of the first container."""
    statuses = pod["status"].get("containerStatuses") or [{"state": {}}]
    state: Json = statuses[0]["state"]
    return state


def _set(pod: Json, *, ready: bool, started: bool, state: Json, now: str) -> None:
    container = pod["spec"]["containers"][0]
    (before,) = pod["status"].get("containerStatuses") or [{"restartCount": 0}]
    pod["status"]["containerStatuses"] = [
        {
            "name": container.get("name", "main"),
            "image": container.get("image", ""),
            "ready": ready,
            "started": started,
            "restartCount": before["restartCount"],
            "lastState": before.get("lastState", {}),
            "state": state,
        }
    ]
    pod["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": pod["status"]["startTime"]},
        {"type": "Ready", "status": str(ready), "lastTransitionTime": now},
    ]
