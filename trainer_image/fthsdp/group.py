"""The public face: ``replica_group()`` and the step loop. A script that uses it handles no failure anywhere.

::

    with fthsdp.replica_group(seed=0) as group:
        model, optimizer = build()
        fully_shard(model, mesh=group.mesh)
        state = fthsdp.TrainState(model, optimizer)
        for step in group.steps(state, until=1_000, batch_size=32):
            for batch in step.batches(dataset):
                step.backward(loss_fn(model, batch))
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import default_collate

from fthsdp.attempt import Attempt
from fthsdp.catchup.shelf import FETCH, Fetcher, Shelf
from fthsdp.coordinator.client import LeaderClient
from fthsdp.coordinator.messages import StepRecord
from fthsdp.data.policies import Policies
from fthsdp.data.sampler import SamplerState
from fthsdp.data.stream import Dataset, StreamDataset, reader
from fthsdp.endpoint import Endpoint
from fthsdp.environment import (
    COORDINATOR,
    MASTER_ADDR,
    MASTER_PORT,
    Identity,
    checkpoint_place,
    grace_seconds,
    read_job_key,
)
from fthsdp.errors import ConfigError, Refused, ReplicaLost, RingBroken, WireError
from fthsdp.exit_codes import EXIT_CONFIG, EXIT_LOST, EXIT_REFUSED, EXIT_TERMINATED
from fthsdp.ftar import Engine, FtarSettings
from fthsdp.protocol.decision import Over
from fthsdp.protocol.leader import Leader
from fthsdp.protocol.step_records import Recorder
from fthsdp.protocol.steploop import Place, StepLoop
from fthsdp.ranges import Range
from fthsdp.rank import Parts, Rank
from fthsdp.replica import Follower, LeaderShell, RankPort, Reporter
from fthsdp.state import TrainState
from fthsdp.tls import Tls
from fthsdp.vote import FOR_EVER, gather
from fthsdp.wire import parse_address

if TYPE_CHECKING:
    from fthsdp.checkpoint import Checkpoints

__all__ = ["SWITCH_INTERVAL", "ReplicaGroup", "Step", "replica_group"]

log = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.0002
"""Seconds that a thread keeps the GIL while another one waits for it. With Python's own 5 ms a training thread
that runs Python code (a slow dataset, a long optimizer loop) makes an all-reduce several times slower."""
_START_TIMEOUT = 300.0
"""Seconds that the ranks of a replica wait for each other at the start: scheduling and image pulls take minutes."""
_LEAVE_SHARE = 2 / 3
"""The part of its grace period within which a replica that is told to stop is let go, or gives up on that."""
_WRITE_SHARE = 0.95
"""The part of its grace period within which it may end the checkpoint that the last ones to leave write."""
_CHECKPOINT_TIMEOUT = 60.0
"""Seconds that a finished replica takes to end a checkpoint that it writes."""
_BYE_TIMEOUT = 15.0
"""Seconds that a finished leader waits for the coordinator's last word."""


class Step:
    """One step of one rank: its samples, and the backward passes over them."""

    def __init__(
        self, group: ReplicaGroup, attempt: Attempt, samples: tuple[Range, ...], micro_batch_size: int, lanes: int
    ) -> None:
        self.number = attempt.step
        """This step's number; the first of a run is 1. Under the constant-batch policy a number may come again, with
        further samples of the same step: those of a replica that died in it."""
        self.samples = samples
        """Half-open ranges of the sample numbers of this replica, all its ranks together."""
        self._group = group
        self._attempt = attempt
        self._micro_batch_size = micro_batch_size
        self._lanes = lanes
        self._numbers = group._share_of(self.samples)
        self._taken = 0
        self._current = 0
        self.trained = 0
        """Samples that this rank has run backward for."""
        self.loss_sum = 0.0
        """Of the losses over these samples."""

    def batches(self, dataset: Dataset | StreamDataset) -> Iterator[Any]:
        """Yield this rank's samples of this step as collated micro-batches; call ``backward`` once for each."""
        read = reader(dataset, lanes=self._lanes, seed=self._group.seed)
        while self._taken < len(self._numbers):
            if self.trained < self._taken:
                raise ConfigError(f"step {self.number}: call step.backward(loss) once for each batch")
            numbers = self._numbers[self._taken : self._taken + self._micro_batch_size]
            self._taken += len(numbers)
            self._current = len(numbers)
            yield default_collate([read(number) for number in numbers])

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward for ``loss``, a scalar: the mean over the samples of the current micro-batch.

        The last one of a step hands the gradients over: ``grad`` is None afterwards. Read what counts of them, such as
        their norm, in a hook of the optimizer (``register_step_pre_hook``).
        """
        if not self._current:
            raise ConfigError(f"step {self.number}: step.backward(loss) belongs to a batch of step.batches(dataset)")
        count, self._current = self._current, 0
        state = self._group._state
        last = self._taken == len(self._numbers)
        if last:
            state.arm(self._attempt.give)
        state.scaled(loss * count).backward()  # type: ignore[no-untyped-call]
        if last:
            state.flush()
        self.trained += count
        self.loss_sum += float(loss.detach()) * count

    def _check_complete(self) -> None:
        if self.trained < len(self._numbers):
            raise ConfigError(
                f"step {self.number} ended after {self.trained} of its {len(self._numbers)} samples:"
                " take every batch of step.batches(dataset) and call step.backward(loss) for it"
            )


class ReplicaGroup:
    """This process's place in its replica and in the job. Made by ``replica_group()``."""

    def __init__(
        self, identity: Identity, key: bytes, *, tls: Tls | None, seed: int, settings: FtarSettings, started: float
    ) -> None:
        self.identity = identity
        self.seed = seed
        self.device = torch.device("cpu")
        """Where the parameters of this rank live."""
        self.finished = False
        """Whether the run is over: its last step is final. False after being let go at a boundary."""
        self.log_final = False
        """Print the loss of each final step (one replica does)."""
        self._grace = grace_seconds(os.environ)
        self._told_to_stop: float | None = None
        """When the SIGTERM came, by the monotonic clock."""
        self._let_go = threading.Event()
        """The run is over for this replica: finished, or let go at a boundary."""
        self._key = key
        self._tls = tls
        self._settings = settings
        self._started = started
        self._process_group = _join_replica(identity)
        self.mesh: DeviceMesh = init_device_mesh("cpu", (identity.world_size,))
        """The ranks of this replica: give it to ``fully_shard``."""
        self._endpoint = Endpoint(host=identity.host, key=key, job=identity.job, tls=tls)
        self._shelf = Shelf()
        self._endpoint.serve(FETCH, self._shelf.serve)
        self._checkpoints: Checkpoints | None = None
        self._reporter: Reporter | None = None
        self._engine = Engine(
            identity=identity,
            key=key,
            endpoint=self._endpoint,
            settings=settings,
            on_connected=self._on_connected,
            on_broken=self._on_broken,
        )
        self._port = RankPort(identity, self._engine)
        self._shell: LeaderShell | None = None
        self._follower: Follower | None = None
        self._link_up()

    # --- what the script uses

    def steps(
        self, state: TrainState, *, until: int, batch_size: int, micro_batch_size: int | None = None, lanes: int = 0
    ) -> Iterator[Step]:
        """Yield the steps up to ``until``; leaving a step's body reduces, agrees and updates.

        ``batch_size`` counts the samples of one replica in one step, all its ranks together; ``micro_batch_size`` those
        of one rank in one forward and backward pass (default: all of its share). ``lanes`` are those of the
        StreamDataset that is trained on; 0 for a dataset that can be indexed. The loop ends early when this replica is
        asked to leave; ``finished`` tells. Raises ConfigError, ReplicaLost, Refused.
        """
        micro = self._check_sizes(until, batch_size, micro_batch_size)
        self._state = state
        recorder = Recorder(
            self.identity,
            started=self._started,
            publish=self._shell.publish if self._shell else None,
            clock=time.time,
        )
        recorder.on_final = self._print_final
        self._checkpoints = self._open_checkpoints()
        rank = Rank(self._parts(), state)
        place = Place(
            replica=self.identity.replica,
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            batch_size=batch_size,
            policies=Policies.from_environment(os.environ),
        )
        loop = StepLoop(place, rank, recorder, sampler=SamplerState(heads=(0,) * lanes))
        try:
            rank.run(loop.join())
            while True:
                attempt = rank.begin(loop)
                if attempt.step > until:
                    rank.run(loop.close(attempt))
                    continue
                more = True
                while more:
                    self._seed(attempt.step)
                    step = Step(self, attempt, loop.samples(), micro, len(loop.sampler.heads))
                    yield step
                    step._check_complete()
                    more = rank.run(loop.finish(attempt, samples=step.trained, loss_sum=step.loss_sum))
        except Over as over:
            self._let_go.set()
            self.finished = over.finished
            if over.finished and self._shell is not None:
                self._shell.wait(lambda leader: leader.bye or None, _BYE_TIMEOUT)

    # --- inside

    def _parts(self) -> Parts:
        assert self._reporter is not None
        return Parts(
            identity=self.identity,
            process_group=self._process_group,
            engine=self._engine,
            port=self._port,
            shelf=self._shelf,
            fetcher=Fetcher(key=self._key, job=self.identity.job, tls=self._tls),
            reporter=self._reporter,
            shell=self._shell,
            checkpoints=self._checkpoints,
            let_go=self._let_go.set,
        )

    def _open_checkpoints(self) -> Checkpoints | None:
        place = checkpoint_place(os.environ)
        if place is None:
            return None
        from fthsdp.checkpoint import Checkpoints  # what it imports takes a newcomer's time; most jobs write none

        path, every = place
        return Checkpoints(
            path,
            every_steps=every,
            process_group=self._process_group,
            job=self.identity.job,
            replica=self.identity.replica,
            attempt=self.identity.attempt,
        )

    def _check_sizes(self, until: int, batch_size: int, micro_batch_size: int | None) -> int:
        ranks = self.identity.world_size
        if until < 1:
            raise ConfigError(f"until={until}: a run has at least one step")
        if batch_size < 1 or batch_size % ranks:
            raise ConfigError(f"batch_size={batch_size} cannot be dealt evenly to the {ranks} ranks of a replica")
        micro = batch_size // ranks if micro_batch_size is None else micro_batch_size
        if micro < 1:
            raise ConfigError(f"micro_batch_size={micro}: a micro-batch has at least one sample")
        return micro

    def _share_of(self, samples: tuple[Range, ...]) -> list[int]:
        """Return this rank's part of the replica's samples: a contiguous run of them."""
        numbers = [number for start, stop in samples for number in range(start, stop)]
        each = len(numbers) // self.identity.world_size
        return numbers[each * self.identity.rank : each * (self.identity.rank + 1)]

    def _seed(self, step: int) -> None:
        """Make randomness a function of (seed, step, replica, rank)."""
        text = f"{self.seed}/{step}/{self.identity.replica}/{self.identity.rank}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1)

    def _print_final(self, record: StepRecord) -> None:
        if self.log_final and record.loss is not None and record.contributors[0] == self.identity.replica:
            active = len(record.contributors)
            print(f"step {record.step}  loss {record.loss:.4f}  replicas {active}", flush=True)

    def _link_up(self) -> None:
        """Exchange addresses inside the replica, link every rank to the leader, and let the leader say hello."""
        if self.identity.rank == 0:
            leader = Leader(replica=self.identity.replica, world_size=self.identity.world_size)
            self._reporter = self._shell = LeaderShell(leader, port=self._port, endpoint=self._endpoint)
        # The leader serves its ranks before they learn its address.
        data = gather(json.dumps(self._endpoint.address).encode(), self._process_group)
        addresses = tuple(json.loads(address) for address in data)
        if self._shell is not None:
            self._shell.start(
                self._client(addresses), timeout=_START_TIMEOUT, silence_timeout=self._settings.silence_timeout
            )
        else:
            self._reporter = self._follower = Follower(
                addresses[0], self._key, identity=self.identity, port=self._port, tls=self._tls
            )
            self._follower.start()

    def _client(self, addresses: tuple[str, ...]) -> LeaderClient:
        assert self._shell is not None
        return LeaderClient(
            address=self.identity.coordinator,
            key=self._key,
            tls=self._tls,
            job=self.identity.job,
            replica=self.identity.replica,
            attempt=self.identity.attempt,
            addresses=addresses,
            on_message=self._shell.on_message,
            times={
                "keepalive_interval": self._settings.keepalive_interval,
                "ring_silence_timeout": self._settings.silence_timeout,
                "ring_connect_timeout": self._settings.connect_timeout,
            },
        )

    def _on_connected(self, epoch: int) -> None:
        assert self._reporter is not None
        self._reporter.connected(epoch)

    def _on_broken(self, epoch: int, error: RingBroken) -> None:
        assert self._reporter is not None
        self._reporter.broken(epoch, error.suspect, str(error))

    def _leave(self) -> None:
        """Ask to be let go at the next boundary; end the process when that takes too long."""
        assert self._reporter is not None
        self._told_to_stop = time.monotonic()
        self._reporter.leaving("SIGTERM")
        if not self._let_go.wait(_LEAVE_SHARE * self._grace):
            log.warning("not let go within %.0f s of SIGTERM", _LEAVE_SHARE * self._grace)
            os._exit(EXIT_TERMINATED)

    def _time_to_write(self) -> float:
        """Return the seconds that a checkpoint which is still being written is waited for."""
        if self.finished:
            return _CHECKPOINT_TIMEOUT
        if not self._let_go.is_set():
            return 0.0
        now = time.monotonic()
        told = self._told_to_stop or now  # another rank of this replica may have been told, and not this one
        return max(0.0, told + _WRITE_SHARE * self._grace - now)

    def close(self) -> None:
        """End all connections and threads: in good order when the run is over, at once when something went wrong."""
        if self._checkpoints is not None:
            self._checkpoints.close(linger=self._time_to_write())
        self._engine.close(linger=2.0 if self._let_go.is_set() else 0.0)
        if self._shell is not None:
            self._shell.close()
        if self._follower is not None:
            self._follower.close()
        self._shelf.close()
        self._endpoint.close()
        dist.destroy_process_group()


@contextmanager
def replica_group(*, seed: int = 0, settings: FtarSettings | None = None) -> Iterator[ReplicaGroup]:
    """Join this replica's process group and the job; who we are comes from the environment.

    SIGTERM makes the replica leave at the next boundary, which costs nobody a step. Errors that mean something to the
    operator end the process with its exit code: 2 bad input, 75 start again and catch up, 77 refused.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with _exit_codes(), _short_switch_interval():
        identity = _who_we_are()
        group = ReplicaGroup(
            identity,
            read_job_key(),
            tls=Tls.from_environment(),
            seed=seed,
            settings=settings or FtarSettings.from_environment(),
            started=_process_start(),
        )
        previous = signal.signal(
            signal.SIGTERM, lambda *_: threading.Thread(target=group._leave, name="fthsdp-leave", daemon=True).start()
        )
        try:
            yield group
        finally:
            signal.signal(signal.SIGTERM, previous)
            group.close()


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Let the progress thread have the GIL soon while the training thread runs Python code."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        print(f"fthsdp: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CONFIG) from error
    except ReplicaLost as error:
        log.error("this replica starts again: %s", error)
        raise SystemExit(EXIT_LOST) from error
    except Refused as error:
        log.error("refused: %s", error)
        raise SystemExit(EXIT_REFUSED) from error


def _who_we_are() -> Identity:
    identity = Identity.from_environment()
    try:
        parse_address(identity.coordinator)
    except WireError as error:
        raise ConfigError(f"{COORDINATOR}: {error}") from error
    return identity


def _join_replica(identity: Identity) -> dist.ProcessGroup:
    """Build the process group of this replica."""
    if MASTER_ADDR not in os.environ and identity.world_size > 1:
        raise ConfigError(f"{MASTER_ADDR} is not set: the ranks of this replica cannot find each other")
    os.environ.setdefault(MASTER_ADDR, "127.0.0.1")
    os.environ.setdefault(MASTER_PORT, "0")
    store, rank, size = next(
        rendezvous(
            "env://", rank=identity.rank, world_size=identity.world_size, timeout=timedelta(seconds=_START_TIMEOUT)
        )
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=FOR_EVER)
    group = dist.group.WORLD
    assert group is not None
    return group


def _process_start() -> float:
    """Return the Unix time at which this process started, importing torch included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
