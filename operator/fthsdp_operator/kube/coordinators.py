"""Talking to the coordinators of all jobs, without ever waiting long for one.

A coordinator answers within milliseconds, and a look at a job waits that long. One whose node is gone says nothing at
all, not even that nobody is there, while its job needs the operator most. So each question goes on by itself: what is
heard too late for one look is there for the next, and a coordinator that said nothing in time is not waited for again
until it has said something. The same holds for what it is told; whoever has not heard is told again, by the rules.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fthsdp.coordinator.client import OperatorClient
from fthsdp.coordinator.messages import Exited, Status
from fthsdp.errors import ConfigError, WireError
from fthsdp.tls import Credentials, Tls
from fthsdp_operator.api import Job
from fthsdp_operator.cluster import ClusterError, Manifest
from fthsdp_operator.manifests.render import COORDINATOR_PORT, secret_name
from fthsdp_operator.observed.observe import JobKey

__all__ = ["FRESH", "PATIENCE", "TIMEOUT", "Coordinators"]

log = logging.getLogger(__name__)

TIMEOUT = 1.0
"""Seconds after which a coordinator that says nothing is given up, and asked anew."""
PATIENCE = 0.2
"""Seconds for which a look waits for an answer of a coordinator that speaks."""
FRESH = 5.0
"""Seconds from the question after which an answer that no look has waited for is too old for any."""

Read = Callable[[str, str, str], Awaitable[Manifest | None]]
"""Returns an object of a kind, namespace and name as it is now, or None."""


class Coordinators:
    """Connections to coordinators, one for each job, made when there is something to ask."""

    def __init__(self, read: Read, *, port: int = COORDINATOR_PORT) -> None:
        """``read``: gives Secrets; ``port``: on which coordinators listen."""
        self._read = read
        self._port = port
        self._lines: dict[JobKey, _Line] = {}

    async def status(self, job: Job, address: str) -> Status | None:
        """Ask how the job stands; None when nothing is known now. ``address``: of the coordinator's pod, or empty."""
        if not address:
            return None
        line, loop = await self._line(job), asyncio.get_running_loop()
        old = line.question is not None and line.question.done() and loop.time() - line.asked > FRESH
        if old or line.asked_at != address:  # what another pod has said is no answer of this one
            line.question = None
        if line.question is None:
            line.asked, line.asked_at = loop.time(), address
            line.question = line.start(self._exchange(line, job, address, None))
        await line.wait(line.question)
        if not line.question.done():
            return None
        answer, line.question = line.question.result(), None
        return answer

    async def tell(self, job: Job, address: str, message: Exited) -> None:
        """Tell it something; that it does not hear is no error."""
        if address:
            line = await self._line(job)
            await line.wait(line.start(self._exchange(line, job, address, message)))

    async def hang_up(self, key: JobKey) -> None:
        """End all talk with the coordinator of a job that is gone."""
        line = self._lines.pop(key, None)
        if line is not None:
            await line.close()

    async def close(self) -> None:
        """Close all connections."""
        for key in list(self._lines):
            await self.hang_up(key)

    async def _line(self, job: Job) -> _Line:
        """Return the talk with the coordinator of this very job: one of that name was another's."""
        key = (job.namespace, job.name)
        if key in self._lines and self._lines[key].job_uid != job.metadata.uid:
            await self.hang_up(key)
        return self._lines.setdefault(key, _Line(job.metadata.uid))

    async def _exchange(self, line: _Line, job: Job, address: str, message: Exited | None) -> Status | None:
        """Tell a message, or nothing, and return how the job stands; None when nobody answers."""
        loop, client = asyncio.get_running_loop(), None
        began = loop.time()
        try:
            client = await self._client(line, job, address)
            if client is None:
                return None
            answer = await (client.status() if message is None else client.exited(message))
        except (ClusterError, WireError) as error:
            log.debug("%s/%s: no answer from the coordinator: %s", job.namespace, job.name, error)
            line.speaks = loop.time() - began < PATIENCE
            if line.speaks:  # somebody was there, and wants another key or certificate
                await line.lose(client)
            return None
        line.speaks = True
        return answer

    async def _client(self, line: _Line, job: Job, address: str) -> OperatorClient | None:
        """Return the connection; key and certificates are read anew only after it was refused, and for another pod."""
        if line.client is not None and line.address == address:
            return line.client
        await line.lose(line.client)
        secret, tls = await asyncio.gather(
            self._read("Secret", job.namespace, secret_name(job.name)), self._certificates(job)
        )
        word = (secret or {}).get("data", {}).get("key")
        if not word or (job.spec.tls is not None and tls is None):
            return None
        if line.client is None:  # else somebody else has made it meanwhile
            host = f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"
            line.address = address
            line.client = OperatorClient(host, base64.b64decode(word).strip(), job=job.name, timeout=TIMEOUT, tls=tls)
        return line.client

    async def _certificates(self, job: Job) -> Tls | None:
        """Return those of the job; None without any that can be used."""
        if job.spec.tls is None:
            return None
        name = job.spec.tls.secret_name
        data = (await self._read("Secret", job.namespace, name) or {}).get("data") or {}
        try:
            certificate, key, authority = (base64.b64decode(data[file]) for file in ("tls.crt", "tls.key", "ca.crt"))
            return Tls(Credentials(certificate=certificate, key=key, authority=authority))
        except KeyError as error:
            log.warning("%s/%s: the Secret %s has no %s", job.namespace, job.name, name, error)
        except ConfigError as error:
            log.warning("%s/%s: the Secret %s: %s", job.namespace, job.name, name, error)
        return None


class _Line:
    """The talk with one coordinator."""

    def __init__(self, job_uid: str) -> None:
        self.job_uid = job_uid
        self.client: OperatorClient | None = None
        self.address = ""
        """Where the client looks for it."""
        self.question: asyncio.Task[Status | None] | None = None
        """How the job stands: asked, and not taken by any look yet."""
        self.asked = 0.0
        """When, by the loop's clock."""
        self.asked_at = ""
        """The address at which it was asked."""
        self.speaks = True
        """The last exchange had an answer, or failed in less time than a look waits."""
        self._going_on: set[asyncio.Task[Any]] = set()

    def start(self, exchange: Any) -> asyncio.Task[Status | None]:
        """Let an exchange go on by itself."""
        task: asyncio.Task[Status | None] = asyncio.create_task(exchange)
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        return task

    async def wait(self, exchange: asyncio.Task[Status | None]) -> None:
        """Wait for an exchange as long as a look may."""
        if self.speaks and not exchange.done():
            await asyncio.wait((exchange,), timeout=PATIENCE)
            self.speaks = self.speaks and exchange.done()

    async def lose(self, client: OperatorClient | None) -> None:
        """Close a connection that is of no use any more."""
        if client is not None:
            self.client = None if self.client is client else self.client
            await client.close()

    async def close(self) -> None:
        """End every exchange, and the connection."""
        going_on = list(self._going_on)
        for exchange in going_on:
            exchange.cancel()
        await asyncio.gather(*going_on, return_exceptions=True)
        await self.lose(self.client)
