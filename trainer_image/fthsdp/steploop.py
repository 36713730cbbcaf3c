"""The step protocol as one rank's training thread lives it.

All ranks of a replica run this in lockstep: every decision is taken either by a vote over the replica's own process
group or by the leader, which shares it. A step goes: gradients are handed over (``Attempt``), the rail's ring reduces
them, the replica votes, and when it is prepared, the update is applied and the next step begins. When a ring broke,
the ranks meet in the vote all the same, learn it there, and wait for the coordinator's decision; nothing of the
forward and backward passes is repeated.

The same loop carries a shadow: it contributes zeros, keeps what the rings reduce, and replays it once it has the state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from fthsdp.attempt import Attempt, BufferPool
from fthsdp.catchup.catchup import CatchUp, KeptStep
from fthsdp.catchup.download import Download, Downloaded
from fthsdp.catchup.shelf import Fetcher, Outcome, Shelf, Stripe
from fthsdp.catchup.snapshot import copy_stripe
from fthsdp.coordinator.messages import Assigned, EpochRecord, Role
from fthsdp.data.sampler import Assignment, SamplerState, assign, commit
from fthsdp.decisions import Decisions, Over
from fthsdp.entering import Entry, how_to_enter
from fthsdp.environment import Identity
from fthsdp.errors import ConfigError, NotReady, ReplicaLost, RingBroken, StateDiverged, WireError
from fthsdp.ftar import Engine, Work
from fthsdp.header import Flag, Header, Opening, misfits, odd_ones
from fthsdp.member import Effect, Leader
from fthsdp.ranges import Range, union
from fthsdp.replica import RankPort, Reporter
from fthsdp.state import TrainState
from fthsdp.step_records import Ending, Recorder, Trained
from fthsdp.vote import Ballot, Tally, vote

__all__ = ["Parts", "StepLoop"]

log = logging.getLogger(__name__)

_POLL = 0.02
"""Seconds between looks of a paused shadow, which waits for the coordinator and for its download at the same time."""
_DIGEST_BITS = (1 << 52) - 1
_NO_EPOCH = EpochRecord(number=0, members=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop works with; put together by ``fthsdp.group``."""

    identity: Identity
    process_group: dist.ProcessGroup
    engine: Engine
    port: RankPort
    shelf: Shelf
    fetcher: Fetcher
    decisions: Decisions
    recorder: Recorder
    reporter: Reporter


class StepLoop:
    """Drives one rank from boundary to boundary."""

    def __init__(self, parts: Parts, state: TrainState, *, batch_size: int) -> None:
        self._parts = parts
        self._me = parts.identity.replica
        self._decisions = parts.decisions
        self._state = state
        self._batch_size = batch_size
        self._pool = BufferPool(state.bucket_sizes)
        self._record = _NO_EPOCH
        self._opening: Work[list[bytes]] | None = None
        self._stripes_owed = False
        self._catchup: CatchUp | None = None
        self._newest: KeptStep | None = None
        self.step = 0
        """Last step committed: applied when this replica is full, kept while it catches up."""
        self.begun = Assigned(step=1, replicas=())
        """The next step, and among whom its samples are dealt."""
        self.sampler = SamplerState()

    @property
    def full(self) -> bool:
        """Whether the state here is the state after ``step``."""
        return self._catchup is None

    # --- what the loop of the user's script asks for

    def join(self) -> None:
        """Become a member. A newcomer to a run that has begun catches up before the first ``begin`` returns."""
        tried = 0
        while True:
            record = self._decisions.wait(partial(Leader.to_join, after=tried))
            tried = record.number
            if self._enter_as_newcomer(record):
                return

    def begin(self) -> Attempt:
        """Begin the next step, as an active member at a boundary; raises Over, ReplicaLost."""
        while self._record.paused or self._role is not Role.ACTIVE or not self.full:
            if self._record.paused:
                if self._enter_after_break(self._await_install()) is Entry.ROLL_FORWARD:
                    raise ReplicaLost(f"the job is paused at step {self.step}, and yet the others went on")
            else:
                self._settle(self._shadow_attempt())
        self._parts.recorder.began(time.time())
        return Attempt(self._parts.engine, self._pool, step=self.step + 1)

    def samples(self) -> tuple[Range, ...]:
        """Return this replica's samples of the step that has begun."""
        return self._dealt(self.begun).get(self._me, ())

    def finish(self, attempt: Attempt, *, samples: int, loss_sum: float) -> None:
        """End the body of a step: reduce across replicas, agree, update; raises Over, ReplicaLost."""
        flags = Flag.CONTRIBUTES if self._me in self.begun.replicas else Flag(0)
        attempt.close(self._header(flags, samples=samples, loss_sum=loss_sum))
        self._settle(attempt)

    def close(self, attempt: Attempt) -> None:
        """Make the last step final: the round after it carries no gradients; raises Over, ReplicaLost."""
        attempt.close(self._header(Flag.CLOSING))
        self._settle(attempt)

    # --- one step, whatever it takes

    def _settle(self, attempt: Attempt) -> None:
        """Commit the step of ``attempt``: at once, retried or rolled forward; raises Over, ReplicaLost."""
        how: Ending = "normal"
        outcome = attempt.result(self.begun, self._spare_time())
        while not self._voted(outcome, how):
            attempt, how, outcome = self._recover(attempt)

    def _recover(self, attempt: Attempt) -> tuple[Attempt, Ending, Outcome | None]:
        """Enter the epoch that the coordinator made of the broken one, and get the outcome of the step there."""
        record = self._await_install()
        entry = self._enter_after_break(record)
        if entry is Entry.ROLL_FORWARD:
            return attempt, "rolled-forward", self._fetch_outcome(record)
        if record.paused:
            return attempt, "retried", None
        if attempt.shadow or attempt.step != self.step + 1:
            attempt = self._shadow_attempt()
        else:
            attempt.again(self._parts.port.heard)
        return attempt, "retried", attempt.result(self.begun, self._spare_time())

    def _voted(self, outcome: Outcome | None, how: Ending) -> bool:
        """Let the replica vote on the step, and commit it when all ranks have it. Return whether it is committed."""
        allowed, fence = self._decisions.may_commit(self._record.number)
        ballot = replace(self._ballot(outcome), allowed=float(allowed), fence=float(fence))
        tally = vote(ballot, self._parts.process_group)
        if outcome is None or not tally.all("done") or not tally.all("allowed") or tally.any("disputed"):
            self._tell(lambda leader: leader.vote_ends())
            self._check_place(tally)
            return False
        self._check_opening()
        self._commit(outcome, tally, how)
        return True

    def _check_place(self, tally: Tally) -> None:
        """End a replica that is not like the others: they finish the step without it."""
        if tally.any("misfit"):
            raise ConfigError(
                f"replica {self._me}: batch_size={self._batch_size} or until is not that of the other replicas at step"
                f" {self.step + 1}: give all of them the same"
            )
        if tally.any("odd"):
            raise StateDiverged(
                f"replica {self._me}: the state after step {self.step} is not that of the other replicas"
            )

    def _commit(self, outcome: Outcome, tally: Tally, how: Ending) -> None:
        """The step counts: cross the boundary in the leader's books first, then in the state."""
        kept = KeptStep(
            outcome=outcome,
            total_samples=int(tally.sum("samples")),
            norm_squared=tally.sum("norm_squared"),
            epoch=self._record.number,
        )
        closing = tally.any("closing")
        turns_full = not self.full and tally.all("current")
        following = self._following(tally)
        self.step = outcome.step
        self.begun = _assigned(following, self.step + 1)
        self._parts.shelf.put_outcome(outcome)
        self._end_vote(following, full=self.full or turns_full, closing=closing)
        if closing:
            self._parts.recorder.closed(tally, step=self.step)
            raise Over(finished=True)
        dealt = self._dealt(outcome.assigned) if self.full else None
        self._take_in(kept, tally if turns_full else None)
        assert self._role is not None
        trained = None if dealt is None else self._trained(dealt, _contributors(outcome))
        self._parts.recorder.committed(kept, tally, how, role=self._role, trained=trained)
        self._keep_newest(kept)
        self._copy_owed_stripes()
        if following is not self._record:
            self._cross_boundary(following)

    def _end_vote(self, following: EpochRecord, *, full: bool, closing: bool) -> None:
        changes: dict[str, object] = {}
        if full:
            changes |= {"step": self.step, "serves": True, "begun": self.begun}
        if closing:
            changes["finished"] = self.step - 1
        if following is not self._record and following.member(self._me) is not None:
            changes["epoch"] = following.number
        self._tell(lambda leader: leader.vote_ends(**changes))

    def _keep_newest(self, kept: KeptStep) -> None:
        previous, self._newest = self._newest, kept
        if previous is not None and self.full:
            self._pool.give_back(previous.outcome.reduced)

    def _take_in(self, kept: KeptStep, turns_full: Tally | None) -> None:
        """Apply a committed step, or keep it for later; all of it when this vote makes the replica full."""
        if self._catchup is None:
            self._apply(kept)
            return
        self._catchup.keep(kept)
        if turns_full is not None:
            self._finish_catchup(self._catchup, turns_full)

    def _apply(self, kept: KeptStep) -> None:
        """The update of one step: the only place where the state moves, live and in replay."""
        outcome = kept.outcome
        self.sampler = commit(self.sampler, self._dealt(outcome.assigned), _contributors(outcome))
        if kept.total_samples:
            scale = self._parts.identity.world_size / kept.total_samples
            self._state.update(outcome.reduced, scale=scale, norm_squared=kept.norm_squared)

    # --- boundaries and epochs

    def _following(self, tally: Tally) -> EpochRecord:
        """Return the epoch of the next step: the one that the headers name, when the fence lets it begin here."""
        number = tally.max("heard")
        if number <= self._record.number or number <= tally.max("fence"):
            return self._record
        return self._parts.port.record(number)

    def _cross_boundary(self, following: EpochRecord) -> None:
        if following.member(self._me) is None:
            log.info("replica %d leaves at the boundary after step %d", self._me, self.step)
            raise Over(finished=False)
        self._activate(following)
        self._copy_owed_stripes()
        if self._catchup is not None and self._me in following.snapshots:
            self._start_over(following)
            self._tell(lambda leader: leader.changes(base=following.number))

    @property
    def _role(self) -> Role | None:
        member = self._record.member(self._me)
        return None if member is None else member.role

    def _activate(self, record: EpochRecord, *, newcomer: bool = False) -> Work[list[bytes]]:
        """Move to the rings of this epoch, and say there where we stand."""
        was, self._record = self._role, record
        if was is Role.SHADOW and self._role is Role.ACTIVE:
            self._parts.recorder.promoted(self.step)
        # The vote's side can be faster than the leader's command to connect; twice does nothing.
        self._parts.port.connect(record)
        self._parts.engine.activate(record.number)
        step = self.step if self.full and not newcomer else -1
        opening = Opening(replica=self._me, epoch=record.number, step=step)
        self._opening = self._parts.engine.all_gather(step=0, payload=opening.pack())
        self._stripes_owed = True
        shadows = [m.replica for m in record.members if m.role is Role.SHADOW]
        self._parts.shelf.keep_stripes_of(shadows, record.number)
        return self._opening

    def _check_opening(self) -> None:
        """After the first step of an epoch: all full members began it at the same boundary."""
        if self._opening is None or not self._opening.done():
            return
        opening, self._opening = self._opening, None
        try:
            openings = [Opening.unpack(data) for data in opening.wait()]
        except RingBroken:
            return  # of an epoch that ended before it began everywhere; the step came by roll-forward
        steps = {o.replica: o.step for o in openings if o.step >= 0}
        if len(set(steps.values())) > 1 or any(o.epoch != self._record.number for o in openings):
            raise ReplicaLost(f"epoch {self._record.number} began at different steps: {steps}")

    def _enter_as_newcomer(self, record: EpochRecord) -> bool:
        """Enter a first epoch; return False when it broke, or was replaced before it began."""
        member = record.member(self._me)
        assert member is not None
        fresh = member.role is Role.ACTIVE
        opening = self._activate(record, newcomer=not fresh)
        steps: list[int] = []
        try:
            steps = [Opening.unpack(data).step for data in opening.wait()]
        except RingBroken as error:
            log.info("epoch %d did not begin for this replica: %s", record.number, error)
        allowed, _ = self._decisions.may_commit(record.number)
        tally = vote(Ballot(done=float(bool(steps)), allowed=float(allowed)), self._parts.process_group)
        if not tally.all("done") or not tally.all("allowed"):
            self._tell(lambda leader: leader.vote_ends())
            self._record = _NO_EPOCH
            return False
        self.step = record.outcome.step if record.outcome is not None else max(steps)
        self.begun = _assigned(record, self.step + 1)
        full = {"step": self.step, "serves": True, "begun": self.begun} if fresh else {"base": record.number}
        self._tell(lambda leader: leader.vote_ends(epoch=record.number, **full))
        if not fresh:
            self._start_over(record)
        return True

    def _enter_after_break(self, record: EpochRecord) -> Entry:
        """Enter an epoch with an outcome, and stand where it says unless a roll-forward is to follow."""
        assert record.outcome is not None
        catchup = self._catchup
        entry = how_to_enter(
            record,
            step=self.step,
            full=self.full,
            donors=catchup.donors if catchup else frozenset(),
            kept_last=catchup.kept_last if catchup else False,
        )
        log.info(
            "epoch %d of replicas %s goes on at step %d; this one is at step %d: %s",
            record.number,
            [m.replica for m in record.members],
            record.outcome.step,
            self.step,
            entry,
        )
        other_samples = entry is Entry.GO_ON and self.full and self.begun != _assigned(record, self.step + 1)
        if entry is Entry.LOST or other_samples:
            raise ReplicaLost(
                f"replica {self._me} is at step {self.step} with {self.begun};"
                f" the others decided on step {record.outcome.step} with {record.outcome.assigned}"
            )
        self._activate(record)
        if entry is Entry.DROP_LAST:
            assert catchup is not None
            catchup.drop_last()
        if entry in (Entry.DROP_LAST, Entry.START_OVER):
            self.step = record.outcome.step
        if entry is Entry.START_OVER:
            self._start_over(record)
        if entry is not Entry.ROLL_FORWARD:
            self.begun = _assigned(record, self.step + 1)
            self._copy_owed_stripes()
        base = self._catchup.epoch if self._catchup else 0
        self._tell(lambda leader: leader.enters(record.number, base=base))
        return entry

    def _fetch_outcome(self, record: EpochRecord) -> Outcome | None:
        """Fetch this rail's share of the step that others have and this replica lacks; None when it cannot be had."""
        assert record.outcome is not None
        source = record.member(record.outcome.source) if record.outcome.source is not None else None
        if source is None:
            raise ReplicaLost(f"epoch {record.number} names no source for step {record.outcome.step}")
        try:
            return self._parts.fetcher.outcome(
                source.addresses[self._parts.identity.rank], record.outcome.step, self._pool.sizes
            )
        except (NotReady, WireError) as error:
            log.warning("replica %d gave no outcome of step %d: %s", source.replica, record.outcome.step, error)
            self._parts.reporter.broken(record.number, source.replica, f"roll-forward: {error}")
            return None

    # --- shadows

    def _shadow_attempt(self) -> Attempt:
        self._parts.recorder.began(time.time())
        attempt = Attempt(self._parts.engine, self._pool, step=self.step + 1, shadow=True)
        attempt.close(self._header(Flag(0)))
        return attempt

    def _start_over(self, record: EpochRecord) -> None:
        """Begin a download of the state at the boundary where ``record`` begins."""
        if self._catchup is not None:
            self._catchup.cancel()
        step = self.step
        donors = {m.replica: m.addresses[self._parts.identity.rank] for m in record.members if m.role is Role.ACTIVE}
        self._newest = None
        self._catchup = CatchUp(
            epoch=record.number,
            donors=frozenset(donors),
            download=Download(self._parts.fetcher, donors, shadow=self._me, epoch=record.number),
            load=lambda downloaded: self._load(downloaded, step),
            replay=self._apply,
        )

    def _load(self, downloaded: Downloaded, step: int) -> None:
        if downloaded.step != step:
            raise ReplicaLost(f"the stripes are of step {downloaded.step}, this replica's epoch began at step {step}")
        self._state.restore(downloaded.snapshot)
        self.sampler = SamplerState.from_json(downloaded.sampler)

    def _finish_catchup(self, catchup: CatchUp, tally: Tally) -> None:
        catchup.finish()
        self._catchup = None
        self._parts.recorder.caught_up(int(tally.sum("downloaded")), catchup.replayed)
        log.info("caught up at step %d: %d bytes, %d steps replayed", self.step, catchup.bytes, catchup.replayed)

    def _spare_time(self) -> Callable[[], bool] | None:
        """What to do while a ring works: a shadow catches up."""
        return None if self._catchup is None else self._catchup.work

    def _await_install(self) -> EpochRecord:
        """Wait for the coordinator's decision; a shadow goes on with its catch-up meanwhile."""
        number = self._record.number
        while True:
            waiting = self._catchup is not None and self._record.paused
            record = self._decisions.poll(partial(Leader.to_install, after=number), _POLL if waiting else None)
            if record is not None:
                return record
            if waiting:
                self._catch_up_in_pause()

    def _catch_up_in_pause(self) -> None:
        """No step passes, so nothing that is kept can be undone: all of it is replayed."""
        assert self._catchup is not None
        self._catchup.work()
        tally = vote(self._ballot(None), self._parts.process_group)
        if not tally.all("current"):
            return
        self._finish_catchup(self._catchup, tally)
        serves = self._newest is not None or self.step == 0
        self._tell(lambda leader: leader.changes(step=self.step, serves=serves, begun=self.begun))

    # --- what is said in headers and ballots, and what lies on the shelf

    def _header(self, flags: Flag, *, samples: int = 0, loss_sum: float = 0.0) -> Header:
        return Header(
            replica=self._me,
            flags=flags | (Flag.FULL if self.full else Flag(0)),
            step=self.step + 1,
            heard=self._parts.port.heard,
            samples=samples,
            loss_sum=loss_sum,
            digest=self._state.digest() if self.full else 0,
        )

    def _ballot(self, outcome: Outcome | None) -> Ballot:
        current = float(self._catchup is not None and self._catchup.current)
        downloaded = float(self._catchup.bytes if self._catchup is not None else 0)
        if outcome is None:
            return Ballot(current=current, downloaded=downloaded)
        headers = [Header.unpack(data) for data in outcome.headers]
        odd, misfit = odd_ones(headers), misfits(headers)
        mine = next((h.digest for h in headers if h.replica == self._me), 0)
        return Ballot(
            done=1.0,
            heard=float(max(h.heard for h in headers)),
            samples=float(sum(h.samples for h in headers)),
            loss_sum=sum(h.loss_sum for h in headers),
            norm_squared=self._state.norm_squared(outcome.reduced),
            odd=float(self._me in odd),
            misfit=float(self._me in misfit),
            disputed=float(bool(odd or misfit)),
            closing=float(any(Flag.CLOSING in h.flags for h in headers)),
            current=current,
            downloaded=downloaded,
            digest=float(mine & _DIGEST_BITS),
        )

    def _copy_owed_stripes(self) -> None:
        """As a donor, copy a stripe for every shadow that needs one, at the boundary where the epoch begins for all."""
        owed, self._stripes_owed = self._stripes_owed, False
        record = self._record
        if not owed or self._me not in record.active:
            return
        for shadow in record.snapshots:
            snapshot = self._state.snapshot()
            (start, _), data = copy_stripe(snapshot, record.active.index(self._me), len(record.active))
            stripe = Stripe(
                step=self.step, start=start, data=data, head={"meta": snapshot.meta, "sampler": self.sampler.to_json()}
            )
            self._parts.shelf.put_stripe(shadow, record.number, stripe)

    def _dealt(self, assigned: Assigned) -> Assignment:
        return assign(self.sampler, assigned.replicas, self._batch_size)

    def _trained(self, dealt: Assignment, contributors: list[int]) -> Trained:
        return Trained(
            own=dealt[self._me] if self._me in contributors else (),
            all=union(part for replica in contributors for part in dealt[replica]),
            returned=self.sampler.returned,
        )

    def _tell(self, event: Callable[[Leader], list[Effect]]) -> None:
        self._decisions.tell(event)


def _assigned(record: EpochRecord, step: int) -> Assigned:
    """Return among whom the samples of ``step`` are dealt in this epoch."""
    carried = record.outcome.assigned if record.outcome is not None else None
    return carried if carried is not None and carried.step == step else Assigned(step=step, replicas=record.active)


def _contributors(outcome: Outcome) -> list[int]:
    return [h.replica for h in map(Header.unpack, outcome.headers) if Flag.CONTRIBUTES in h.flags]
