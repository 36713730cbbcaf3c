"""The step protocol as one rank lives it.

All ranks of a replica run this in lockstep: every decision is taken either by a vote over the replica or by the leader,
which shares it. A step goes: gradients are handed over (``Attempt``), the rail's ring reduces them, the replica votes,
and when it is prepared, the update is applied and the next step begins. When a ring broke, the ranks meet in the vote
all the same, learn it there, and wait for the coordinator's decision; nothing of the forward and backward passes is
repeated.

The same loop carries a shadow: it contributes zeros, keeps what the rings reduce, and replays it once it has the state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial

from fthsdp.coordinator.messages import Assigned, CatchingUp, EpochRecord, Role
from fthsdp.coordinator.start import LOOK_AGAIN
from fthsdp.data.policies import BatchPolicy, Policies, lr_factor
from fthsdp.data.sampler import Assignment, SamplerState, assign, commit
from fthsdp.errors import ConfigError, Refused, ReplicaLost, StateDiverged
from fthsdp.protocol.ballot import Ballot, Tally
from fthsdp.protocol.catchup import CatchUp
from fthsdp.protocol.decision import Decision, Over, Wanted
from fthsdp.protocol.entering import Entry, how_to_enter
from fthsdp.protocol.header import Flag, Header, Opening, misfits, odd_ones
from fthsdp.protocol.leader import Leader
from fthsdp.protocol.requests import (
    Attempt,
    AwaitDecision,
    AwaitOpening,
    AwaitRecord,
    AwaitRing,
    AwaitVote,
    Body,
    Downloaded,
    Fetch,
    KeptStep,
    LoadCheckpoint,
    Reduced,
    Steps,
)
from fthsdp.protocol.step_records import Ending, Recorder, Trained
from fthsdp.ranges import Range, subtract, union

__all__ = ["Place", "StepLoop"]

log = logging.getLogger(__name__)

_POLL = 0.02
"""Seconds between looks of a paused shadow, which waits for the coordinator and for its download at the same time."""
_LAST_WORDS = 2.0
"""Seconds that a replica whose state is odd waits for the coordinator to take notice."""
_DIGEST_BITS = (1 << 52) - 1
_NO_EPOCH = EpochRecord(number=0, members=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who runs this loop, and by which rules."""

    replica: int
    rank: int
    world_size: int
    """Ranks of a replica."""
    batch_size: int
    """Samples of one replica in one step when all are there, all its ranks together."""
    policies: Policies = field(default_factory=Policies)


class StepLoop:
    """Drives one rank from boundary to boundary.

    Every public method that returns ``Steps`` is a coroutine of requests; it raises Over when there is nothing more to
    do here, ReplicaLost and StateDiverged when the replica has to start again, Refused and ConfigError.
    """

    def __init__(self, place: Place, body: Body, recorder: Recorder, *, sampler: SamplerState | None = None) -> None:
        """``sampler`` is the one of a run that has not begun."""
        self._place = place
        self._me = place.replica
        self._body = body
        self._recorder = recorder
        self._record = _NO_EPOCH
        self._opened = True
        self._stripes_owed = False
        self._catchup: CatchUp | None = None
        self._newest: KeptStep | None = None
        self._how: Ending = "normal"
        self._computed: tuple[Range, ...] = ()
        self._samples = 0
        self._loss_sum = 0.0
        self.step = 0
        """Last step committed: applied when this replica is full, kept while it catches up."""
        self.begun = Assigned(step=1, replicas=())
        """The next step, and among whom its samples are dealt; nobody yet while it has begun nowhere."""
        self.sampler = sampler or SamplerState()

    @property
    def full(self) -> bool:
        """Whether the state here is the state after ``step``."""
        return self._catchup is None

    @property
    def epoch(self) -> int:
        """The epoch whose rings this rank has entered last; 0 before the first."""
        return self._record.number

    # --- what the loop of the user's script asks for

    def join(self) -> Steps[None]:
        """Become a member. A newcomer to a run that has begun catches up before the first ``begin`` returns."""
        weights = yield from self._digest_of_weights()
        tried = 0
        while True:
            step, origin = self._body.newest_checkpoint() or (0, weights)
            self._body.tell(partial(Leader.starts_from, origin=origin, checkpoint=step))
            record = self._read((yield AwaitDecision(Wanted.JOIN, tried, LOOK_AGAIN)))
            if record is None:
                continue
            tried = record.number
            if (yield from self._enter_as_newcomer(record)):
                return

    def begin(self) -> Steps[Attempt]:
        """Begin the next step, as an active member at a boundary."""
        while self._record.paused or self._role is not Role.ACTIVE or not self.full:
            if self._record.paused:
                record = yield from self._await_install()
                if self._enter_after_break(record) is Entry.ROLL_FORWARD:
                    raise ReplicaLost(f"the job is paused at step {self.step}, and yet the others went on")
            else:
                yield from self._settle(self._shadow_attempt())
        self._recorder.began()
        self._computed, self._samples, self._loss_sum = (), 0, 0.0
        return self._body.attempt(self.step + 1, shadow=False)

    def samples(self) -> tuple[Range, ...]:
        """Return this replica's samples of the step that has begun: those not yet computed."""
        return subtract(self._dealt(self.begun).get(self._me, ()), self._computed)

    def finish(self, attempt: Attempt, *, samples: int, loss_sum: float) -> Steps[bool]:
        """End the body of a step, for which this rank computed so many samples: reduce across replicas, agree, update.

        Returns False when the step is committed. True, which only happens under the constant-batch policy: this replica
        took over samples of one that is gone; ``attempt`` is open again, and the body has to run for ``samples()``.
        """
        self._computed = union([*self._computed, *self.samples()])
        self._samples += samples
        self._loss_sum += loss_sum
        flags = Flag.CONTRIBUTES if self._me in self._dealt(self.begun) else Flag(0)
        attempt.close(self._header(flags, samples=self._samples, loss_sum=self._loss_sum))
        return (yield from self._settle(attempt))

    def close(self, attempt: Attempt) -> Steps[None]:
        """Make the last step final: the round after it carries no gradients."""
        attempt.close(self._header(Flag.CLOSING))
        yield from self._settle(attempt)

    # --- one step, whatever it takes

    def _settle(self, attempt: Attempt) -> Steps[bool]:
        """Commit the step of ``attempt``: at once, retried or rolled forward. Return whether more is to be computed."""
        reduced = yield from self._collect(attempt)
        while not (yield from self._voted(reduced)):
            record = yield from self._await_install()
            entry = self._enter_after_break(record)
            if entry is Entry.ROLL_FORWARD:
                self._how = "rolled-forward"
                reduced = yield self._fetch(record)
                continue
            self._how = "retried"
            reduced = None
            if record.paused:
                continue
            if attempt.shadow or attempt.step != self.step + 1:
                attempt = self._shadow_attempt()
            elif self._computed and self.samples():
                attempt.reopen()
                return True
            else:
                attempt.again(self._body.heard)
            reduced = yield from self._collect(attempt)
        return False

    def _collect(self, attempt: Attempt) -> Steps[Reduced | None]:
        reduced: Reduced | None = yield AwaitRing(attempt, self.begun, self._catchup.work if self._catchup else None)
        return reduced

    def _voted(self, reduced: Reduced | None) -> Steps[bool]:
        """Let the replica vote on the step, and commit it when all ranks have it. Return whether it is committed."""
        allowed, fence = self._body.begins_vote(self._record.number)
        ballot = replace(self._ballot(reduced), allowed=float(allowed), fence=float(fence))
        tally: Tally = yield AwaitVote(ballot)
        if reduced is None or not tally.all("done") or not tally.all("allowed") or tally.any("disputed"):
            self._body.tell(lambda leader: leader.vote_ends())
            yield from self._check_place(tally)
            return False
        self._check_opening()
        yield from self._commit(reduced, tally)
        return True

    def _check_place(self, tally: Tally) -> Steps[None]:
        """End a replica that is not like the others: they finish the step without it."""
        if tally.any("misfit"):
            raise ConfigError(
                f"replica {self._me}: batch_size={self._place.batch_size} or until is not that of the other replicas at"
                f" step {self.step + 1}: give all of them the same"
            )
        if tally.any("odd"):
            reason = f"the state after step {self.step} is not that of the other replicas"
            self._body.tell(lambda leader: leader.changes(failed=f"StateDiverged: {reason}"))
            # The coordinator takes this replica out as soon as it hears that, and says so: then it has heard it.
            yield AwaitDecision(Wanted.INSTALL, self._record.number, _LAST_WORDS)
            raise StateDiverged(f"replica {self._me}: {reason}")

    def _commit(self, reduced: Reduced, tally: Tally) -> Steps[None]:
        """The step counts: cross the boundary in the leader's books first, then in the state."""
        kept = KeptStep(
            reduced=reduced,
            total_samples=int(tally.sum("samples")),
            norm_squared=tally.sum("norm_squared"),
            epoch=self._record.number,
        )
        closing = tally.any("closing")
        turns_full = not self.full and tally.all("current")
        following = yield from self._following(tally)
        self.step = reduced.step
        self.begun = _assigned(following, self.step + 1)
        self._body.offer_outcome(reduced)
        self._end_vote(following, tally, full=self.full or turns_full, closing=closing)
        self._body.final(self.step - 1)
        if closing:
            self._recorder.closed(tally, step=self.step)
            raise Over(finished=True)
        dealt = self._dealt(reduced.assigned) if self.full else None
        self._take_in(kept, tally if turns_full else None)
        assert self._role is not None
        trained = None if dealt is None else self._trained(dealt, _contributors(reduced))
        how, self._how = self._how, "normal"
        self._recorder.committed(kept, tally, how, role=self._role, trained=trained)
        self._keep_newest(kept)
        if self.full and self._me == min(self._record.active):
            self._body.checkpoint(self.step, self.sampler)
        self._copy_owed_stripes()
        if following is not self._record:
            self._cross_boundary(following)

    def _end_vote(self, following: EpochRecord, tally: Tally, *, full: bool, closing: bool) -> None:
        changes: dict[str, object] = {"catching_up": None if full else self._catching_up(tally)}
        if full:
            changes |= {"step": self.step, "serves": True, "begun": _reported(self.begun)}
        if closing:
            changes["finished"] = self.step - 1
        if following is not self._record and following.member(self._me) is not None:
            changes["epoch"] = following.number
            if not full and self._me in following.snapshots:
                base = CatchingUp(since=self.step, at=self.step, donors=following.active)
                changes |= {"base": following.number, "catching_up": base}
        self._body.tell(lambda leader: leader.vote_ends(**changes))

    def _keep_newest(self, kept: KeptStep) -> None:
        previous, self._newest = self._newest, kept
        if previous is not None and self.full:
            self._body.recycle(previous.reduced)

    def _take_in(self, kept: KeptStep, turns_full: Tally | None) -> None:
        """Apply a committed step, or keep it for later; all of it when this vote makes the replica full."""
        if self._catchup is None:
            self._apply(kept)
            return
        self._catchup.keep(kept)
        if turns_full is not None:
            self._finish_catchup(self._catchup, turns_full)

    def _apply(self, kept: KeptStep) -> None:
        """The update of one step, live and in replay."""
        assigned, contributors = kept.reduced.assigned, _contributors(kept.reduced)
        self.sampler = commit(self.sampler, self._dealt(assigned), contributors)
        if kept.total_samples:
            wanted = assigned.wanted or len(assigned.replicas)
            self._body.update(kept, lr_factor(self._place.policies.lr, len(contributors), wanted))

    # --- boundaries and epochs

    def _following(self, tally: Tally) -> Steps[EpochRecord]:
        """Return the epoch of the next step: the one that the headers name, when the fence lets it begin here."""
        number = tally.max("heard")
        if number <= self._record.number or number <= tally.max("fence"):
            return self._record
        record: EpochRecord = yield AwaitRecord(number)
        return record

    def _cross_boundary(self, following: EpochRecord) -> None:
        if following.member(self._me) is None:
            if not following.members:
                self._leave_state_behind()
            log.info("replica %d leaves at the boundary after step %d", self._me, self.step)
            raise Over(finished=False)
        self._activate(following)
        self._copy_owed_stripes()
        if self._catchup is not None and self._me in following.snapshots:
            self._start_over(following)

    def _leave_state_behind(self) -> None:
        """All leave: what they have would be gone with them. Nothing can undo this step, for nobody is left to do so.

        It can happen that one goes from here and another one, whose ring broke, settles the step anew before it goes
        too. Then the newest checkpoint counts, as it does after any other loss of all replicas. Before the first step
        there is nothing to write: a checkpoint of step 0 would pass for the weights from which everybody starts.
        """
        if not self.full or not self.step:
            return
        self._recorder.left(step=self.step)
        if self._me == min(self._record.active, default=None):
            self._body.last_checkpoint(self.step, self.sampler)

    @property
    def _role(self) -> Role | None:
        member = self._record.member(self._me)
        return None if member is None else member.role

    def _activate(self, record: EpochRecord, *, unsettled: bool = False) -> None:
        """Move to the rings of this epoch, and say there where we stand.

        ``unsettled``: not yet at the boundary where the epoch begins; a newcomer, or the step before is still to come.
        """
        was, self._record = self._role, record
        if was is Role.SHADOW and self._role is Role.ACTIVE:
            self._recorder.promoted(self.step)
        step = self.step if self.full and not unsettled else -1
        self._body.enter(record, Opening(replica=self._me, epoch=record.number, step=step))
        self._opened = False
        self._stripes_owed = True
        shadows = [m.replica for m in record.members if m.role is Role.SHADOW]
        self._body.keep_stripes_of(shadows, record.number)

    def _check_opening(self) -> None:
        """After the first step of an epoch: all full members began it at the same boundary."""
        openings = None if self._opened else self._body.openings()
        if openings is None:
            return  # checked already, or of an epoch that ended before it began everywhere: the step came otherwise
        self._opened = True
        steps = {o.replica: o.step for o in openings if o.step >= 0}
        if len(set(steps.values())) > 1 or any(o.epoch != self._record.number for o in openings):
            raise ReplicaLost(f"epoch {self._record.number} began at different steps: {steps}")

    def _digest_of_weights(self) -> Steps[str]:
        """Return what says whether all who start a run start from the same initial weights."""
        tally: Tally = yield AwaitVote(Ballot(done=1.0, digest=float(self._body.digest() & _DIGEST_BITS)))
        return tally.digest

    def _enter_as_newcomer(self, record: EpochRecord) -> Steps[bool]:
        """Enter a first epoch; return False when it broke, or was replaced before it began."""
        member = record.member(self._me)
        assert member is not None
        fresh = member.role is Role.ACTIVE
        self._activate(record, unsettled=not fresh)
        openings: tuple[Opening, ...] | None = yield AwaitOpening()
        if openings is None:
            log.info("epoch %d did not begin for this replica", record.number)
        allowed, _ = self._body.begins_vote(record.number)
        tally: Tally = yield AwaitVote(Ballot(done=float(openings is not None), allowed=float(allowed)))
        if openings is None or not tally.all("done") or not tally.all("allowed"):
            self._body.tell(lambda leader: leader.vote_ends())
            self._record = _NO_EPOCH
            return False
        step = record.outcome.step if record.outcome is not None else max(o.step for o in openings)
        if fresh and step:
            self.sampler = yield LoadCheckpoint(step)
        self.step = step
        self.begun = _assigned(record, step + 1)
        changes: dict[str, object] = {"epoch": record.number}
        if fresh:
            changes |= {"step": step, "serves": True, "begun": _reported(self.begun)}
            self._copy_owed_stripes()
        else:
            self._start_over(record)
            changes |= {"base": record.number, "catching_up": self._catching_up()}
        self._body.tell(lambda leader: leader.vote_ends(**changes))
        return True

    def _enter_after_break(self, record: EpochRecord) -> Entry:
        """Enter an epoch with an outcome, and stand where it says unless a roll-forward is to follow."""
        assert record.outcome is not None
        since = self._catchup.since if self._catchup else 0
        entry = how_to_enter(record, replica=self._me, step=self.step, full=self.full, since=since)
        log.info(
            "epoch %d of replicas %s goes on at step %d; this one is at step %d: %s",
            record.number,
            [m.replica for m in record.members],
            record.outcome.step,
            self.step,
            entry,
        )
        began, begins = _reported(self.begun), _reported(_assigned(record, self.step + 1))
        other_samples = entry is Entry.GO_ON and self.full and began is not None and began != begins
        if entry is Entry.LOST or other_samples:
            raise ReplicaLost(
                f"replica {self._me} is at step {self.step} with {self.begun};"
                f" the others decided on step {record.outcome.step} with {record.outcome.assigned}"
            )
        self._activate(record, unsettled=entry is Entry.ROLL_FORWARD)
        if entry is Entry.DROP_LAST:
            assert self._catchup is not None
            self._catchup.drop_last()
        if entry in (Entry.DROP_LAST, Entry.START_OVER):
            self.step = record.outcome.step
        if entry is Entry.START_OVER:
            self._start_over(record)
        base = self._catchup.epoch if self._catchup else 0
        changes: dict[str, object] = {"base": base, "catching_up": self._catching_up()}
        if entry is not Entry.ROLL_FORWARD:
            self.begun = _assigned(record, self.step + 1)
            self._copy_owed_stripes()
            if self.full:
                changes["begun"] = _reported(self.begun)
        self._body.tell(lambda leader: leader.enters(record.number, **changes))
        return entry

    def _fetch(self, record: EpochRecord) -> Fetch:
        """Ask for this rail's share of the step that others have and this replica lacks."""
        assert record.outcome is not None
        source = record.member(record.outcome.source) if record.outcome.source is not None else None
        if source is None:
            raise ReplicaLost(f"epoch {record.number} names no source for step {record.outcome.step}")
        address = source.addresses[self._place.rank]
        return Fetch(source.replica, address, step=record.outcome.step, epoch=record.number)

    # --- shadows

    def _shadow_attempt(self) -> Attempt:
        self._recorder.began()
        attempt = self._body.attempt(self.step + 1, shadow=True)
        attempt.close(self._header(Flag(0)))
        return attempt

    def _start_over(self, record: EpochRecord) -> None:
        """Begin a download of the state at the boundary where ``record`` begins."""
        if self._catchup is not None:
            self._catchup.cancel()
        step = self.step
        donors = {m.replica: m.addresses[self._place.rank] for m in record.members if m.role is Role.ACTIVE}
        self._newest = None
        self._catchup = CatchUp(
            epoch=record.number,
            since=step,
            donors=frozenset(donors),
            download=self._body.download(donors, record.number),
            load=lambda downloaded: self._load(downloaded, step),
            replay=self._apply,
        )

    def _catching_up(self, tally: Tally | None = None) -> CatchingUp | None:
        """Return how far this replica is on its way to the present; None when it is there."""
        if self._catchup is None:
            return None
        donors = () if tally is not None and tally.all("loaded") else sorted(self._catchup.donors)
        return CatchingUp(since=self._catchup.since, at=self.step, donors=tuple(donors))

    def _load(self, downloaded: Downloaded, step: int) -> None:
        if downloaded.step != step:
            raise ReplicaLost(f"the stripes are of step {downloaded.step}, this replica's epoch began at step {step}")
        self._body.load(downloaded)
        self.sampler = SamplerState.from_json(downloaded.sampler)

    def _finish_catchup(self, catchup: CatchUp, tally: Tally) -> None:
        catchup.finish()
        self._catchup = None
        self._recorder.caught_up(int(tally.sum("downloaded")), catchup.replayed)
        log.info("caught up at step %d: %d bytes, %d steps replayed", self.step, catchup.bytes, catchup.replayed)

    # --- the coordinator's decisions

    def _await_install(self) -> Steps[EpochRecord]:
        """Wait for the coordinator's decision, for hours if need be; a paused shadow goes on with its catch-up."""
        while True:
            catchup = self._catchup if self._record.paused else None
            patience = _POLL if catchup is not None else None
            record = self._read((yield AwaitDecision(Wanted.INSTALL, self._record.number, patience)))
            if record is not None:
                return record
            if catchup is not None:
                yield from self._catch_up_in_pause(catchup)

    def _read(self, decision: Decision) -> EpochRecord | None:
        if decision.refused:
            raise Refused(decision.refused)
        if decision.closed is not None:
            step = decision.closed
            self._body.tell(lambda leader: leader.changes(finished=step))
            raise Over(finished=True)
        if decision.bye:
            if self._record.paused:  # who stays has to wait for others, and may be lost before they come
                self._leave_state_behind()
            raise Over(finished=False)
        return decision.record

    def _catch_up_in_pause(self, catchup: CatchUp) -> Steps[None]:
        """Go on with the catch-up although no step passes. The newest step can still be undone, so this is voted on."""
        catchup.work()
        allowed, _ = self._body.begins_vote(self._record.number)
        tally: Tally = yield AwaitVote(replace(self._ballot(None), allowed=float(allowed)))
        if not tally.all("current") or not tally.all("allowed"):
            self._body.tell(lambda leader: leader.vote_ends())
            return
        self._finish_catchup(catchup, tally)
        serves = self._newest is not None or self.step == 0
        begun = _reported(self.begun)
        self._body.tell(lambda leader: leader.vote_ends(step=self.step, serves=serves, begun=begun, catching_up=None))

    # --- what is said in headers and ballots, and what lies on the shelf

    def _header(self, flags: Flag, *, samples: int = 0, loss_sum: float = 0.0) -> Header:
        return Header(
            replica=self._me,
            flags=flags | (Flag.FULL if self.full else Flag(0)),
            step=self.step + 1,
            heard=self._body.heard,
            samples=samples,
            batch_size=self._place.batch_size,
            loss_sum=loss_sum,
            digest=self._body.digest() if self.full else 0,
        )

    def _ballot(self, reduced: Reduced | None) -> Ballot:
        current = float(self._catchup is not None and self._catchup.current)
        loaded = float(self._catchup is not None and self._catchup.loaded)
        downloaded = float(self._catchup.bytes if self._catchup is not None else 0)
        if reduced is None:
            return Ballot(loaded=loaded, current=current, downloaded=downloaded)
        headers = [Header.unpack(data) for data in reduced.headers]
        odd, misfit = odd_ones(headers), misfits(headers)
        mine = next((h.digest for h in headers if h.replica == self._me), 0)
        return Ballot(
            done=1.0,
            heard=float(max(h.heard for h in headers)),
            samples=float(sum(h.samples for h in headers)),
            loss_sum=sum(h.loss_sum for h in headers),
            norm_squared=self._body.norm_squared(reduced),
            odd=float(self._me in odd),
            misfit=float(self._me in misfit),
            disputed=float(bool(odd or misfit)),
            closing=float(any(Flag.CLOSING in h.flags for h in headers)),
            loaded=loaded,
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
        part, parts = record.active.index(self._me), len(record.active)
        for shadow in record.snapshots:
            self._body.offer_stripe(shadow, record.number, part=part, parts=parts, step=self.step, sampler=self.sampler)

    def _dealt(self, assigned: Assigned) -> Assignment:
        size = self._place.batch_size
        if self._place.policies.batch is BatchPolicy.SHRINK:
            return assign(self.sampler, assigned.replicas, size, unit=self._place.world_size)
        total = size * (assigned.wanted or len(assigned.replicas))
        return assign(
            self.sampler,
            assigned.replicas,
            size,
            total=total,
            survivors=assigned.survivors,
            unit=self._place.world_size,
        )

    def _trained(self, dealt: Assignment, contributors: list[int]) -> Trained:
        return Trained(
            own=dealt[self._me] if self._me in contributors else (),
            all=union(part for replica in contributors for part in dealt[replica]),
            returned=self.sampler.returned,
        )


def _assigned(record: EpochRecord, step: int) -> Assigned:
    """Return among whom the samples of ``step`` are dealt in this epoch."""
    carried = record.outcome.assigned if record.outcome is not None else None
    if carried is not None and carried.step == step:
        return carried
    # While the job is paused no step begins, so that this one is dealt among those who are there when it does.
    return Assigned(step=step, replicas=() if record.paused else record.active, wanted=record.wanted)


def _reported(assigned: Assigned) -> Assigned | None:
    """Return what the coordinator needs to hear: who took over what from whom it knows itself."""
    return assigned.model_copy(update={"survivors": ()}) if assigned.replicas else None


def _contributors(reduced: Reduced) -> list[int]:
    return [h.replica for h in map(Header.unpack, reduced.headers) if Flag.CONTRIBUTES in h.flags]
