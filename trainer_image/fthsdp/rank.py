"""One live rank: carries out what its step loop asks for, with torch, threads and sockets."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from fthsdp.attempt import Attempt, BufferPool
from fthsdp.catchup.download import Download, Downloaded
from fthsdp.catchup.shelf import Fetcher, Shelf, Stripe
from fthsdp.catchup.snapshot import copy_stripe
from fthsdp.coordinator.messages import LONGEST_STACK, EpochRecord, Phase, RankReport
from fthsdp.data.sampler import SamplerState
from fthsdp.environment import Identity
from fthsdp.errors import NotReady, ReplicaLost, RingBroken, WireError
from fthsdp.ftar import Engine, Work
from fthsdp.protocol.decision import Decision, decision
from fthsdp.protocol.header import Opening
from fthsdp.protocol.leader import Effect, Leader
from fthsdp.protocol.requests import (
    AwaitDecision,
    AwaitOpening,
    AwaitRecord,
    AwaitRing,
    AwaitVote,
    Fetch,
    KeptStep,
    LoadCheckpoint,
    Reduced,
    Request,
    Steps,
)
from fthsdp.protocol.steploop import StepLoop
from fthsdp.replica import LeaderShell, RankPort, Reporter
from fthsdp.state import TrainState
from fthsdp.vote import share, vote

if TYPE_CHECKING:
    from fthsdp.checkpoint import Checkpoints

__all__ = ["Parts", "Rank"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_PHASES: Mapping[type, Phase] = {
    AwaitRing: Phase.COLLECTIVE,
    AwaitOpening: Phase.COLLECTIVE,
    AwaitVote: Phase.VOTE,
    LoadCheckpoint: Phase.UPDATE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a rank is made of; put together by ``fthsdp.group``."""

    identity: Identity
    process_group: dist.ProcessGroup
    engine: Engine
    port: RankPort
    shelf: Shelf
    fetcher: Fetcher
    reporter: Reporter
    shell: LeaderShell | None
    """At rank 0."""
    checkpoints: Checkpoints | None
    """None when the job writes none."""
    let_go: Callable[[], None]
    """Takes note that the replica has been let go, though it may still have a checkpoint to write."""


class Rank:
    """Runs the coroutines of a ``StepLoop``, and is its ``Body``."""

    def __init__(self, parts: Parts, state: TrainState) -> None:
        self._parts = parts
        self._me = parts.identity.replica
        self._state = state
        self._pool = BufferPool(state.bucket_sizes)
        self._opening: Work[list[bytes]] | None = None
        self._thread = threading.get_ident()
        self._loop: StepLoop | None = None
        self._goes_to(Phase.BODY)
        parts.port.whereabouts = self._whereabouts

    # --- requests: here the training thread waits

    def run(self, steps: Steps[_T]) -> _T:
        """Run a part of the loop to its end and return its value."""
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                value: _T = end.value
                self._goes_to(Phase.BODY)
                return value
            self._goes_to(_PHASES.get(type(request), Phase.WAITING))
            answer = self._answer(request)
            self._goes_to(Phase.UPDATE)

    def _goes_to(self, phase: Phase) -> None:
        self._phase = (phase, time.monotonic())

    def _whereabouts(self) -> RankReport:
        """Say where the training thread is (from another thread)."""
        phase, since = self._phase
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame))[-LONGEST_STACK:] if frame is not None else ""
        return RankReport(
            rank=self._parts.identity.rank,
            epoch=self._loop.epoch if self._loop else 0,
            step=self._loop.step + 1 if self._loop else 0,
            phase=phase,
            seconds=time.monotonic() - since,
            stack=stack,
        )

    def begin(self, loop: StepLoop) -> Attempt:
        """Begin the loop's next step."""
        self._loop = loop
        attempt = self.run(loop.begin())
        assert isinstance(attempt, Attempt)
        return attempt

    def _answer(self, request: Request) -> Any:
        match request:
            case AwaitRing(attempt=Attempt() as attempt):
                return attempt.result(request.assigned, request.spare_time)
            case AwaitVote():
                return vote(request.ballot, self._parts.process_group)
            case AwaitDecision():
                return self._decision(request)
            case AwaitOpening():
                return self._await_opening()
            case AwaitRecord():
                return self._parts.port.record(request.epoch)
            case Fetch():
                return self._fetch(request)
            case LoadCheckpoint():
                return self._load_checkpoint(request.step)
        raise AssertionError(f"nobody answers {request!r}")

    def _decision(self, request: AwaitDecision) -> Decision:
        """The leader waits and shares, the other ranks listen; all of them come here at the same time."""
        if self._parts.shell is None:
            return Decision.model_validate_json(share(None, self._parts.process_group))
        answer = self._parts.shell.wait(
            lambda leader: decision(leader, request.wanted, request.after), request.patience
        )
        answer = answer or Decision()
        share(answer.model_dump_json().encode(), self._parts.process_group)
        return answer

    def _await_opening(self) -> tuple[Opening, ...] | None:
        assert self._opening is not None
        try:
            return tuple(Opening.unpack(data) for data in self._opening.wait())
        except RingBroken as error:
            log.info("an epoch did not begin here: %s", error)
            return None

    def _fetch(self, request: Fetch) -> Reduced | None:
        try:
            return self._parts.fetcher.outcome(request.address, request.step, self._pool.sizes)
        except (NotReady, WireError) as error:
            log.warning("replica %d gave no outcome of step %d: %s", request.replica, request.step, error)
            self._parts.reporter.broken(request.epoch, request.replica, f"roll-forward: {error}")
            return None

    def _load_checkpoint(self, step: int) -> SamplerState:
        assert self._parts.checkpoints is not None
        loaded = self._parts.checkpoints.load(self._state)
        if loaded is None or loaded.step != step:
            found = None if loaded is None else loaded.step
            raise ReplicaLost(f"the run begins from the checkpoint of step {step}, and the newest here is {found}")
        return SamplerState.from_json(loaded.sampler)

    # --- the body: nothing waits

    def tell(self, event: Callable[[Leader], list[Effect]]) -> None:
        """Give the leader an event and carry out its effects; nothing on the other ranks."""
        if self._parts.shell is not None:
            self._parts.shell.run(event)

    def begins_vote(self, epoch: int) -> tuple[bool, int]:
        """At rank 0: whether the leader may commit in this epoch, and its fence. Elsewhere (True, 0)."""
        if self._parts.shell is None:
            return True, 0
        return self._parts.shell.ask(lambda leader: leader.vote_begins(epoch))

    @property
    def heard(self) -> int:
        """Newest epoch that may begin at the next boundary; 0 for none."""
        return self._parts.port.heard

    def enter(self, record: EpochRecord, opening: Opening) -> None:
        """Move to the rings of this epoch, and say there where we stand."""
        # The training thread can be faster than the leader's command to connect; twice does nothing.
        self._parts.port.connect(record)
        self._parts.engine.activate(record.number)
        self._opening = self._parts.engine.all_gather(step=0, payload=opening.pack())

    def openings(self) -> tuple[Opening, ...] | None:
        """Return what all members said when this epoch opened; None while it is not known, or was never all said."""
        if self._opening is None or not self._opening.done():
            return None
        return self._await_opening()

    def attempt(self, step: int, *, shadow: bool) -> Attempt:
        """Begin to collect this rank's gradients of a step, and with what is said of the state before it."""
        if not shadow:
            self._state.begin_digest()
        return Attempt(self._parts.engine, self._pool, step=step, shadow=shadow)

    def digest(self) -> int:
        """Return 64 bits over this rank's state."""
        return self._state.digest()

    def norm_squared(self, reduced: Reduced) -> float:
        """Return the squared norm of this rank's reduced gradients if the update depends on it, else 0."""
        return self._state.norm_squared(reduced.gradients) if self._state.uses_norm else 0.0

    def update(self, kept: KeptStep, lr_factor: float) -> None:
        """Apply one step, live or in replay."""
        scale = self._parts.identity.world_size / kept.total_samples
        self._state.update(kept.reduced.gradients, scale=scale, norm_squared=kept.norm_squared, lr_factor=lr_factor)

    def download(self, donors: Mapping[int, str], epoch: int) -> Download:
        """Begin to fetch the stripes of this epoch from these donors."""
        if self._parts.checkpoints is not None:
            self._parts.checkpoints.drop()
        return Download(self._parts.fetcher, donors, shadow=self._me, epoch=epoch)

    def load(self, downloaded: Downloaded) -> None:
        """Make what was downloaded the state."""
        self._state.restore(downloaded.snapshot)

    def recycle(self, reduced: Reduced) -> None:
        """Nobody needs these gradients any more."""
        self._pool.give_back(reduced.gradients)

    def offer_outcome(self, reduced: Reduced) -> None:
        """Offer the outcome of the newest step to who missed it."""
        self._parts.shelf.put_outcome(reduced)

    def offer_stripe(self, shadow: int, epoch: int, *, part: int, parts: int, step: int, sampler: SamplerState) -> None:
        """Copy this donor's part of the state, beside the next forward and backward, and offer it to a shadow."""
        snapshot, shelf = self._state.snapshot(), self._parts.shelf
        head = {"meta": snapshot.meta, "sampler": sampler.to_json()}

        def copy() -> None:
            (start, _), data = copy_stripe(snapshot, part, parts)
            shelf.put_stripe(shadow, epoch, Stripe(step=step, start=start, data=data, head=head))

        self._state.read_beside(copy)

    def keep_stripes_of(self, shadows: list[int], epoch: int) -> None:
        """Drop the stripes for all others."""
        self._parts.shelf.keep_stripes_of(shadows, epoch)

    def newest_checkpoint(self) -> tuple[int, str] | None:
        """Return step and digest of the newest whole checkpoint that can be read here; None when there is none."""
        stored = None if self._parts.checkpoints is None else self._parts.checkpoints.newest()
        return None if stored is None else (stored.step, str(stored.meta["digest"]))

    def checkpoint(self, step: int, sampler: SamplerState) -> None:
        """Begin a checkpoint of the state after ``step`` if one is due."""
        checkpoints = self._parts.checkpoints
        if checkpoints is not None and checkpoints.due(step):
            checkpoints.begin(step, self._state, sampler.to_json())

    def last_checkpoint(self, step: int, sampler: SamplerState) -> None:
        """Write the state after ``step``, after which nobody trains on. One that is being written is waited for."""
        self._parts.let_go()
        if self._parts.checkpoints is not None:
            self._parts.checkpoints.last(step, self._state, sampler.to_json())

    def final(self, step: int) -> None:
        """This step can no longer be undone."""
        if self._parts.checkpoints is not None:
            self._parts.checkpoints.final(step)
