"""One run of a job on this machine, from the first look of the operator to the last process.

Three tasks, and the run ends with the first that ends: the operator's reconcile loop until the job is complete or has
failed; a watch on the coordinator, which shows how things stand and orders the injected faults; and the wait for
somebody who interrupts. Then everything is stopped, whatever happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fthsdp.coordinator.messages import Status
from fthsdp_operator.api import Job, JobState, coordinator_name, parse_job
from fthsdp_operator.cluster import ClusterError, Manifest
from fthsdp_operator.execute import reconcile
from fthsdp_operator.local.cluster import LocalCluster
from fthsdp_operator.local.folder import RunFolder
from fthsdp_operator.local.inject import Injection, due
from fthsdp_operator.local.screen import Screen
from fthsdp_operator.local.view import view
from fthsdp_operator.rules.actions import Event

__all__ = ["End", "ExitCode", "Session", "in_one_line"]


class ExitCode(IntEnum):
    """What ``fthsdp run`` ends with."""

    COMPLETE = 0
    FAILED = 1
    BAD_INPUT = 2
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the run ended."""

    code: ExitCode
    message: str


WATCH_INTERVAL = 0.05
"""Seconds between two looks at the coordinator: an injected fault comes at most this much after its step."""
SHOW_INTERVAL = 0.25
"""Seconds between two drawings of the screen."""
RETRY = 0.5
"""Seconds after which a call that failed is tried again."""
END_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when the run is over."""
COORDINATOR_LINGER = 5.0
"""Seconds that the coordinator of a complete run may take to write its record and exit."""
_MESSAGE_HEAD = 60
"""Characters of the first line of a message of several lines that people see."""
COORDINATOR_CRASHES = 5
"""Restarts of the coordinator after which the run is given up: a person is waiting."""


class Session:
    """Runs one job; ``run`` is called once."""

    def __init__(
        self, manifest: Manifest, *, folder: RunFolder, injections: Sequence[Injection], screen: Screen
    ) -> None:
        self._cluster = LocalCluster(folder=folder, on_event=self._heard)
        self._manifest = self._cluster.submit(manifest)
        self._job = parse_job(self._manifest)
        self._folder = folder
        self._waiting = list(injections)
        self._screen = screen
        self._began = time.monotonic()

    async def run(self) -> End:
        """Run the job until it ends or somebody interrupts; nothing is left running when this returns."""
        interrupted = asyncio.Event()
        with _stop_signals(interrupted):
            tasks = [
                asyncio.create_task(self._reconcile_until_the_end(), name="reconcile"),
                asyncio.create_task(self._watch(), name="watch"),
                asyncio.create_task(_interruption(interrupted), name="interruption"),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                end = min((task.result() for task in done), key=lambda end: end.code)
            finally:
                await _cancelled(tasks)
                await self._cluster.close(grace=END_GRACE)
        for injection in self._waiting:
            self._note(f"--inject {injection} never happened: the run ended before that step was final")
        return end

    # --- the operator -------------------------------------------------------------------------------------------------

    async def _reconcile_until_the_end(self) -> End:
        while True:
            self._cluster.changed.clear()
            try:
                delay = await reconcile(
                    self._cluster,
                    self._job.namespace,
                    self._job.name,
                    time.time(),
                    last_words=tuple(self._cluster.last_words),
                )
            except ClusterError as error:
                self._note(f"{error}: trying again")
                delay = RETRY
            job = await self._job_now()
            if job.status.terminal:
                return await self._ended(job)
            await _wait(self._cluster.changed, delay)

    async def _ended(self, job: Job) -> End:
        verdict = next(c for c in job.status.conditions if c.type == str(job.status.state) and c.status == "True")
        if job.status.state is JobState.COMPLETE:
            await self._coordinator_gone()
            return End(code=ExitCode.COMPLETE, message=verdict.message)
        bad_input = verdict.reason == "ConfigError"
        code = ExitCode.BAD_INPUT if bad_input else ExitCode.FAILED
        return End(code=code, message=in_one_line(verdict.message))

    async def _coordinator_gone(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COORDINATOR_LINGER):
                while (pod := await self._coordinator_pod()) and pod["status"]["phase"] == "Running":
                    self._cluster.changed.clear()
                    await self._cluster.changed.wait()

    async def _coordinator_pod(self) -> Manifest | None:
        return await self._cluster.get("Pod", self._job.namespace, coordinator_name(self._job.name))

    async def _job_now(self) -> Job:
        manifest = await self._cluster.get_job(self._job.namespace, self._job.name)
        # A job whose time after the end is up deletes itself; how it ended was read before.
        assert manifest is not None
        return parse_job(manifest)

    # --- the watch ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> End:
        roles: object = None
        shown = -math.inf
        last: Status | None = None
        while True:
            status = await self._cluster.coordinator_status(self._job)
            if status is not None:
                last = status
                await self._inject_due(status)
            if roles != (roles := _roles(status)):
                self._cluster.changed.set()
            if self._elapsed - shown >= SHOW_INTERVAL:
                shown = self._elapsed
                self._screen.show(view(await self._job_now(), status, last=last), shown)
                if (words := await self._coordinator_keeps_failing()) is not None:
                    return End(code=ExitCode.FAILED, message=words)
            await asyncio.sleep(WATCH_INTERVAL)

    async def _inject_due(self, status: Status) -> None:
        now, self._waiting = due(self._waiting, status.step)
        for injection in now:
            hit = await self._cluster.inject(self._job, injection)
            self._note(f"--inject {injection}: {', '.join(hit) or 'no pod of that replica was running'}")

    async def _coordinator_keeps_failing(self) -> str | None:
        pod = await self._coordinator_pod()
        statuses = pod["status"].get("containerStatuses", []) if pod else []
        if not statuses or statuses[0]["restartCount"] <= COORDINATOR_CRASHES:
            return None
        words = str(statuses[0]["lastState"].get("terminated", {}).get("message", "")).strip()
        return f"the coordinator keeps failing: {words.splitlines()[-1] if words else 'it says nothing'}"

    # --- what people see ----------------------------------------------------------------------------------------------

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _heard(self, event: Event) -> None:
        self._note(f"{event.reason}: {in_one_line(event.message)}")

    def _note(self, text: str) -> None:
        self._screen.note(text, self._elapsed)


def in_one_line(message: str) -> str:
    """Shorten a message with the end of a log in it to how it begins and its last line: there stands what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) < 2:
        return "".join(lines)
    return f"{lines[0][:_MESSAGE_HEAD]} … {lines[-1]}"


def _roles(status: Status | None) -> object:
    if status is None:
        return None
    roles = [(r.replica, r.role) for r in status.replicas]
    return status.epoch, status.paused, status.finished, roles, status.verdicts


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if seconds == math.inf else seconds):
            await event.wait()


async def _interruption(interrupted: asyncio.Event) -> End:
    await interrupted.wait()
    return End(code=ExitCode.INTERRUPTED, message="interrupted")


async def _cancelled(tasks: Sequence[asyncio.Task[End]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _stop_signals(interrupted: asyncio.Event) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal set the event; more of them change nothing: the end is under way."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, interrupted.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
