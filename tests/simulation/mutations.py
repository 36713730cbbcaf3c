"""The protocol with one rule taken out: each of these has to be noticed, else the checks are worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from fthsdp.coordinator import decide as decisions
from fthsdp.coordinator import membership as coordinator
from fthsdp.coordinator.doubt import Doubt
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.messages import EpochRecord, MemberState
from fthsdp.protocol import steploop
from fthsdp.protocol.ballot import Tally
from fthsdp.protocol.entering import Entry, how_to_enter
from fthsdp.protocol.leader import Leader
from fthsdp.protocol.steploop import StepLoop

__all__ = ["MUTATIONS"]

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def promise_forgotten(patch: Patch) -> None:
    """A leader that has answered a fence commits all the same."""

    def vote_begins(self: Leader, epoch: int) -> tuple[bool, int]:
        self._voting = True
        return True, 0

    patch.setattr(Leader, "vote_begins", vote_begins)


def fence_answered_during_a_vote(patch: Patch) -> None:
    """A leader answers a fence while its replica votes, and the vote commits after that."""

    def answer(self: Leader) -> list[Any]:
        if self.state.fence >= self._asked or self._owing:
            return []
        return self._change(fence=self._asked)

    patch.setattr(Leader, "_answer_fence", answer)


def decision_without_all_answers(patch: Patch) -> None:
    """The coordinator decides as soon as one member has answered."""
    patch.setattr(coordinator.Membership, "_decide", _decide_with_one)


def _decide_with_one(self: coordinator.Membership) -> bool:
    fence, self._fence = self._fence, None
    answered = any(self._facts.peers[r].state.fence >= (fence or 0) for r in self._facts.gathered())
    self._fence = 0 if answered or not self._facts.gathered() else fence
    if self._fence:
        return False
    return _ORIGINAL_DECIDE(self)


_ORIGINAL_DECIDE = coordinator.Membership._decide


def no_roll_forward(patch: Patch) -> None:
    """The decision goes by whoever is furthest behind."""
    original = coordinator.decide

    def decide(states: Mapping[int, MemberState], **details: Any) -> EpochRecord | None:
        record = original(states, **details)
        steps = [s.step for s in states.values() if s.step is not None and s.serves]
        if record is None or record.outcome is None or not steps:
            return record
        outcome = record.outcome.model_copy(update={"step": min(steps), "source": None})
        return record.model_copy(update={"outcome": outcome})

    patch.setattr(coordinator, "decide", decide)


def assignment_not_carried(patch: Patch) -> None:
    """A step that has begun under one list is retried under another."""
    patch.setattr(decisions, "_assigned", lambda *_: None)


def shadow_keeps_what_was_undone(patch: Patch) -> None:
    """A shadow keeps the step of an attempt that does not count."""

    def enter(record: EpochRecord, **details: Any) -> Entry:
        entry = how_to_enter(record, **details)
        return Entry.GO_ON if entry is Entry.DROP_LAST else entry

    patch.setattr(steploop, "how_to_enter", enter)


def shadow_keeps_stale_stripes(patch: Patch) -> None:
    """A shadow goes on with a download that does not lead to the boundary of the decision."""

    def enter(record: EpochRecord, **details: Any) -> Entry:
        entry = how_to_enter(record, **details)
        return Entry.GO_ON if entry is Entry.START_OVER else entry

    patch.setattr(steploop, "how_to_enter", enter)


def number_used_twice(patch: Patch) -> None:
    """A restarted coordinator does not count the proposal of the one before."""
    patch.setattr(Ledger, "number", property(lambda ledger: ledger.current.number))


def each_rail_for_itself(patch: Patch) -> None:
    """A rank crosses a boundary by what its own rail heard, and not by what its replica did."""
    original = StepLoop._following

    def following(self: StepLoop, tally: Any) -> Any:
        mine = tally.ballots[self._place.rank]
        alone = type(tally)(tuple(mine for _ in tally.ballots))
        return (yield from original(self, alone))

    patch.setattr(StepLoop, "_following", following)


def stripes_before_the_roll_forward(patch: Patch) -> None:
    """A donor copies its stripe when the epoch's message arrives, and not when it has begun for all."""
    original = StepLoop._activate

    def activate(self: StepLoop, record: EpochRecord, **details: Any) -> None:
        original(self, record, **details)
        self._copy_owed_stripes()

    patch.setattr(StepLoop, "_activate", activate)


def the_dead_are_counted_in(patch: Patch) -> None:
    """The samples of who did not contribute are taken as trained."""
    original = steploop.commit
    patch.setattr(steploop, "commit", lambda state, assigned, _: original(state, assigned, assigned.keys()))


def roll_forward_without_a_vote(patch: Patch) -> None:
    """A fetched step is committed although a fence came meanwhile."""
    original = StepLoop._voted

    def voted(self: StepLoop, reduced: Any) -> Any:
        if self._how == "rolled-forward":
            body, begins = self._body, type(self._body).begins_vote
            patch.setattr(type(body), "begins_vote", lambda rank, epoch: (begins(rank, epoch), (True, 0))[1])
            try:
                return (yield from original(self, reduced))
            finally:
                patch.setattr(type(body), "begins_vote", begins)
        return (yield from original(self, reduced))

    patch.setattr(StepLoop, "_voted", voted)


def fence_forgotten_in_a_pause(patch: Patch) -> None:
    """A shadow of a paused job turns full although it has answered a fence."""
    original = StepLoop._catch_up_in_pause

    def catch_up(self: StepLoop, catchup: Any) -> Any:
        steps = original(self, catchup)
        tally = yield next(steps)
        with suppress(StopIteration):
            steps.send(Tally(tuple(replace(ballot, allowed=1.0) for ballot in tally.ballots)))

    patch.setattr(StepLoop, "_catch_up_in_pause", catch_up)


def nobody_is_ever_lost_by_silence(patch: Patch) -> None:
    """Who says nothing is waited for."""
    original = coordinator.Membership._lose

    def lose(self: coordinator.Membership, peer: Any, cause: Any, reason: str, **details: Any) -> None:
        if cause not in (coordinator.Cause.SILENT, coordinator.Cause.HUNG):
            original(self, peer, cause, reason, **details)

    patch.setattr(coordinator.Membership, "_lose", lose)


def the_impatient_coordinator(patch: Patch) -> None:
    """Who reconnects is taken out."""

    def disconnected(self: coordinator.Membership, connection: int) -> None:
        for peer in list(self._facts.peers.values()):
            if peer.connection == connection:
                self._lose(peer, coordinator.Cause.CONNECTION_LOST, "its connection closed")

    patch.setattr(coordinator.Membership, "_disconnected", disconnected)


def the_coordinator_never_doubts_itself(patch: Patch) -> None:
    """Whom it does not hear it takes for silent, whether it could have heard anybody or not."""
    patch.setattr(Doubt, "look", lambda self, peers: False)


def the_coordinator_hears_nobody_and_believes_it(patch: Patch) -> None:
    """That the store answers is enough, though all are silent at once."""
    patch.setattr(Doubt, "_waits_for_anybody", lambda self, peers: False)


def the_coordinator_hears_one_and_believes_itself(patch: Patch) -> None:
    """It does not ask its store, as there is one replica that it hears."""
    patch.setattr(Doubt, "_marks", lambda self, peer: ())


def the_leaver_takes_the_state_along(patch: Patch) -> None:
    """Who asks to leave goes, although nobody else has the state yet."""

    def may_leave(states: Mapping[int, MemberState], **_: Any) -> frozenset[int]:
        return frozenset(r for r, s in states.items() if s.leaving)

    patch.setattr(decisions, "may_leave", may_leave)
    patch.setattr(coordinator, "may_leave", may_leave)


MUTATIONS: Sequence[Mutation] = (
    promise_forgotten,
    fence_answered_during_a_vote,
    decision_without_all_answers,
    no_roll_forward,
    assignment_not_carried,
    shadow_keeps_what_was_undone,
    shadow_keeps_stale_stripes,
    number_used_twice,
    each_rail_for_itself,
    stripes_before_the_roll_forward,
    the_dead_are_counted_in,
    roll_forward_without_a_vote,
    fence_forgotten_in_a_pause,
    nobody_is_ever_lost_by_silence,
    the_impatient_coordinator,
    the_coordinator_never_doubts_itself,
    the_coordinator_hears_nobody_and_believes_it,
    the_coordinator_hears_one_and_believes_itself,
    the_leaver_takes_the_state_along,
)
