"""One incarnation of a replica: the real leader and the real step loop of every rank, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Channel, Owner
from tests.simulation.rings import SILENCE_TIMEOUT, Work

from fthsdp.coordinator.messages import EpochRecord, FromCoordinator, Phase, RankReport, Role
from fthsdp.data.sampler import SamplerState
from fthsdp.errors import ConfigError, Refused, ReplicaLost, StateDiverged
from fthsdp.protocol.ballot import Ballot, Tally
from fthsdp.protocol.decision import Decision, Over, decision
from fthsdp.protocol.header import Header, Opening
from fthsdp.protocol.leader import AskRanks, Cancel, Connect, Effect, Heard, Leader, TellCoordinator
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
    Steps,
)
from fthsdp.protocol.step_records import Ending, Trained
from fthsdp.protocol.steploop import Place, StepLoop
from fthsdp.ranges import Range, count

if TYPE_CHECKING:
    from tests.simulation.coordinator import Link
    from tests.simulation.world import World

__all__ = ["Replica"]

BYE_TIMEOUT = 15.0
LEAVE_TIMEOUT = 20.0
FETCH_TIMEOUT = 10.0

Gradients = tuple[tuple[int, tuple[Range, ...]], ...]
"""Of whom, and of which samples. What is reduced is all that was contributed, so equal means: the same bits."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward and backward passes over these samples: time passes."""

    samples: tuple[Range, ...]


@dataclass(eq=False)
class SimAttempt:
    """The attempt of one rank."""

    rank: Rank
    step: int
    shadow: bool
    samples: tuple[Range, ...] = ()
    header: Header | None = None
    work: Work | None = None

    def give(self, samples: tuple[Range, ...]) -> None:
        self.samples = (*self.samples, *samples)

    def close(self, header: Header) -> None:
        self.header = header
        self._submit()

    def again(self, heard: int) -> None:
        assert self.header is not None
        self.header = replace(self.header, heard=heard)
        self._submit()

    def reopen(self) -> None:
        self.work = None

    def _submit(self) -> None:
        assert self.header is not None
        payload = (self.rank.replica.number, self.samples, self.header.pack(), self.step)
        self.work = self.rank.rings.submit(self.rank, payload)


@dataclass(frozen=True, slots=True)
class Stripe:
    """One donor's part of the state."""

    epoch: int
    part: int
    parts: int
    step: int
    state: int
    sampler: Any


@dataclass(frozen=True, slots=True)
class SimDownloaded:
    """All stripes of one boundary."""

    step: int
    sampler: Any
    state: int
    bytes: int = 1


class SimDownload:
    """Fetches the stripes of one epoch."""

    def __init__(self, rank: Rank, donors: Mapping[int, str], epoch: int) -> None:
        self._rank = rank
        self._epoch = epoch
        self._stripes: dict[int, Stripe] = {}
        self._wanted = len(donors)
        self._cancelled = False
        for donor, address in donors.items():
            rank.owner.soon(lambda donor=donor, address=address: self._look(donor, address))

    def _look(self, donor: int, address: str) -> None:
        if self._cancelled:
            return
        source = self._rank.replica.world.rank_at(address)
        stripe = source.stripes.get(self._rank.replica.number) if source is not None else None
        slow = self._rank.replica.world.download_seconds
        if stripe is not None and stripe.epoch == self._epoch:
            self._rank.owner.after(slow * self._rank.clock.random.random(), lambda: self._arrived(donor, stripe))
        elif stripe is None or stripe.epoch < self._epoch:
            self._rank.owner.after(0.1, lambda: self._look(donor, address))

    def _arrived(self, donor: int, stripe: Stripe) -> None:
        self._stripes[donor] = stripe

    def result(self) -> SimDownloaded | None:
        if len(self._stripes) < self._wanted:
            return None
        stripes = list(self._stripes.values())
        assert sorted(s.part for s in stripes) == list(range(stripes[0].parts)), "stripes of several cuts"
        told = {(s.step, s.state) for s in stripes}
        self._rank.replica.world.checks.stripes_fit(self._rank, told)
        return SimDownloaded(step=stripes[0].step, sampler=stripes[0].sampler, state=stripes[0].state)

    def cancel(self) -> None:
        self._cancelled = True


class SimRecorder:
    """Takes part in nothing: what is committed is checked by the body."""

    def began(self) -> None: ...
    def caught_up(self, downloaded: int, replayed: int) -> None: ...
    def closed(self, tally: Tally, *, step: int) -> None: ...
    def left(self, *, step: int) -> None: ...

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def promoted(self, step: int) -> None:
        self._rank.replica.world.checks.joined(self._rank, step)

    def committed(self, kept: KeptStep, tally: Tally, ending: Ending, *, role: Role, trained: Trained | None) -> None:
        self._rank.replica.world.checks.committed(self._rank, kept, ending, role)


class Rank:
    """Runs one step loop, and is its body."""

    def __init__(self, replica: Replica, number: int, *, weights: int) -> None:
        self.replica = replica
        self.number = number
        self.clock = replica.world.clock
        self.rings = replica.world.rails[number]
        self.owner = Owner(self.clock)
        self.name = (replica.number, replica.attempt)
        self.from_leader = Channel(self.owner)
        self.state = weights
        self.stripes: dict[int, Stripe] = {}
        self.outcome: Reduced | None = None
        self.offers: dict[int, Reduced] = {}
        self.states: dict[int, int] = {}
        self.records: dict[int, EpochRecord] = {}
        self._written: dict[int, tuple[int, SamplerState]] = {}
        self.pending: object = None
        self.frozen_at = 0.0
        self._heard = 0
        self._since = self.clock.now
        self._opening: Work | None = None
        self._turn = 0
        world = replica.world
        place = Place(
            replica=replica.number,
            rank=number,
            world_size=world.ranks,
            batch_size=world.batch_size,
            policies=world.policies,
        )
        self.loop = StepLoop(place, self, SimRecorder(self))  # type: ignore[arg-type]
        self._script = self._train(world.steps)

    # --- the script of the user -------------------------------------------------------------------------------------

    def _train(self, until: int) -> Steps[None]:
        loop = self.loop
        yield from loop.join()
        while True:
            attempt = yield from loop.begin()
            assert isinstance(attempt, SimAttempt)
            if attempt.step > until:
                yield from loop.close(attempt)
                continue
            more = True
            while more:
                samples = loop.samples()
                yield Compute(samples)  # type: ignore[misc]
                attempt.give(samples)
                mine = count(samples) // self.replica.world.ranks
                more = yield from loop.finish(attempt, samples=mine, loss_sum=0.0)

    def resume(self, answer: object = None) -> None:
        """Go on with the answer to what was asked."""
        self._turn += 1
        self._since = self.clock.now
        self.pending = None
        try:
            self.pending = self._script.send(answer)
        except StopIteration:
            raise AssertionError("a script ends by Over") from None
        except Over as over:
            self.pending = over
            self.replica.rank_over(self, finished=over.finished)
            return
        except (ReplicaLost, StateDiverged, Refused) as error:
            self.pending = error
            self.replica.world.checks.gave_up(self, error)
            self.replica.rank_failed(self, error)
            return
        except ConfigError as error:
            self.replica.world.checks.fail(f"{self.label}: {error}")
        self._ask(self.pending)

    @property
    def label(self) -> str:
        return f"replica {self.replica.number} attempt {self.replica.attempt} rank {self.number}"

    def answer(self, value: object) -> None:
        """Go on soon, if this is still the answer to what is asked."""
        turn = self._turn
        self.owner.soon(lambda: self.resume(value) if turn == self._turn else None)

    def _ask(self, request: object) -> None:
        match request:
            case Compute():
                self.replica.world.checks.computed(self, request.samples)
                turn = self._turn
                seconds = self.replica.world.compute_seconds * self.clock.random.uniform(0.8, 1.2)
                self.owner.after(seconds, lambda: self.resume() if turn == self._turn else None)
            case AwaitRing():
                self._await_ring(request)
            case AwaitOpening():
                assert self._opening is not None
                self._opening.then(lambda: self.answer(self.openings()))
            case AwaitVote():
                self.replica.meet(self, "vote", request.ballot)
            case AwaitDecision():
                self.replica.meet(self, "decision", request)
            case AwaitRecord():
                self._await_record(request.epoch)
            case Fetch():
                self._fetch(request)
            case LoadCheckpoint(step=step):
                self.state, sampler = self.replica.world.checkpoints[step][self.number]
                self.states[step] = self.state
                self.answer(sampler)

    def _await_ring(self, request: AwaitRing) -> None:
        attempt = request.attempt
        assert isinstance(attempt, SimAttempt)
        assert attempt.work is not None
        work = attempt.work
        turn = self._turn

        def done() -> None:
            if work.result is None:
                self.answer(None)
                return
            steps = {step for *_, step in work.result if step > 0}
            self.replica.world.checks.same_step(self, steps)
            self.answer(
                Reduced(
                    step=attempt.step,
                    gradients=tuple((who, samples) for who, samples, _, _ in work.result if samples),
                    headers=tuple(header for _, _, header, _ in work.result),
                    assigned=request.assigned,
                )
            )

        def look_around() -> None:
            if turn == self._turn and not work.done and request.spare_time is not None:
                request.spare_time()
                self.owner.after(self.replica.world.clock.delay() + 0.001, look_around)

        if request.spare_time is not None:
            self.owner.soon(look_around)
        work.then(done)

    def _await_record(self, epoch: int) -> None:
        if epoch in self.records:
            self.answer(self.records[epoch])

    def _fetch(self, request: Fetch) -> None:
        turn = self._turn
        deadline = self.clock.now + FETCH_TIMEOUT

        def failed() -> None:
            if turn == self._turn:
                self.ring_broken(request.epoch, request.replica, "roll-forward")
                self.resume(None)

        def arrived() -> None:
            if turn != self._turn:
                return
            source = self.replica.world.rank_at(request.address)
            if source is None or (source.outcome is not None and source.outcome.step > request.step):
                failed()
            elif source.owner.frozen:
                self.owner.after(FETCH_TIMEOUT, failed)
            elif source.outcome is None or source.outcome.step < request.step:
                self.owner.soon(failed if self.clock.now > deadline else arrived)
            else:
                self.resume(source.outcome)

        self.owner.soon(arrived)

    # --- the body ---------------------------------------------------------------------------------------------------

    def tell(self, event: Callable[[Leader], list[Effect]]) -> None:
        if self.number == 0:
            self.replica.lead(event)

    def begins_vote(self, epoch: int) -> tuple[bool, int]:
        return self.replica.leader.vote_begins(epoch) if self.number == 0 else (True, 0)

    @property
    def heard(self) -> int:
        return self._heard

    def enter(self, record: EpochRecord, opening: Opening) -> None:
        self.connect(record)
        self.replica.world.checks.enters(self, record)
        self.rings.activate(self, record.number)
        self._opening = self.rings.submit(self, (self.replica.number, (), opening.pack(), 0))

    def openings(self) -> tuple[Opening, ...] | None:
        if self._opening is None or self._opening.result is None:
            return None
        return tuple(Opening.unpack(data) for _, _, data, _ in self._opening.result)

    def attempt(self, step: int, *, shadow: bool) -> SimAttempt:
        return SimAttempt(self, step, shadow)

    def digest(self) -> int:
        return self.state & 0xFFFFFFFFFFFFFFFF

    def norm_squared(self, reduced: Reduced) -> float:
        return 0.0

    def update(self, kept: KeptStep, lr_factor: float) -> None:
        self.state = hash((self.state, kept.reduced.step, kept.reduced.gradients, kept.total_samples, lr_factor))
        self.states[kept.reduced.step] = self.state

    def download(self, donors: Mapping[int, str], epoch: int) -> SimDownload:
        self.states.clear()
        self._written.clear()
        return SimDownload(self, donors, epoch)

    def load(self, downloaded: SimDownloaded) -> None:
        self.state = downloaded.state
        self.states[downloaded.step] = downloaded.state

    def recycle(self, reduced: Reduced) -> None: ...

    def offer_outcome(self, reduced: Reduced) -> None:
        self.outcome = self.offers[reduced.step] = reduced

    def offer_stripe(self, shadow: int, epoch: int, *, part: int, parts: int, step: int, sampler: SamplerState) -> None:
        self.stripes[shadow] = Stripe(epoch, part, parts, step, self.state, sampler.to_json())

    def keep_stripes_of(self, shadows: list[int], epoch: int) -> None:
        self.stripes = {shadow: stripe for shadow, stripe in self.stripes.items() if shadow in shadows}

    def newest_checkpoint(self) -> tuple[int, str] | None:
        return self.replica.world.newest_checkpoint()

    def checkpoint(self, step: int, sampler: SamplerState) -> None:
        every = self.replica.world.checkpoint_every
        if every and step % every == 0:
            self._written[step] = (self.state, sampler)

    def last_checkpoint(self, step: int, sampler: SamplerState) -> None:
        if self.replica.world.checkpoint_every:
            self._written.pop(step, None)
            self.replica.world.saved(self, step, (self.state, sampler))

    def final(self, step: int) -> None:
        if step in self._written:
            self.replica.world.saved(self, step, self._written.pop(step))
        self.replica.world.checks.final(self, step)

    # --- the port ---------------------------------------------------------------------------------------------------

    def connect(self, record: EpochRecord) -> None:
        """Connect the ring of this epoch, unless this replica is not in it."""
        self.records[record.number] = record
        if isinstance(self.pending, AwaitRecord) and self.pending.epoch == record.number:
            self._await_record(record.number)
        if record.member(self.replica.number) is not None:
            line = tuple((m.replica, m.attempt) for m in record.members)
            self.rings.connect(self, record.number, line)

    def cancel(self, up_to: int) -> None:
        """Close the rings up to this epoch, and say so."""
        self.rings.cancel(self, up_to)
        self.replica.notice(self, lambda leader: leader.rings_cancelled(self.number, up_to))

    def report(self, probe: int) -> None:
        """Say where this rank is."""
        match self.pending:
            case Compute():
                phase = Phase.BODY
            case AwaitRing() | AwaitOpening():
                phase = Phase.COLLECTIVE
            case AwaitVote():
                phase = Phase.VOTE
            case _:
                phase = Phase.WAITING
        seconds = self.clock.now - self._since
        report = RankReport(
            rank=self.number, epoch=self.loop.epoch, step=self.loop.step + 1, phase=phase, seconds=seconds
        )
        self.replica.notice(self, lambda leader: leader.reports(probe, report))

    def hear(self, epoch: int) -> None:
        """Put this number into the next header."""
        self._heard = max(self._heard, epoch)

    def ring_connected(self, epoch: int) -> None:
        """Tell the leader."""
        self.replica.notice(self, lambda leader: leader.ring_connected(self.number, epoch))

    def ring_broken(self, epoch: int, suspect: int | None, reason: str) -> None:
        """Tell the leader."""
        self.replica.notice(self, lambda leader: leader.ring_broken(epoch, suspect, reason))


@dataclass(eq=False)
class _Meeting:
    """One collective inside a replica."""

    kind: str
    ballots: dict[int, Ballot] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    decision: Decision | None = None


class Replica:
    """All ranks of one attempt, and its leader at rank 0."""

    def __init__(self, world: World, number: int, attempt: int, *, weights: int) -> None:
        self.world = world
        self.number = number
        self.attempt = attempt
        self.ranks = [Rank(self, rank, weights=weights) for rank in range(world.ranks)]
        self.owner = self.ranks[0].owner
        self.leader = Leader(replica=number, world_size=world.ranks)
        self.link: Link | None = None
        self.partitioned = False
        self.over: set[int] = set()
        self.exit_code: int | None = None
        self._to_leader = [Channel(self.owner) for _ in self.ranks]
        self._meetings: list[_Meeting] = []
        self._met = [0] * world.ranks
        self._backoff = 0.05
        for rank in self.ranks:
            rank.owner.soon(rank.resume)
        self.owner.soon(self.dial)
        self.owner.soon(self._heartbeat)

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{self.number}.{self.attempt}.{rank}" for rank in range(self.world.ranks))

    def fingerprint(self) -> tuple[object, ...]:
        """Return what its situation consists of."""
        state = self.leader.state
        ranks = tuple((k.loop.step, k.loop.full, type(k.pending).__name__, k.owner.frozen) for k in self.ranks)
        return self.number, self.alive, state.epoch, state.fence, state.broken, self.link is None, ranks

    # --- the leader -------------------------------------------------------------------------------------------------

    def notice(self, rank: Rank, event: Callable[[Leader], list[Effect]]) -> None:
        """A rank tells the leader something."""
        self._to_leader[rank.number].send(lambda: self.lead(event))

    def lead(self, event: Callable[[Leader], list[Effect]]) -> None:
        """Give the leader an event and carry out its effects."""
        before = self.leader.state
        effects = event(self.leader)
        self.world.checks.keeps_promise(self, before)
        for effect in effects:
            match effect:
                case TellCoordinator():
                    self.owner.soon(self._say_state)
                case Connect(record=record):
                    self._to_ranks(lambda rank, record=record: rank.connect(record))
                case Heard(epoch=epoch):
                    self._to_ranks(lambda rank, epoch=epoch: rank.hear(epoch))
                case AskRanks(probe=probe):
                    self._to_ranks(lambda rank, probe=probe: rank.report(probe))
                    self.owner.after(2.0, lambda probe=probe: self.lead(lambda leader: leader.probe_over(probe)))
                case Cancel(up_to=up_to):
                    self._to_ranks(lambda rank, up_to=up_to: rank.cancel(up_to))
        self.owner.soon(self._look_at_decision)
        if self.leader.bye and len(self.over) == len(self.ranks):
            self.exit(0)

    def _to_ranks(self, action: Callable[[Rank], None]) -> None:
        for rank in self.ranks[1:]:
            rank.from_leader.send(lambda rank=rank: action(rank))
        action(self.ranks[0])

    def _say_state(self) -> None:
        if self.link is not None:
            self.link.say(self.leader.state)

    def _heartbeat(self) -> None:
        silent = {k.number: self.world.clock.now - k.frozen_at for k in self.ranks[1:] if k.owner.frozen}
        self.lead(lambda leader: leader.ranks_silent(silent, timeout=SILENCE_TIMEOUT))
        self._say_state()
        self.owner.after(1.0, self._heartbeat)

    def dial(self) -> None:
        """Connect to the coordinator, again and again."""
        if not self.alive or self.leader.refused is not None or self.link is not None:
            return
        if self.partitioned or not self.world.coordinator.reached_by(self):
            self._backoff = min(2 * self._backoff, 2.0)
            self.owner.after(self._backoff * self.world.clock.random.uniform(0.5, 1.0), self.dial)
            return
        self._backoff = 0.05
        self.link = self.world.coordinator.accept(self)

    def hung_up(self, link: Link) -> None:
        """The connection to the coordinator is gone."""
        if self.link is link:
            self.link = None
            self.owner.after(self._backoff, self.dial)

    def hear(self, message: FromCoordinator) -> None:
        """The coordinator says something."""
        self.lead(lambda leader: leader.hear(message))

    # --- collectives inside the replica -----------------------------------------------------------------------------

    def meet(self, rank: Rank, kind: str, what: object) -> None:
        """A rank comes to the next collective."""
        number = self._met[rank.number]
        self._met[rank.number] += 1
        if number == len(self._meetings):
            self._meetings.append(_Meeting(kind))
        meeting = self._meetings[number]
        self.world.checks.lockstep(rank, meeting.kind, kind)
        if isinstance(what, Ballot):
            meeting.ballots[rank.number] = what
            if len(meeting.ballots) == len(self.ranks):
                tally = Tally(tuple(meeting.ballots[r] for r in range(len(self.ranks))))
                for each in self.ranks:
                    each.answer(tally)
            return
        assert isinstance(what, AwaitDecision)
        if rank.number:
            if meeting.decision is not None:
                rank.answer(meeting.decision)
            else:
                meeting.waiting.append(rank.number)
            return
        self.owner.soon(self._look_at_decision)
        if what.patience is not None:
            self.owner.after(what.patience, lambda: self._share(meeting, Decision()))

    def _look_at_decision(self) -> None:
        wanted = self.ranks[0].pending
        if isinstance(wanted, AwaitDecision):
            found = decision(self.leader, wanted.wanted, wanted.after)
            if found is not None:
                self._share(self._meetings[self._met[0] - 1], found)

    def _share(self, meeting: _Meeting, found: Decision) -> None:
        if meeting.decision is None:
            meeting.decision = found
            for number in (0, *meeting.waiting):
                self.ranks[number].answer(found)

    # --- how it ends ------------------------------------------------------------------------------------------------

    def rank_over(self, rank: Rank, *, finished: bool) -> None:
        """A rank has nothing more to do."""
        self.over.add(rank.number)
        if len(self.over) < len(self.ranks):
            return
        if not finished or self.leader.bye:
            self.exit(0)
        else:
            self.owner.after(BYE_TIMEOUT, lambda: self.exit(0))

    def rank_failed(self, rank: Rank, error: Exception) -> None:
        """A rank gives up, and takes the others with it."""
        code = 77 if isinstance(error, Refused) else 75
        self.world.clock.after(self.world.clock.delay(), lambda: self.exit(code))
        rank.owner.alive = False

    def exit(self, code: int) -> None:
        """All processes of this attempt are gone."""
        if not self.alive:
            return
        self.exit_code = code
        for rank in self.ranks:
            rank.owner.alive = False
            rank.rings.die(rank)
        if self.link is not None:
            self.link.close()
        self.world.exited(self)

    def freeze(self, *, rank: int | None = None) -> None:
        """All processes stand still, or one does."""
        for each in self.ranks:
            if rank in (None, each.number) and each.owner.alive:
                each.owner.frozen = True
                each.frozen_at = self.world.clock.now
                each.rings.freeze(each)

    def thaw(self) -> None:
        """They go on."""
        for each in self.ranks:
            if each.owner.frozen:
                each.owner.thaw()

    def leave(self) -> None:
        """Somebody sends SIGTERM."""
        self.owner.soon(lambda: self.lead(lambda leader: leader.asks_to_leave("SIGTERM")))
        self.owner.after(LEAVE_TIMEOUT, lambda: self.exit(143))
