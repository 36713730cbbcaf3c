"""Memory that changes by itself is found at the next step, and costs the replica whose it is."""

from __future__ import annotations

import pytest
from tests.simulation.world import World

from fthsdp.coordinator.messages import Cause
from fthsdp.protocol import steploop


def flip(seed: int, victim: int, rank: int) -> World:
    """Flip a bit of one of three replicas in the third step, and run to the end."""
    world = World(seed, replicas=3, ranks=2, steps=8)
    while min(r.ranks[rank].loop.step for r in world.replicas.values()) < 2:
        world.next()
    world.flip_bit(victim, rank)
    world.finish()
    return world


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_odd_replica_starts_again_and_the_others_train_on(victim: int, rank: int) -> None:
    for seed in range(20):
        world = flip(seed, victim, rank)
        assert [(r.replica, r.cause) for r in world.checks.removed] == [(victim, Cause.STATE_DIVERGED)]
        assert world.checks.endings["retried"] > 0


def test_a_comparison_that_finds_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steploop, "odd_ones", lambda headers: frozenset())
    with pytest.raises(AssertionError, match="is not that of the others"):
        flip(0, 1, 0)
