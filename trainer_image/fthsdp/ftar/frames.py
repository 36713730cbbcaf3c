"""The fixed header in front of everything that travels along a rail.

32 bytes, big-endian: ``FTAR``, kind, round, chunk, bucket, epoch, length of the payload, and one 64-bit number that is
the step of a collective or the total of a credit. A receiver knows which frame comes next, so every field is compared
with what it has to be and a difference breaks the ring by name.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from fthsdp.errors import WireError

__all__ = ["HEADER_BYTES", "LARGEST_PAYLOAD", "Header", "Kind"]

_LAYOUT = struct.Struct("!4sBxHIIIIQ")
_MAGIC = b"FTAR"
HEADER_BYTES = _LAYOUT.size
LARGEST_PAYLOAD = 64 << 10
"""Bytes that one member may bring to an all-gather."""


class Kind(IntEnum):
    """What a frame is for."""

    REDUCE = 1
    """A chunk of an all-reduce."""
    GATHER = 2
    """One member's payload of an all-gather."""
    CREDIT = 3
    """The receiver will take this many chunks, counted since the connection began."""
    ALIVE = 4
    """The sender's progress thread runs."""
    GOODBYE = 5
    """The sender has finished everything that it began and sends nothing more."""


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """One header, decoded. A tuple, because one is made and compared for each frame in the progress loop."""

    kind: Kind
    epoch: int
    number: int = 0
    """Step of a collective, or the total of a credit."""
    bucket: int = 0
    round: int = 0
    chunk: int = 0
    length: int = 0
    """Bytes of payload behind the header."""

    def encode(self) -> bytes:
        """Return the header's bytes."""
        return _LAYOUT.pack(
            _MAGIC, self.kind, self.round, self.chunk, self.bucket, self.epoch, self.length, self.number
        )

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Header:
        """Read a header; raises WireError when it is none."""
        magic, kind, number, chunk, bucket, epoch, length, step = _LAYOUT.unpack(data)
        if magic != _MAGIC or kind not in _KINDS:
            raise WireError(f"{bytes(data[:8])!r} does not start a frame of a rail")
        return cls(_KINDS[kind], epoch, step, bucket, number, chunk, length)

    def __str__(self) -> str:
        if self.kind not in (Kind.REDUCE, Kind.GATHER):
            return f"{self.kind.name.lower()} in epoch {self.epoch}"
        return (
            f"{self.kind.name.lower()} of step {self.number}, bucket {self.bucket}, round {self.round},"
            f" chunk {self.chunk}, {self.length} bytes, epoch {self.epoch}"
        )
