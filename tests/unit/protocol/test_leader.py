"""What a replica's leader promises, event by event."""

import pytest

from fthsdp.coordinator.messages import (
    Announce,
    Assigned,
    Break,
    Close,
    EpochRecord,
    Go,
    Install,
    Member,
    Outcome,
    RefusedMember,
    Role,
)
from fthsdp.protocol.leader import Cancel, Connect, Effect, Heard, Leader, TellCoordinator


def record(number: int, *replicas: int, outcome: Outcome | None = None) -> EpochRecord:
    members = tuple(Member(replica=r, attempt=0, role=Role.ACTIVE, addresses=("h:1", "h:2")) for r in replicas)
    return EpochRecord(number=number, members=members, outcome=outcome)


@pytest.fixture
def leader() -> Leader:
    """Replica 1 of two ranks, in epoch 3 at step 7."""
    leader = Leader(replica=1, world_size=2)
    leader.enters(3, step=7, serves=True, begun=Assigned(step=8, replicas=(0, 1)))
    return leader


def fence(leader: Leader, epoch: int) -> list[Effect]:
    """The fence comes, and both ranks cancel their rings."""
    return [*leader.hear(Break(epoch=epoch)), *leader.rings_cancelled(0, epoch), *leader.rings_cancelled(1, epoch)]


def test_a_fence_is_answered_between_votes_once_all_ranks_have_cancelled_their_rings(leader: Leader) -> None:
    assert leader.hear(Break(epoch=3)) == [Cancel(3)]
    assert leader.rings_cancelled(0, 3) == []
    assert leader.state.fence == 0
    assert leader.rings_cancelled(1, 3) == [TellCoordinator()]
    assert leader.state.fence == 3


def test_a_fence_is_not_answered_for_a_rank_that_does_not_move(leader: Leader) -> None:
    leader.hear(Break(epoch=3))
    leader.rings_cancelled(0, 3)
    leader.vote_begins(3)
    assert leader.vote_ends() == []
    assert leader.state.fence == 0


def test_a_fence_during_a_vote_cancels_the_rings_at_once_and_is_answered_at_the_end(leader: Leader) -> None:
    assert leader.vote_begins(3) == (True, 0)
    assert fence(leader, 3) == [Cancel(3)]
    assert leader.state.fence == 0
    assert leader.vote_ends(step=8) == [TellCoordinator()]
    assert (leader.state.fence, leader.state.step) == (3, 8)


def test_nothing_is_committed_in_a_fenced_epoch(leader: Leader) -> None:
    leader.hear(Break(epoch=4))
    assert leader.vote_begins(3) == (False, 4)
    leader.vote_ends()
    assert leader.vote_begins(4) == (False, 4)
    leader.vote_ends()
    assert leader.vote_begins(5) == (True, 4)


def test_a_fenced_epoch_is_not_installed_even_if_its_message_was_under_way(leader: Leader) -> None:
    leader.hear(Break(epoch=4))
    assert leader.hear(Install(record=record(4, 0, 1, outcome=Outcome(step=7)))) == []
    assert leader.to_install(3) is None
    leader.hear(Install(record=record(5, 0, 1, outcome=Outcome(step=7))))
    assert leader.to_install(3) is not None


def test_a_fence_drops_announced_epochs_and_their_go(leader: Leader) -> None:
    leader.hear(Announce(record=record(4, 0, 1, 2)))
    leader.hear(Break(epoch=4))
    assert leader.hear(Go(epoch=4)) == []


def test_an_install_is_superseded_by_a_newer_fence(leader: Leader) -> None:
    leader.hear(Break(epoch=3))
    leader.hear(Install(record=record(4, 0, 1, outcome=Outcome(step=7))))
    leader.hear(Break(epoch=4))
    assert leader.to_install(3) is None


def test_an_announced_epoch_counts_as_connected_when_all_ranks_are(leader: Leader) -> None:
    assert leader.hear(Announce(record=record(4, 0, 1, 2))) == [Connect(record(4, 0, 1, 2))]
    assert leader.ring_connected(0, 4) == []
    assert leader.ring_connected(1, 4) == [TellCoordinator()]
    assert leader.state.connected == 4


def test_a_go_reaches_the_headers(leader: Leader) -> None:
    leader.hear(Announce(record=record(4, 0, 1, 2)))
    assert leader.hear(Go(epoch=4)) == [Heard(4)]


def test_a_broken_ring_is_told_once_with_all_suspects(leader: Leader) -> None:
    assert leader.ring_broken(3, 0, "reset") == [TellCoordinator()]
    assert leader.ring_broken(3, 0, "reset") == []
    assert leader.ring_broken(3, 2, "reset") == [TellCoordinator()]
    assert leader.state.suspects == (0, 2)


def test_the_break_of_the_current_epoch_counts_for_more_than_that_of_an_announced_one(leader: Leader) -> None:
    leader.hear(Announce(record=record(4, 0, 1, 2)))
    assert leader.ring_broken(4, 2, "the joiner is gone") == [TellCoordinator()]
    assert leader.ring_broken(3, 0, "reset") == [TellCoordinator()]
    assert (leader.state.broken, leader.state.suspects) == (3, (0,))
    assert leader.ring_broken(4, 2, "the joiner is gone") == []


def test_a_shadow_that_became_full_says_so_at_once() -> None:
    joiner = Leader(replica=2, world_size=1)
    joiner.enters(4, base=4)
    joiner.vote_begins(4)
    assert joiner.vote_ends(step=9, serves=True) == [TellCoordinator()]
    joiner.vote_begins(4)
    assert joiner.vote_ends(step=10, serves=True) == []


def test_rings_that_we_cancelled_ourselves_are_no_news(leader: Leader) -> None:
    leader.hear(Break(epoch=3))
    assert leader.ring_broken(3, 0, "closed") == []


def test_a_joiner_lets_go_of_a_proposal_that_was_replaced() -> None:
    joiner = Leader(replica=2, world_size=1)
    joiner.hear(Announce(record=record(4, 0, 1, 2)))
    assert joiner.to_join(0) == record(4, 0, 1, 2)
    assert joiner.hear(Announce(record=record(5, 0, 1, 2))) == [Cancel(4), Connect(record(5, 0, 1, 2))]
    assert joiner.to_join(4) == record(5, 0, 1, 2)
    assert joiner.ring_broken(4, 1, "cancelled") == []


def test_a_joiner_prefers_the_newest_of_what_was_announced_and_decided() -> None:
    joiner = Leader(replica=2, world_size=1)
    joiner.hear(Announce(record=record(4, 0, 1, 2)))
    joiner.hear(Break(epoch=4))
    decided = record(5, 0, 1, 2, outcome=Outcome(step=7))
    joiner.hear(Install(record=decided))
    assert joiner.to_join(4) == decided


def test_crossing_a_boundary_and_answering_a_fence_is_one_state(leader: Leader) -> None:
    leader.hear(Announce(record=record(4, 0, 1, 2)))
    leader.vote_begins(3)
    fence(leader, 4)
    leader.vote_ends(step=8, epoch=4, begun=Assigned(step=9, replicas=(0, 1, 2)))
    assert (leader.state.epoch, leader.state.step, leader.state.fence) == (4, 8, 4)


def test_being_closed_or_refused_is_remembered(leader: Leader) -> None:
    leader.hear(Close(step=60))
    leader.hear(RefusedMember(reason="attempt 0 is older than attempt 1"))
    assert leader.closed == 60
    assert leader.refused == "attempt 0 is older than attempt 1"
