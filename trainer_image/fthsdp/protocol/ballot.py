"""What the ranks of a replica say to each other in the vote that ends each step."""

from __future__ import annotations

from dataclasses import dataclass

from fthsdp.scramble import fingerprint

__all__ = ["Ballot", "Tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank says. Whole numbers stay exact below 2**53."""

    done: float = 0.0
    """1 when this rank has everything of the step."""
    allowed: float = 1.0
    """From the leader: 1 when its fence lets this epoch commit."""
    fence: float = 0.0
    """From the leader: the fence it knows."""
    heard: float = 0.0
    """Newest epoch number in the headers of this rank's rail."""
    samples: float = 0.0
    """Contributed on this rail, all replicas together."""
    loss_sum: float = 0.0
    """Over those samples."""
    norm_squared: float = 0.0
    """Of this rank's reduced gradients, before scaling; 0 when the update does not clip."""
    odd: float = 0.0
    """1 when this rank's state is not like that of the other replicas."""
    misfit: float = 0.0
    """1 when this rank's batch size or last step is not that of the other replicas."""
    disputed: float = 0.0
    """1 when any member's state, batch size or last step on this rail is not like the others'."""
    closing: float = 0.0
    """1 when the headers say that the last step is final now."""
    loaded: float = 0.0
    """From a rank that catches up: 1 when it has all of its stripes."""
    current: float = 0.0
    """From a rank that catches up: 1 when it has the state and has replayed everything but the newest step."""
    downloaded: float = 0.0
    """Bytes that this rank fetched to catch up."""
    digest: float = 0.0
    """Low 52 bits of this rank's digest after the step before, as the headers carry it."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What the ranks of the replica say together."""

    ballots: tuple[Ballot, ...]

    def all(self, name: str) -> bool:
        """Return whether every rank says so."""
        return all(getattr(b, name) for b in self.ballots)

    def any(self, name: str) -> bool:
        """Return whether some rank says so."""
        return any(getattr(b, name) for b in self.ballots)

    def sum(self, name: str) -> float:
        """Return the sum in rank order, the same bits on every rank."""
        return float(sum(getattr(b, name) for b in self.ballots))

    @property
    def digest(self) -> str:
        """The ranks' digests as one, in hex."""
        return fingerprint(int(ballot.digest) for ballot in self.ballots)

    def max(self, name: str) -> int:
        """Return the largest."""
        return int(max(getattr(b, name) for b in self.ballots))
