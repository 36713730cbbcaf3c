"""When checkpoints are written and read: the part that the step loop uses.

::

    checkpoints = Checkpoints(path, every_steps=100, process_group=group, job=…, replica=…, attempt=…)   # all ranks
    loaded = checkpoints.load(state)              # at the start, on all ranks of every replica; None: nothing there
    if checkpoints.due(step) and this replica is the one that writes:
        checkpoints.begin(step, state, sampler)   # at the boundary after ``step``, on all its ranks
    checkpoints.final(step)                       # on all its ranks, once the step after it is committed
    checkpoints.drop()                            # instead: the state at that boundary was undone
    checkpoints.last(step, state, sampler)        # at the boundary after ``step``, when all replicas leave there
    checkpoints.close(linger=60)                  # at the end

``begin`` copies this rank's state to host memory, and nothing else holds training up: a thread writes the copy. The
ranks' threads agree over a process group of their own, so that they never meet the collectives of training.

A checkpoint is committed (see ``folder``) only when all ranks have written and its step is final, so one of a state
that the job then gave up never counts. While one is being written, another is not begun. What goes wrong in writing (a
full disk, a folder that is read-only or gone) is a warning, and the next one is tried as if nothing had been. Reading
is strict: a folder that cannot be read, only damaged checkpoints, or one of another model are ConfigErrors.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fthsdp.catchup.snapshot import Snapshot
from fthsdp.checkpoint.files import METADATA, read_shard, write_metadata, write_shard
from fthsdp.checkpoint.folder import (
    Broken,
    Stored,
    commit,
    crc32,
    discard,
    newest,
    part_name,
    prune,
    survey,
    verify,
    warn,
)
from fthsdp.checkpoint.shards import Copied, HostCopy, Shards
from fthsdp.errors import ConfigError
from fthsdp.scramble import fingerprint
from fthsdp.state import TrainState
from fthsdp.vote import FOR_EVER, gather, share

__all__ = ["Checkpoints", "Loaded"]

log = logging.getLogger(__name__)

_Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What ``load`` found besides the state, which it restored."""

    step: int
    """Last step in it."""
    sampler: _Json
    digest: str
    """Of the state of all ranks of the replica that wrote it, in hex: the same wherever this checkpoint is loaded."""
    path: Path


class _Verdict(Enum):
    FINAL = "final"
    DROPPED = "dropped"


@dataclass(slots=True, kw_only=True, eq=False)
class _Write:
    """One checkpoint on its way to the disk, as one rank sees it."""

    step: int
    part: Path
    sampler: _Json
    copied: Copied | None
    """None: there was no memory for the copy."""
    after: threading.Thread | None
    """The one before, which may still be committing."""
    began: float = field(default_factory=time.monotonic)
    written: threading.Event = field(default_factory=threading.Event)
    """All ranks have written or failed, and the copy is not needed any more."""
    decided: threading.Event = field(default_factory=threading.Event)
    verdict: _Verdict | None = None
    thread: threading.Thread | None = None

    def decide(self, verdict: _Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.decided.set()


class Checkpoints:
    """The checkpoints of one job, from one rank of one of its replicas.

    All ranks of the replica make it at the same time and call its methods in the same order, ``due`` and ``newest``
    aside. ``path`` is a folder that all ranks of all replicas share; it need not exist yet.
    """

    def __init__(
        self,
        path: Path,
        *,
        every_steps: int,
        process_group: dist.ProcessGroup,
        job: str,
        replica: int,
        attempt: int,
        keep: int = 2,
    ) -> None:
        """``keep`` counts the newest ones that stay. Raises ConfigError for numbers below 1."""
        if every_steps < 1:
            raise ConfigError(f"a checkpoint every {every_steps} steps: give a number of at least 1")
        if keep < 1:
            raise ConfigError(f"{keep} checkpoints to keep: at least the newest one stays")
        self.path = path
        self._every, self._keep = every_steps, keep
        self._group = process_group
        self._rank, self._ranks = process_group.rank(), process_group.size()
        self._writers = _writers(process_group)
        self._who: _Json = {"job": job, "replica": replica, "attempt": attempt}
        self._copy = HostCopy()
        self._shards: Shards | None = None
        self._last: _Write | None = None

    # --- writing

    def due(self, step: int) -> bool:
        """Return whether a checkpoint belongs after ``step``."""
        return step % self._every == 0

    def begin(self, step: int, state: TrainState, sampler: _Json) -> bool:
        """Copy the state at the boundary after ``step`` and begin to write it. Return whether one was begun.

        Raises ConfigError for state that cannot be stored.
        """
        began = time.monotonic()
        self.drop()
        nonce = self._agree_to_begin()
        if nonce is None:
            if self._rank == 0:
                log.warning("no checkpoint of step %d: the one before is still being written", step)
            return False
        part = self.path / part_name(step, replica=self._who["replica"], attempt=self._who["attempt"], nonce=nonce)
        before = self._last.thread if self._last is not None else None
        self._last = _Write(step=step, part=part, sampler=sampler, copied=self._take(state), after=before)
        self._last.thread = threading.Thread(
            target=self._write, args=(self._last,), name=f"fthsdp-checkpoint-{step}", daemon=True
        )
        self._last.thread.start()
        if self._rank == 0:
            log.info("checkpoint of step %d: training waited %.3f s for the copy", step, time.monotonic() - began)
        return True

    def _agree_to_begin(self) -> str | None:
        """Return a name for the new one, when no rank is still busy with the one before."""
        busy = self._last is not None and not self._last.written.is_set()
        said = [json.loads(data) for data in gather(json.dumps([busy, secrets.token_hex(4)]).encode(), self._group)]
        return None if any(busy for busy, _ in said) else str(said[0][1])

    def _take(self, state: TrainState) -> Copied | None:
        self._shards = self._shards or Shards(state.model)
        snapshot = state.snapshot()
        try:
            return self._copy.take(snapshot, self._shards)
        except (RuntimeError, MemoryError) as error:  # torch has no name for memory that there is not
            log.warning("no memory for a copy of the state: %s", error)
            return None

    def last(self, step: int, state: TrainState, sampler: _Json) -> None:
        """Write the state after ``step``, due or not, behind one that is being written: no other step follows."""
        if self._last is None or self._last.step != step:
            if self._last is not None:
                self._last.written.wait()
            self.begin(step, state, sampler)
        self.final(step)

    def final(self, step: int) -> None:
        """The state at the boundary after ``step`` is final: when that is the one being written, it may count."""
        if self._last is not None and self._last.step == step:
            self._last.decide(_Verdict.FINAL)

    def drop(self) -> None:
        """The state that was last copied is not to count, unless it was said to be final."""
        if self._last is not None:
            self._last.decide(_Verdict.DROPPED)

    def close(self, linger: float = 0.0) -> None:
        """Wait up to ``linger`` seconds for a checkpoint of a final step; what is not committed then never is."""
        self.drop()
        if self._last is not None and self._last.thread is not None:
            self._last.thread.join(linger)

    # --- the thread that writes

    def _write(self, write: _Write) -> None:
        """Write this rank's files and, as rank 0, commit. Whatever goes wrong: training goes on."""
        try:
            if write.after is not None:
                write.after.join()
            reports = self._write_files(write)
            write.copied = None
            write.written.set()
            if self._rank == 0:
                self._conclude(write, reports)
        except Exception as error:
            self._give_up(write, error)
        finally:
            write.written.set()

    def _write_files(self, write: _Write) -> list[_Json]:
        """Let every rank write its files, and return what each says of its own; raises Broken when one could not."""

        def look() -> _Json:
            if write.copied is None:
                raise MemoryError("no memory for a copy of the state")
            return {"common": write.copied.common()}

        uniform = len({said["common"] for said in self._exchange(look, self._writers)}) == 1

        def store() -> _Json:
            assert write.copied is not None
            write.part.mkdir(parents=True, exist_ok=True)
            names = write_shard(write.part, self._rank, write.copied, uniform=uniform)
            files = {name: _seal(write.part / name) for name in names}
            return {"files": files, "uniform": uniform, "digest": write.copied.digest()}

        return self._exchange(store, self._writers)

    def _exchange(self, work: Callable[[], _Json], group: dist.ProcessGroup) -> list[_Json]:
        """Do ``work`` on every rank and return what each says; raises Broken on all of them when one failed."""
        said: _Json
        try:
            said = {"result": work()}
        except Exception as error:
            said = {"error": str(error) or type(error).__name__}
        answers = [json.loads(data) for data in gather(json.dumps(said).encode(), group)]
        errors = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
        if errors:
            raise Broken(_summary(errors, self._ranks))
        return [answer["result"] for answer in answers]

    def _conclude(self, write: _Write, reports: list[_Json]) -> None:
        """Make it a checkpoint once its step is final; raises Broken, OSError."""
        write_metadata(write.part, self._ranks)
        files = {METADATA: _seal(write.part / METADATA)}
        for report in reports:
            files |= report["files"]
        write.decided.wait()
        if write.verdict is _Verdict.DROPPED:
            raise Broken("its step did not become final here")
        meta = {
            **self._who,
            "step": write.step,
            "digest": fingerprint(report["digest"] for report in reports),
            "sampler": write.sampler,
            "ranks": self._ranks,
            "uniform": reports[0]["uniform"],
            "fthsdp": _version(),
            "torch": torch.__version__,
            "written": time.time(),
            "files": files,
        }
        final = commit(write.part, meta)
        size = sum(size for size, _ in files.values())
        log.info("checkpoint %s: %d bytes, durable after %.2f s", final, size, time.monotonic() - write.began)
        try:
            prune(self.path, write.step, keep=self._keep)
        except OSError as error:
            log.warning("older checkpoints in %s stay until the next one: %s", self.path, error)

    def _give_up(self, write: _Write, error: Exception) -> None:
        if self._rank != 0 and isinstance(error, Broken):
            return  # rank 0 says it
        log.warning("no checkpoint of step %d: %s", write.step, error)
        try:
            if write.part.exists():
                discard(write.part)
        except OSError as trouble:
            log.warning("%s stays until a later checkpoint clears it away: %s", write.part, trouble)

    # --- reading

    def newest(self) -> Stored | None:
        """Return the newest whole checkpoint in the folder; raises ConfigError when that cannot be read."""
        return newest(self.path)

    def load(self, state: TrainState) -> Loaded | None:
        """Restore the newest undamaged checkpoint into ``state``, on all ranks; None when there is none.

        The replica may have any number of ranks. Raises ConfigError, on all ranks, for a folder that cannot be read,
        when all that is there is damaged, and when a checkpoint is not of this model, optimizer and scheduler.
        """
        while True:
            whole, damaged = self._look()
            for stored in whole:
                try:
                    self._verify(stored)
                    snapshot = self._read(stored, state)
                except Broken as reason:
                    if self._gone(stored):
                        break  # its writer has newer ones by now
                    damaged.append(f"{stored.path.name}: {reason}")
                    if self._rank == 0:
                        log.warning("checkpoint %s is damaged and is left out: %s", stored.path, reason)
                    continue
                state.restore(snapshot)
                meta = stored.meta
                return Loaded(step=stored.step, sampler=meta["sampler"], digest=meta["digest"], path=stored.path)
            else:
                break
        if damaged:
            raise ConfigError(
                f"no checkpoint in {self.path} is undamaged ({'; '.join(damaged)}):"
                " put one back, or name an empty folder to begin anew"
            )
        return None

    def _look(self) -> tuple[list[Stored], list[str]]:
        """Let rank 0 look at the folder, for all: over a network each could see something else.

        Return the whole ones, newest first, and what is wrong with the others; raises ConfigError.
        """

        def look() -> _Json:
            try:
                found = survey(self.path)
            except ConfigError as error:
                return {"error": str(error)}
            warn(self.path, found)
            whole = [[stored.step, stored.path.name, stored.meta] for stored in found.whole]
            return {"whole": whole, "broken": [f"{name}: {reason}" for name, reason in found.broken.items()]}

        said = self._ask_rank_0(look)
        if "error" in said:
            raise ConfigError(said["error"])
        whole = [Stored(step=step, path=self.path / name, meta=meta) for step, name, meta in said["whole"]]
        return whole, said["broken"]

    def _gone(self, stored: Stored) -> bool:
        return bool(self._ask_rank_0(lambda: {"gone": not stored.path.exists()})["gone"])

    def _ask_rank_0(self, work: Callable[[], _Json]) -> _Json:
        answer = json.dumps(work()).encode() if self._rank == 0 else None
        said: _Json = json.loads(share(answer, self._group))
        return said

    def _verify(self, stored: Stored) -> None:
        """Let the ranks read all files, a part each; raises Broken on all of them when one is damaged."""
        names = sorted(stored.meta["files"])[self._rank :: self._ranks]

        def read() -> _Json:
            verify(stored, names)
            return {}

        self._exchange(read, self._group)

    def _read(self, stored: Stored, state: TrainState) -> Snapshot:
        """Return what to restore, once all ranks have theirs; raises Broken, ConfigError on all of them."""
        read: list[Snapshot] = []

        def work() -> _Json:
            try:
                read.append(
                    read_shard(
                        stored.path,
                        state,
                        rank=self._rank,
                        ranks=self._ranks,
                        stored_ranks=stored.meta["ranks"],
                        uniform=stored.meta["uniform"],
                    )
                )
            except ConfigError as error:
                return {"refused": str(error)}
            return {}

        said = self._exchange(work, self._group)
        refused = {rank: answer["refused"] for rank, answer in enumerate(said) if "refused" in answer}
        if refused:
            raise ConfigError(_summary(refused, self._ranks))
        return read[0]


def _writers(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make another process group of the same ranks, for their writing threads."""
    ranks = dist.get_process_group_ranks(process_group)
    group = dist.new_group(ranks, backend="gloo", timeout=FOR_EVER, group_desc="checkpoints")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _summary(errors: dict[int, str], ranks: int) -> str:
    """Say once what all ranks say, and otherwise who says what, of the first few."""
    if len(errors) == ranks and len(set(errors.values())) == 1:
        return errors[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())[:3])


def _seal(path: Path) -> list[int]:
    """Return what the marker says of a file: its bytes, and their CRC-32."""
    return [path.stat().st_size, crc32(path)]


def _version() -> str:
    try:
        return version("fthsdp")
    except PackageNotFoundError:
        return "not installed"
