"""A training job of real processes, ours or a peer's, that a benchmark starts, breaks and watches.

Every replica is one process. Whoever starts a job leaves nothing of it behind: jobs are context managers.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.bench.peers import torchft_environment
from tests.bench.processes import Child, Event, environment
from tests.bench.workload import Workload
from tests.ports import free_port

__all__ = ["SYSTEMS", "FthsdpJob", "Job", "TorchftJob"]

KEY = "0123456789abcdef" * 4


class Job(ABC):
    """What benchmarks do with a job, whoever's it is."""

    def __init__(self, replicas: int, workload: Workload) -> None:
        self.count = replicas
        self.workload = workload
        self.folder = Path(tempfile.mkdtemp(prefix="fthsdp-bench-"))
        self.replicas: dict[int, Child] = {}
        """The newest process of each replica that was not killed."""
        self.gone: list[Child] = []
        """Processes that were killed."""
        self.originals: tuple[Child, ...] = ()
        """The processes of the start."""
        self._helpers: list[Child] = []

    def __enter__(self) -> Job:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        self.originals = tuple(self.replicas.values())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def survivors(self) -> list[Child]:
        """The replicas that were there from the start and still are."""
        return [child for child in self.replicas.values() if child in self.originals]

    @abstractmethod
    def start(self) -> None:
        """Start everything."""

    @abstractmethod
    def spawn(self, replica: int, *, download: float = 0.0) -> Child:
        """Start a replica, or start it again; its state takes ``download`` seconds to arrive (0: what it takes)."""

    @abstractmethod
    def joined(self, child: Child) -> Event:
        """Wait until a process has the others' state and begins to train with them."""

    def kill(self, replica: int) -> float:
        """SIGKILL a replica and return when."""
        child = self.replicas.pop(replica)
        self.gone.append(child)
        now = child.signal(signal.SIGKILL)
        child.end()
        return now

    def stop(self) -> None:
        """End everything at once, and forget what it wrote."""
        for child in [*self.replicas.values(), *self._helpers]:
            child.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, command: Sequence[str], **variables: str) -> Child:
        return Child(name, command, log=self.folder / f"{name}.log", env=environment(**variables))


class FthsdpJob(Job):
    """Ours: a coordinator and the replicas, started as the operator would start them."""

    name = "fthsdp"

    def __init__(
        self,
        replicas: int,
        workload: Workload,
        *,
        spares: int = 0,
        ranks: int = 1,
        module: str = "tests.bench.worker_fthsdp",
    ) -> None:
        super().__init__(replicas, workload)
        self.spares = spares
        self.ranks: list[Child] = []
        """All ranks of all replicas; only those of jobs with one rank each are ever killed."""
        self._per_replica = ranks
        self._module = module
        self.port = free_port()
        self._attempts: dict[int, int] = {}

    def start(self) -> None:
        """Start the coordinator and all replicas, spares included."""
        (self.folder / "record").mkdir()
        (self.folder / "key").write_text(KEY)
        command = [sys.executable, "-m", "fthsdp.coordinator", "--job", "bench", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--replicas", str(self.count), "--min-replicas", "1"]
        command += ["--key-file", str(self.folder / "key"), "--store", f"file:{self.folder / 'epochs.json'}"]
        command += ["--record-dir", str(self.folder / "record")]
        command += ["--spares", str(self.spares)] if self.spares else []
        self._helpers.append(self._start("coordinator", command))
        for replica in range(self.count + self.spares):
            self.spawn(replica)

    def spawn(self, replica: int, *, download: float = 0.0) -> Child:
        attempt = self._attempts[replica] = self._attempts.get(replica, -1) + 1
        workload, port = replace(self.workload, download=download), free_port()
        children = [
            self._start(
                f"r{replica}-a{attempt}-{rank}",
                [sys.executable, "-m", self._module, *workload.arguments()],
                FTHSDP_JOB="bench",
                FTHSDP_REPLICA=str(replica),
                FTHSDP_ATTEMPT=str(attempt),
                FTHSDP_POD_INDEX=str(rank),
                FTHSDP_PODS_PER_REPLICA=str(self._per_replica),
                FTHSDP_COORDINATOR=f"127.0.0.1:{self.port}",
                FTHSDP_JOB_KEY_FILE=str(self.folder / "key"),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            for rank in range(self._per_replica)
        ]
        self.replicas[replica] = children[0]
        self.ranks += children
        self._helpers += children[1:]
        return children[0]

    def joined(self, child: Child) -> Event:
        return child.wait_for("begin")

    def written(self, name: str) -> list[dict[str, Any]]:
        """Return what the run's record holds so far in one of its files, such as steps.jsonl."""
        file = self.folder / "record" / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class TorchftJob(Job):
    """torchft 0.2.0: a lighthouse and the replica groups.

    Its lighthouse waits a second for those who are missing, of whom it hears ten times a second, and looks every 20 ms
    whether it needs to wait on. Its defaults are 60 s, 5 s and 100 ms. A shorter wait would split a healthy job here
    whenever one group is later than the others by more than that: what is waited for is a whole step's difference.
    """

    name = "torchft"

    def start(self) -> None:
        """Start the lighthouse and all replica groups, and let these begin together."""
        self.port = free_port()
        command = [str(torchft_environment() / "torchft_lighthouse"), "--bind", f"[::]:{self.port}"]
        command += ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
        self._helpers.append(self._start("lighthouse", [*command, "--quorum_tick_ms", "20"]))
        for replica in range(self.count):
            self._begin(replica)
        for child in self.replicas.values():
            child.wait_for("ready")
        for child in self.replicas.values():
            child.tell("go")

    def spawn(self, replica: int, *, download: float = 0.0) -> Child:
        child = self._begin(replica)
        child.tell("go")
        return child

    def _begin(self, replica: int) -> Child:
        python = str(torchft_environment() / "python")
        arguments = [f"group-{replica}", f"http://localhost:{self.port}", *self.workload.arguments()]
        name = f"g{replica}-{len(self.gone)}"
        child = self._start(name, [python, "-m", "tests.bench.worker_torchft", *arguments], TORCHFT_USE_OTEL="false")
        self.replicas[replica] = child
        return child

    def joined(self, child: Child) -> Event:
        return child.wait_until("committed", lambda event: event.what == "committed" and event.fields["ok"])


SYSTEMS: tuple[type[Job], ...] = (FthsdpJob, TorchftJob)
