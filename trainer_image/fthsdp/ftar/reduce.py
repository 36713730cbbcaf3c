"""How received chunks become part of a tensor: in host memory, without copies.

Added is with numpy's kernels, which stay in the calling thread. torch's would start a team of threads for the progress
thread and take the cores from the training thread just when that one computes.

Bytes of an all-gather are received straight into the result. Bytes that are to be added are received into a small
scratch buffer and added from there piece by piece, while they are still in the processor's cache.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["AddingSink", "DirectSink", "Elements", "Scratch", "Sink", "bytes_of", "check_pair", "elements_of"]

PIECE_BYTES = 512 << 10
"""Bytes that are received before they are added. Fits the second-level cache together with what it is added to."""
_ITEM = 4


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


class Scratch:
    """Memory for bytes that are about to be added; one per ring, since a ring receives one frame at a time."""

    def __init__(self) -> None:
        self.elements = np.empty(PIECE_BYTES // _ITEM, dtype=np.float32)
        self.bytes = bytes_of(self.elements)


class DirectSink:
    """Receives straight into memory."""

    __slots__ = ("_room",)

    def __init__(self, room: memoryview) -> None:
        self._room = room

    def room(self) -> memoryview:
        """Return what is still empty."""
        return self._room

    def filled(self, count: int) -> None:
        """Move on."""
        self._room = self._room[count:]


class AddingSink:
    """Computes ``out[start:stop] = source[start:stop] + received``."""

    __slots__ = ("_out", "_scratch", "_source", "_start", "_stop", "_waiting")

    def __init__(self, scratch: Scratch, source: Elements, out: Elements, start: int, stop: int) -> None:
        self._scratch = scratch
        self._source = source
        self._out = out
        self._start = start
        self._stop = stop
        self._waiting = 0
        """Bytes in the scratch buffer."""

    def room(self) -> memoryview:
        """Return the rest of the current piece."""
        return self._scratch.bytes[self._waiting : min(PIECE_BYTES, (self._stop - self._start) * _ITEM)]

    def filled(self, count: int) -> None:
        """Add the piece when it is complete."""
        self._waiting += count
        piece = min(PIECE_BYTES // _ITEM, self._stop - self._start)
        if self._waiting == piece * _ITEM:
            end = self._start + piece
            # Infinities and NaNs travel like any number; whether they may occur is not for a sum to say.
            with np.errstate(all="ignore"):
                np.add(
                    self._source[self._start : end], self._scratch.elements[:piece], out=self._out[self._start : end]
                )
            self._start, self._waiting = end, 0
