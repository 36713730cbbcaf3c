"""The vote inside a replica: one small collective per step, over the replica's own process group.

It makes a replica one voice. A step is prepared only when every rank is done with it and the leader may commit; the
sums that the update needs (samples, squared norm, loss) ride along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta

import torch
import torch.distributed as dist

from fthsdp.protocol.ballot import Ballot, Tally

__all__ = ["FOR_EVER", "gather", "share", "vote"]

FOR_EVER = timedelta(days=365)
"""torch's timeout of a replica's process groups. A pause below minReplicas may last for hours and is no fault."""
_NAMES = tuple(f.name for f in fields(Ballot))


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
