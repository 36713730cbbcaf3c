"""The vote inside a replica: one small collective per step, over the replica's own process group.

It makes a replica one voice. A step is prepared only when every rank is done with it and the leader may commit; the
sums that the update needs (samples, squared norm, loss) ride along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

__all__ = ["Ballot", "Tally", "gather", "share", "vote"]


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
    """Of this rank's reduced gradients, before scaling."""
    odd: float = 0.0
    """1 when this rank's state is not like that of the other replicas."""
    misfit: float = 0.0
    """1 when this rank's number of samples or last step is not that of the other replicas."""
    disputed: float = 0.0
    """1 when any member's state, number of samples or last step on this rail is not like the others'."""
    closing: float = 0.0
    """1 when the headers say that the last step is final now."""
    current: float = 0.0
    """From a rank that catches up: 1 when it has the state and has replayed everything but the newest step."""
    downloaded: float = 0.0
    """Bytes that this rank fetched to catch up."""
    digest: float = 0.0
    """Low 52 bits of this rank's digest after the step before, as the headers carry it."""


_NAMES = tuple(f.name for f in fields(Ballot))


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

    def max(self, name: str) -> int:
        """Return the largest."""
        return int(max(getattr(b, name) for b in self.ballots))


def vote(ballot: Ballot, group: dist.ProcessGroup) -> Tally:
    """Exchange ballots with the other ranks of the replica."""
    mine = torch.tensor([getattr(ballot, name) for name in _NAMES], dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    return Tally(tuple(Ballot(**dict(zip(_NAMES, row.tolist(), strict=True))) for row in gathered))


def share(data: bytes | None, group: dist.ProcessGroup) -> bytes:
    """Give rank 0's bytes to every rank of the replica; the others pass None."""
    size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    dist.broadcast(size, group_src=0, group=group)
    body = (
        torch.empty(int(size), dtype=torch.uint8)
        if data is None
        else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )
    dist.broadcast(body, group_src=0, group=group)
    return body.numpy().tobytes()


def gather(data: bytes, group: dist.ProcessGroup) -> Sequence[bytes]:
    """Give every rank the bytes of every rank, in rank order."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=group)
    largest = max(int(s) for s in sizes)
    mine = torch.zeros(largest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    bodies = [torch.empty(largest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(bodies, mine, group=group)
    return [b[: int(s)].numpy().tobytes() for b, s in zip(bodies, sizes, strict=True)]
