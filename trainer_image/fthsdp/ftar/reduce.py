"""How received chunks become part of a tensor: in host memory, with as few passes over it as there can be.

float32 is received straight into the result, also what is to be added: the local numbers are added to it there, a piece
at a time while that is still in the processor's cache. Narrower wire types are received into a buffer beside the
result and converted on the way.

Added is with numpy's kernels, which stay in the calling thread. torch's would start a team of threads for the progress
thread and take the cores from the training thread just when that one computes; where only torch has the conversion, it
gets pieces that are too small for a team.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fthsdp.ftar.settings import WireDtype

__all__ = [
    "AddingSink",
    "ConvertingSink",
    "DirectSink",
    "Elements",
    "Sink",
    "WireBuffer",
    "bytes_of",
    "check_pair",
    "elements_of",
]

PIECE_BYTES = 512 << 10
"""Bytes that are received at most before they are used. Fits the second-level cache together with what is added."""
_LEAST_BYTES = 64 << 10
"""Bytes that an addition waits for, unless the chunk ends before; below that its fixed cost shows."""
_CONVERTED = 16 << 10
"""Elements that are converted at a time, always counted from the start of a chunk. All members cut alike, so an element
meets the same code everywhere (torch's vectors and its loop for the rest make different NaNs)."""
_ITEM = 4
_TORCH = {WireDtype.FLOAT32: torch.float32, WireDtype.BFLOAT16: torch.bfloat16, WireDtype.FLOAT16: torch.float16}


Elements = npt.NDArray[np.float32]


class Sink(Protocol):
    """Where the payload of one frame goes."""

    def room(self) -> memoryview:
        """Return the memory for the next bytes; empty when the payload is complete."""

    def filled(self, count: int) -> None:
        """``count`` bytes have been put at the start of the room."""


def elements_of(tensor: torch.Tensor) -> Elements:
    """Return the elements of a tensor in host memory; nothing is copied."""
    elements: Elements = tensor.detach().numpy()
    return elements


def bytes_of(elements: Elements) -> memoryview:
    """Return the bytes of contiguous elements; nothing is copied."""
    return elements.data.cast("B") if elements.size else memoryview(bytearray())


def check_pair(source: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError unless both are 1-D contiguous fp32 tensors in host memory, equally long and apart."""
    for name, tensor in (("source", source), ("out", out)):
        if tensor.dim() != 1 or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is a {tensor.dim()}-D {tensor.dtype} tensor on {tensor.device}: use a 1-D float32 on the CPU"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
    if source.numel() != out.numel():
        raise ValueError(f"source has {source.numel()} elements and out {out.numel()}: they have to be equally long")
    size = source.numel() * _ITEM
    if abs(source.data_ptr() - out.data_ptr()) < size:
        raise ValueError("source and out overlap: the source has to survive a failed attempt")


class DirectSink:
    """Receives straight into memory."""

    __slots__ = ("_room",)

    def __init__(self, room: memoryview) -> None:
        self._room = room

    def room(self) -> memoryview:
        """Return what is still empty."""
        return self._room[:PIECE_BYTES]

    def filled(self, count: int) -> None:
        """Move on."""
        self._room = self._room[count:]


class AddingSink:
    """Computes ``out = source + received``: receives into ``out`` and adds there, as far as elements are complete."""

    __slots__ = ("_added", "_bytes", "_filled", "_out", "_source")

    def __init__(self, source: Elements, out: Elements) -> None:
        self._source = source
        self._out = out
        self._bytes = bytes_of(out)
        self._filled = 0
        """Bytes that have come."""
        self._added = 0
        """Elements that are sums already."""

    def room(self) -> memoryview:
        """Return what is still empty, up to a piece."""
        return self._bytes[self._filled : self._filled + PIECE_BYTES]

    def filled(self, count: int) -> None:
        """Add what has come, unless it is so little that more can be waited for."""
        self._filled += count
        ready = self._filled // _ITEM
        if ready - self._added >= _LEAST_BYTES // _ITEM or self._filled == len(self._bytes):
            part = self._out[self._added : ready]
            np.add(self._source[self._added : ready], part, out=part)
            self._added = ready


class WireBuffer:
    """Memory for one frame of a narrower type, on its way out or in; one per stream and direction."""

    def __init__(self, dtype: WireDtype, frame_bytes: int) -> None:
        self._numbers = torch.empty(frame_bytes // dtype.item_bytes, dtype=_TORCH[dtype])
        self.bytes = self._numbers.view(torch.uint8).numpy().data
        self.item_bytes = dtype.item_bytes

    def put(self, values: torch.Tensor) -> memoryview:
        """Round fp32 ``values`` into the buffer; return their bytes."""
        for start in range(0, len(values), _CONVERTED):
            part = values[start : start + _CONVERTED]
            self._numbers[start : start + len(part)].copy_(part)
        return self.bytes[: len(values) * self.item_bytes]

    def take(self, start: int, count: int) -> torch.Tensor:
        """Return numbers of the buffer."""
        return self._numbers[start : start + count]


class ConvertingSink:
    """Receives numbers of a narrower type and keeps them in ``out`` as fp32, or their sums with ``source``.

    With ``final`` the sums are rounded to the wire's type: what the others get of them is what we have to keep.
    """

    __slots__ = ("_buffer", "_done", "_filled", "_final", "_out", "_size", "_source")

    def __init__(self, buffer: WireBuffer, out: torch.Tensor, *, source: torch.Tensor | None, final: bool) -> None:
        self._buffer = buffer
        self._out = out
        self._source = source
        self._final = final
        self._size = len(out) * buffer.item_bytes
        self._filled = 0
        """Bytes that have come."""
        self._done = 0
        """Elements that ``out`` has already."""

    def room(self) -> memoryview:
        """Return what is still empty, up to a piece."""
        return self._buffer.bytes[self._filled : min(self._size, self._filled + PIECE_BYTES)]

    def filled(self, count: int) -> None:
        """Convert what has come, in whole steps except for the last one."""
        self._filled += count
        ready = self._filled // self._buffer.item_bytes
        while self._done < len(self._out) and (ready - self._done >= _CONVERTED or self._filled == self._size):
            self._convert(min(_CONVERTED, len(self._out) - self._done))

    def _convert(self, count: int) -> None:
        start = self._done
        received, out = self._buffer.take(start, count), self._out[start : start + count]
        out.copy_(received)
        if self._source is not None:
            out.add_(self._source[start : start + count])
            if self._final:
                out.copy_(received.copy_(out))
        self._done += count
