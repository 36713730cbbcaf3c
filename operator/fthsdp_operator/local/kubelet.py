"""Starts and stops the processes of pods and keeps the pods' status: a kubelet for this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fthsdp.errors import ConfigError
from fthsdp.exit_codes import EXIT_CONFIG
from fthsdp_operator.api import ATTEMPT_LABEL, REPLICA_LABEL, ROLE_LABEL, Role
from fthsdp_operator.local import podstatus
from fthsdp_operator.local.addresses import Addresses, coordinator_arguments
from fthsdp_operator.local.containers import localised, mount_folders, own_fields, volume_files
from fthsdp_operator.local.folder import RunFolder
from fthsdp_operator.local.objects import Objects, timestamp
from fthsdp_operator.local.process import Launch, PodProcess

__all__ = ["Kubelet"]

Json = dict[str, Any]

_MESSAGE_BYTES = 2048
"""Of the end of the log, as the message of a failed container: the kubelet's FallbackToLogsOnError."""
DEFAULT_GRACE = 30.0
"""Seconds from SIGTERM to SIGKILL where the pod does not say, as on Kubernetes: a replica that is asked to leave stays
until the next step boundary."""
FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 30.0
"""Seconds before a crashed container with restartPolicy OnFailure is started a second time, and at most."""


@dataclass(slots=True)
class _Running:
    process: PodProcess
    launch: Launch
    kill: asyncio.TimerHandle | None = None


class Kubelet:
    """The pods of one run.

    ``changed`` is called after every change of a pod, ``forgotten`` with a pod that was deleted and has ended.
    """

    def __init__(
        self,
        *,
        objects: Objects,
        folder: RunFolder,
        addresses: Addresses,
        changed: Callable[[], None],
        forgotten: Callable[[Json], None],
    ) -> None:
        self._objects = objects
        self._folder = folder
        self._addresses = addresses
        self._changed = changed
        self._report_forgotten = forgotten
        self._running: dict[tuple[str, str], _Running] = {}
        self._restarting: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def start(self, pod: Json) -> None:
        """Start a pod that was just stored; what cannot be started ends at once with a message."""
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self._edit(namespace, name, lambda p: podstatus.waiting(p, now=timestamp()))
        try:
            launch = self._prepare(pod)
        except ConfigError as error:
            self._ended(namespace, name, EXIT_CONFIG, str(error), reason="CreateContainerConfigError")
            return
        await self._launch(namespace, name, launch)

    async def _launch(self, namespace: str, name: str, launch: Launch) -> None:
        process = await PodProcess.start(
            launch,
            log=self.log(name),
            on_started=lambda _: self._edit(namespace, name, lambda p: podstatus.running(p, now=timestamp())),
            on_exit=lambda code, message: self._exited(namespace, name, code, message),
        )
        self._running[namespace, name] = _Running(process, launch)
        if self._objects.get("Pod", namespace, name) is None:  # deleted while it was being started
            process.signal(signal.SIGKILL)

    def stop(self, namespace: str, name: str, *, grace: float | None) -> None:
        """Delete a pod: SIGTERM, after ``grace`` seconds SIGKILL, and it is forgotten once it has ended."""
        pod = self._objects.get("Pod", namespace, name)
        if pod is None:
            return
        running = self._running.get((namespace, name))
        if running is None:
            self._forget(namespace, name)
            return
        seconds = pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE) if grace is None else grace
        self._edit(namespace, name, lambda p: _mark_deleted(p, seconds))
        running.process.signal(signal.SIGTERM if seconds > 0 else signal.SIGKILL)
        if running.kill is not None:
            running.kill.cancel()
        loop = asyncio.get_running_loop()
        running.kill = loop.call_later(seconds, running.process.signal, signal.SIGKILL)

    def label(self, namespace: str, name: str, labels: Mapping[str, str]) -> None:
        """Set labels of a pod, and show them where it looks for them."""
        self._edit(namespace, name, lambda pod: pod["metadata"]["labels"].update(labels))
        pod = self._objects.get("Pod", namespace, name)
        if pod is not None:
            self._folder.fill_volume(name, own_fields(pod))

    def signal(self, namespace: str, name: str, number: int) -> None:
        """Send a signal to a pod; one that has ended is passed over."""
        running = self._running.get((namespace, name))
        if running is not None:
            running.process.signal(number)

    def log(self, name: str) -> Path:
        """Where a pod's output goes."""
        return self._folder.logs / f"{name}.log"

    async def end_all(self, *, role: Role, grace: float) -> None:
        """Stop every pod of a role and wait until each has ended."""
        theirs = []
        for namespace, name in [*self._running, *self._restarting]:
            pod = self._objects.get("Pod", namespace, name)
            if pod is not None and pod["metadata"]["labels"].get(ROLE_LABEL) == role:
                running = self._running.get((namespace, name))
                self.stop(namespace, name, grace=grace)
                theirs += [running.process.wait()] if running else []
        await asyncio.gather(*theirs)

    def _prepare(self, pod: Json) -> Launch:
        meta, labels = pod["metadata"], pod["metadata"]["labels"]

        def lookup(kind: str, name: str) -> Json | None:
            return self._objects.get(kind, meta["namespace"], name)

        trains = labels[ROLE_LABEL] == Role.TRAINER
        self._folder.fill_volume(meta["name"], volume_files(pod, lookup))
        launch = localised(
            pod,
            overrides=self._addresses.variables(labels[REPLICA_LABEL], labels[ATTEMPT_LABEL]) if trains else {},
            folders=mount_folders(pod, self._folder.volume(meta["name"])),
            lookup=lookup,
            outer=os.environ,
        )
        return launch if trains else replace(launch, argv=self._coordinator_arguments(launch.argv))

    def _coordinator_arguments(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        return coordinator_arguments(
            argv, port=self._addresses.coordinator_port, store=self._folder.epochs, record=self._folder.path
        )

    def _exited(self, namespace: str, name: str, code: int, message: str) -> None:
        running = self._running.pop((namespace, name))
        if running.kill is not None:
            running.kill.cancel()
        pod = self._objects.get("Pod", namespace, name)
        if pod is None:
            return
        reason = "StartError" if message else "Completed" if code == 0 else "Error"
        self._ended(namespace, name, code, message or _last_words(self.log(name), code), reason=reason)
        if "deletionTimestamp" in pod["metadata"]:
            self._forget(namespace, name)
        elif code != 0 and pod["spec"].get("restartPolicy") == "OnFailure":
            self._restart_later(namespace, name, running.launch, _restarts(pod))

    def _restart_later(self, namespace: str, name: str, launch: Launch, done: int) -> None:
        """Start the container of a pod once more: at once the first time, later and later after that."""
        seconds = 0.0 if done == 0 else min(FIRST_BACKOFF * 2 ** (done - 1), LONGEST_BACKOFF)
        self._edit(namespace, name, podstatus.restarting)
        task = asyncio.create_task(self._restart(namespace, name, launch, seconds), name=f"restart {name}")
        self._restarting[namespace, name] = task

    async def _restart(self, namespace: str, name: str, launch: Launch, seconds: float) -> None:
        await asyncio.sleep(seconds)
        del self._restarting[namespace, name]
        await self._launch(namespace, name, launch)

    def _ended(self, namespace: str, name: str, code: int, message: str, *, reason: str) -> None:
        now = timestamp()
        self._edit(namespace, name, lambda p: podstatus.ended(p, code=code, message=message, reason=reason, now=now))

    def _forget(self, namespace: str, name: str) -> None:
        restart = self._restarting.pop((namespace, name), None)
        if restart is not None:
            restart.cancel()
        pod = self._objects.get("Pod", namespace, name)
        if pod is not None:
            self._report_forgotten(pod)
        self._objects.remove("Pod", namespace, name)
        self._folder.drop_volume(name)
        self._changed()

    def _edit(self, namespace: str, name: str, edit: Callable[[Json], None]) -> None:
        self._objects.change("Pod", namespace, name, edit)
        self._changed()


def _mark_deleted(pod: Json, seconds: float) -> None:
    """As the API server does: the timestamp is that of the end of the grace period."""
    pod["metadata"]["deletionTimestamp"] = timestamp(after=seconds)
    pod["metadata"]["deletionGracePeriodSeconds"] = int(seconds)


def _restarts(pod: Json) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def _last_words(log: Path, code: int) -> str:
    if code == 0:
        return ""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _MESSAGE_BYTES))
        return file.read().decode(errors="replace")
