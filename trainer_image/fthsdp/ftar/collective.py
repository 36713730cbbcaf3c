"""The collectives of a ring: what to send, where to put what arrives, and when they are done.

Nothing here touches a socket. A ring asks for the next frame to send and for a place for the next one to come.
"""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

import torch

from fthsdp.errors import FthsdpError, RingBroken, WireError
from fthsdp.ftar.frames import LARGEST_PAYLOAD, Header, Kind
from fthsdp.ftar.reduce import AddingSink, ConvertingSink, DirectSink, Sink, WireBuffer, bytes_of, elements_of
from fthsdp.ftar.schedule import Transfer, chunk_elements, make_schedule
from fthsdp.ftar.settings import FtarSettings

__all__ = ["AllGather", "AllReduce", "Collective", "Work"]

T = TypeVar("T")


class Work(Generic[T]):
    """A collective under way. Its tensors belong to the engine until it is done, also when it fails."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._result: T | None = None
        self._error: FthsdpError | None = None

    def done(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the end; raises RingBroken when the ring broke, TimeoutError after ``timeout`` seconds."""
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the collective was not done after {timeout} s")
        if self._error is not None:
            raise _fresh(self._error)
        return self._result  # type: ignore[return-value]

    def _succeed(self, result: T) -> None:
        self._result = result
        self._finished.set()

    def _fail(self, error: FthsdpError) -> None:
        self._error = error
        self._finished.set()


def _fresh(error: FthsdpError) -> FthsdpError:
    # One error ends many works, waited for in several threads: each gets its own, with its own traceback.
    return RingBroken(str(error), suspect=error.suspect) if isinstance(error, RingBroken) else type(error)(str(error))


class Collective(Protocol):
    """One collective as a ring drives it. Positions count its frames, in the order in which they travel.

    The buffers are the stream's own, for wire types that are not what the tensors hold; None where they are.
    """

    num_sends: int
    num_receives: int

    def begin(self, members: int, index: int) -> None:
        """Learn the ring; called once, before everything else."""

    def size(self, position: int) -> int:
        """Return the most bytes that receive ``position`` can have."""

    def outgoing(self, position: int, *, received: int, buffer: WireBuffer | None) -> tuple[Header, memoryview] | None:
        """Return send ``position``, or None while it waits: the first ``received`` receives are complete."""

    def incoming(self, position: int, header: Header, *, buffer: WireBuffer | None) -> Sink:
        """Return the place for receive ``position``; raises WireError when ``header`` is another frame."""

    def succeed(self) -> None:
        """Everything was sent and received."""

    def fail(self, error: FthsdpError) -> None:
        """The ring broke."""


def _must_be(expected: Header, header: Header) -> None:
    if header != expected:
        raise WireError(f"sent '{header}' where '{expected}' was due")


class AllReduce:
    """``out`` becomes the sum of all members' ``source``."""

    def __init__(
        self, *, epoch: int, step: int, bucket: int, source: torch.Tensor, out: torch.Tensor, settings: FtarSettings
    ) -> None:
        self.work: Work[None] = Work()
        self._epoch, self._step, self._bucket = epoch, step, bucket
        self._source, self._out = source.detach(), out.detach()
        self._item = settings.wire_dtype.item_bytes
        self._limit = settings.chunk_bytes // self._item

    def begin(self, members: int, index: int) -> None:
        """Make the schedule."""
        numel = self._source.numel()
        chunk = chunk_elements(members, numel, limit=self._limit)
        self._schedule = make_schedule(members, index, numel, chunk=chunk)
        self.num_sends, self.num_receives = len(self._schedule.sends), len(self._schedule.receives)
        self._source_elements, self._out_elements = elements_of(self._source), elements_of(self._out)
        self._source_bytes, self._out_bytes = bytes_of(self._source_elements), bytes_of(self._out_elements)
        if members == 1:
            self._out_elements[:] = self._source_elements

    def size(self, position: int) -> int:
        """Return the bytes of a receive."""
        transfer = self._schedule.receives[position]
        return (transfer.stop - transfer.start) * self._item

    def _header(self, transfer: Transfer) -> Header:
        length = (transfer.stop - transfer.start) * self._item
        return Header(Kind.REDUCE, self._epoch, self._step, self._bucket, transfer.round, transfer.chunk, length)

    def outgoing(self, position: int, *, received: int, buffer: WireBuffer | None) -> tuple[Header, memoryview] | None:
        """Return a chunk of the source, then what receives have left in ``out``."""
        if not self._schedule.may_send(position, received=received):
            return None
        transfer = self._schedule.sends[position]
        start, stop, own = transfer.start, transfer.stop, position < self._schedule.lead
        if buffer is not None:
            payload = buffer.put((self._source if own else self._out)[start:stop])
        else:
            payload = (self._source_bytes if own else self._out_bytes)[start * self._item : stop * self._item]
        return self._header(transfer), payload

    def incoming(self, position: int, header: Header, *, buffer: WireBuffer | None) -> Sink:
        """Return where a chunk is added or kept."""
        transfer = self._schedule.receives[position]
        _must_be(self._header(transfer), header)
        start, stop = transfer.start, transfer.stop
        if buffer is not None:
            source = self._source[start:stop] if transfer.adds else None
            return ConvertingSink(buffer, self._out[start:stop], source=source, final=transfer.final)
        if not transfer.adds:
            return DirectSink(self._out_bytes[start * self._item : stop * self._item])
        return AddingSink(self._source_elements[start:stop], self._out_elements[start:stop])

    def succeed(self) -> None:
        """Give ``out`` back."""
        self.work._succeed(None)

    def fail(self, error: FthsdpError) -> None:
        """Give both tensors back."""
        self.work._fail(error)


class AllGather:
    """Every member gets all payloads, by ring position."""

    def __init__(self, *, epoch: int, step: int, payload: bytes) -> None:
        self.work: Work[list[bytes]] = Work()
        self._epoch, self._step, self._payload = epoch, step, payload

    def begin(self, members: int, index: int) -> None:
        """Learn where our payload goes."""
        self.num_sends = self.num_receives = members - 1
        self._members, self._index = members, index
        self._blocks: list[bytes | bytearray] = [b""] * members
        self._blocks[index] = self._payload

    def size(self, position: int) -> int:
        """Return the most that a payload can have."""
        return LARGEST_PAYLOAD

    def _header(self, number: int, length: int) -> Header:
        return Header(Kind.GATHER, self._epoch, self._step, round=number, length=length)

    def outgoing(self, position: int, *, received: int, buffer: WireBuffer | None) -> tuple[Header, memoryview] | None:
        """Return our payload, then those that came from the left."""
        if position > received:
            return None
        block = self._blocks[(self._index - position) % self._members]
        return self._header(position, len(block)), memoryview(block)

    def incoming(self, position: int, header: Header, *, buffer: WireBuffer | None) -> Sink:
        """Return a new buffer for a payload."""
        _must_be(self._header(position, min(header.length, LARGEST_PAYLOAD)), header)
        block = self._blocks[(self._index - position - 1) % self._members] = bytearray(header.length)
        return DirectSink(memoryview(block))

    def succeed(self) -> None:
        """Hand the payloads over."""
        self.work._succeed([bytes(block) for block in self._blocks])

    def fail(self, error: FthsdpError) -> None:
        """Report why there are none."""
        self.work._fail(error)
