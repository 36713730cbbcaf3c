"""What a replica does while the job is paused, request by request: no ring carries it, and yet fences bind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest

from fthsdp.coordinator.messages import Break, EpochRecord, Install, Member, Outcome, Phase, Probe, RankReport, Role
from fthsdp.data.sampler import SamplerState
from fthsdp.environment import Identity
from fthsdp.protocol.ballot import Tally
from fthsdp.protocol.decision import Decision, Over, decision
from fthsdp.protocol.header import Opening
from fthsdp.protocol.leader import Effect, Leader, TellCoordinator
from fthsdp.protocol.requests import Attempt, AwaitDecision, AwaitOpening, AwaitVote, Body, Request, Steps
from fthsdp.protocol.step_records import Recorder
from fthsdp.protocol.steploop import Place, StepLoop

IDENTITY = Identity(job="test", replica=1, attempt=0, rank=0, world_size=1, coordinator="h:9", host="h")


def paused_epoch(**roles: Role) -> EpochRecord:
    """More members are wanted than these."""
    members = tuple(
        Member(replica=int(name[1:]), attempt=0, role=role, addresses=(f"h:{name}",)) for name, role in roles.items()
    )
    shadows = tuple(m.replica for m in members if m.role is Role.SHADOW)
    return EpochRecord(number=1, members=members, paused=True, outcome=Outcome(step=0), snapshots=shadows)


@dataclass(frozen=True)
class Stripes:
    """All stripes of the state after ``step``, there at once."""

    step: int = 0
    bytes: int = 1

    @property
    def sampler(self) -> Any:
        return SamplerState().to_json()

    def result(self) -> Stripes:
        return self

    def cancel(self) -> None:
        """Nothing is under way."""


class OneRank:
    """What replica 1's only rank is to its loop, as long as no step passes."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.checkpoints: list[int] = []

    def tell(self, event: Callable[[Leader], list[Effect]]) -> None:
        event(self.leader)

    def begins_vote(self, epoch: int) -> tuple[bool, int]:
        return self.leader.vote_begins(epoch)

    def digest(self) -> int:
        return 1

    def newest_checkpoint(self) -> None:
        return None

    def enter(self, record: EpochRecord, opening: Opening) -> None:
        """There are no rings."""

    def keep_stripes_of(self, shadows: list[int], epoch: int) -> None:
        """It is no donor."""

    def download(self, donors: Mapping[int, str], epoch: int) -> Stripes:
        return Stripes()

    def load(self, downloaded: Stripes) -> None:
        """There is no state."""

    def last_checkpoint(self, step: int, sampler: SamplerState) -> None:
        self.checkpoints.append(step)


class Waiting:
    """Replica 1, which has entered a paused epoch and waits for the coordinator."""

    def __init__(self, record: EpochRecord) -> None:
        self.leader = Leader(replica=1, world_size=1)
        self.rank = OneRank(self.leader)
        body = cast(Body, self.rank)
        recorder = Recorder(IDENTITY, started=0.0, publish=None, clock=lambda: 0.0)
        self.loop = StepLoop(Place(replica=1, rank=0, world_size=1, batch_size=2), body, recorder)
        self.leader.hear(Install(record=record))
        self._join()
        self._steps: Steps[Attempt] = self.loop.begin()
        self.asks: Request = next(self._steps)

    def _join(self) -> None:
        openings = (Opening(replica=0, epoch=1, step=0), Opening(replica=1, epoch=1, step=-1))
        joining, answer = self.loop.join(), None
        while True:
            try:
                answer = self._answer(joining.send(answer), openings)
            except StopIteration:
                return

    def _answer(self, asks: Request, openings: tuple[Opening, ...]) -> Any:
        match asks:
            case AwaitVote(ballot=ballot):
                return Tally((ballot,))
            case AwaitOpening():
                return openings
            case AwaitDecision(wanted=wanted, after=after):
                return decision(self.leader, wanted, after)
        raise AssertionError(asks)

    def hears(self, answer: Decision) -> None:
        """The coordinator has answered; a shadow to which it said nothing for a while comes to a vote."""
        assert isinstance(self.asks, AwaitDecision)
        self.asks = self._steps.send(answer)

    def votes(self) -> None:
        """The ranks have all voted."""
        assert isinstance(self.asks, AwaitVote)
        self.asks = self._steps.send(Tally((self.asks.ballot,)))

    def fenced(self, epoch: int) -> list[Effect]:
        """The fence comes, and the rank cancels its rings."""
        return [*self.leader.hear(Break(epoch=epoch)), *self.leader.rings_cancelled(0, epoch)]


@pytest.fixture
def shadow() -> Waiting:
    """It catches up from replica 0."""
    return Waiting(paused_epoch(r0=Role.ACTIVE, r1=Role.SHADOW))


def test_it_turns_full_although_no_step_passes(shadow: Waiting) -> None:
    shadow.hears(Decision())
    shadow.votes()
    state = shadow.leader.state
    assert (state.step, state.serves, state.catching_up, shadow.loop.full) == (0, True, None, True)


def test_it_does_not_turn_full_once_it_has_answered_a_fence(shadow: Waiting) -> None:
    assert TellCoordinator() in shadow.fenced(1)
    promised = shadow.leader.state
    for _ in range(3):
        shadow.hears(Decision())
        shadow.votes()
    assert (promised.fence, promised.step) == (1, None)
    assert shadow.leader.state == promised
    assert not shadow.loop.full


def test_a_fence_during_its_vote_is_answered_with_what_the_vote_decided(shadow: Waiting) -> None:
    shadow.hears(Decision())
    assert TellCoordinator() not in shadow.fenced(1)
    assert shadow.leader.state.fence == 0
    shadow.votes()
    assert (shadow.leader.state.fence, shadow.leader.state.step) == (1, 0)
    assert shadow.loop.full


def test_its_answer_to_a_probe_outlives_its_votes(shadow: Waiting) -> None:
    shadow.fenced(1)
    shadow.leader.hear(Probe(number=1))
    here = RankReport(rank=0, epoch=1, step=1, phase=Phase.WAITING, seconds=0.0)
    shadow.leader.reports(1, here)
    shadow.hears(Decision())
    shadow.votes()
    assert shadow.leader.state.ranks == (here,)


def test_who_leaves_before_the_first_step_writes_no_checkpoint() -> None:
    alone = Waiting(paused_epoch(r1=Role.ACTIVE))
    with pytest.raises(Over):
        alone.hears(Decision(bye=True))
    assert alone.leader.state.step == 0
    assert alone.rank.checkpoints == []
