"""The header that rides along each rail with every step, and what its ring makes of it.

Each member contributes one header when its gradients are handed over; the ring gives everybody all of them, so
everybody draws the same conclusions: how many samples were contributed and by whom, which epoch begins at this
boundary, and whose state or script is not like the others'.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

from fthsdp.errors import WireError

__all__ = ["Flag", "Header", "Opening", "misfits", "odd_ones"]

_HEADER = struct.Struct("!IIqqqqdQ")
_OPENING = struct.Struct("!Iqq")


class Flag(IntFlag):
    """What a member says of itself."""

    CONTRIBUTES = 1
    """Its gradients count in this step."""
    FULL = 2
    """It holds the whole state, and ``digest`` is of it."""
    CLOSING = 4
    """This is the round after the last step: it carries no gradients and makes that step final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One member's part of a step on one rail."""

    replica: int
    flags: Flag
    step: int
    """The step that this header belongs to."""
    heard: int
    """Newest epoch number that this member has a go for."""
    samples: int
    """That this rank contributes."""
    batch_size: int
    """Of one replica in one step when all are there, as this member's script has it."""
    loss_sum: float
    """Over those samples."""
    digest: int
    """64 bits over this rank's state after the step before."""

    def pack(self) -> bytes:
        """Return the fixed-size form."""
        numbers = (self.replica, self.flags, self.step, self.heard, self.samples, self.batch_size)
        return _HEADER.pack(*numbers, self.loss_sum, self.digest)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Read the fixed-size form; raises WireError."""
        try:
            replica, flags, step, heard, samples, batch_size, loss_sum, digest = _HEADER.unpack(data)
        except struct.error as error:
            raise WireError(f"a header of {len(data)} bytes is not one of {_HEADER.size}") from error
        return cls(
            replica=replica,
            flags=Flag(flags),
            step=step,
            heard=heard,
            samples=samples,
            batch_size=batch_size,
            loss_sum=loss_sum,
            digest=digest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What each member says when an epoch opens, so that newcomers learn at which step it began."""

    replica: int
    epoch: int
    step: int
    """Last step applied; -1 from a newcomer."""

    def pack(self) -> bytes:
        """Return the fixed-size form."""
        return _OPENING.pack(self.replica, self.epoch, self.step)

    @classmethod
    def unpack(cls, data: bytes) -> Opening:
        """Read the fixed-size form; raises WireError."""
        try:
            replica, epoch, step = _OPENING.unpack(data)
        except struct.error as error:
            raise WireError(f"an opening of {len(data)} bytes is not one of {_OPENING.size}") from error
        return cls(replica=replica, epoch=epoch, step=step)


def odd_ones(headers: Sequence[Header]) -> frozenset[int]:
    """Return the full members whose digest is not that of the majority; a tie goes to the lowest replica."""
    return _minority({h.replica: h.digest for h in headers if Flag.FULL in h.flags})


def misfits(headers: Sequence[Header]) -> frozenset[int]:
    """Return who has another batch size than most have, or ends the run when they do not, or vice versa.

    Everybody deals everybody's samples by its own batch size, so the step would train some twice and others never; and
    the first to end would end the run for all.
    """
    sizes = {h.replica: h.batch_size for h in headers if Flag.CONTRIBUTES in h.flags}
    return _minority(sizes | {h.replica: -1 for h in headers if Flag.CLOSING in h.flags})


def _minority(values: Mapping[int, int]) -> frozenset[int]:
    """Return the replicas with another value than most have; a tie goes to the lowest replica."""
    votes = Counter(values.values())
    if len(votes) < 2:
        return frozenset()
    most = max(votes.values())
    right = next(value for _, value in sorted(values.items()) if votes[value] == most)
    return frozenset(replica for replica, value in values.items() if value != right)
