"""The state of one rank at one boundary, laid out as one run of bytes that can be cut into stripes.

All donors hold bit-identical states, so each copies only its stripe to host memory, and the joiner puts the stripes
together in any order, from any number of connections at once. The layout travels in ``meta``, which every donor sends
along: a joiner needs to know nothing beforehand, and donors that disagree are found out.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fthsdp.errors import NotReady, WireError
from fthsdp.ranges import Range, count, subtract, union

__all__ = ["Snapshot", "StripeAssembler", "copy_stripe", "stripe_range"]

_ALIGNMENT = 16
"""Bytes. Each tensor begins at a multiple, so that it can be viewed in place whatever its dtype."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.bool,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where one tensor lies in the run of bytes."""

    start: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.size


def _lay_out(tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[_Place, ...]:
    places: list[_Place] = []
    end = 0
    for dtype, shape in tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(_Place(start=start, size=dtype.itemsize * math.prod(shape), dtype=dtype, shape=shape))
        end = places[-1].stop
    return tuple(places)


def _read_layout(meta: object) -> tuple[_Place, ...]:
    """Lay out what ``meta`` describes; raises WireError."""
    try:
        described = [(_DTYPES[name], tuple(shape)) for name, shape in meta["tensors"]]  # type: ignore[index]
        valid = all(type(size) is int and 0 <= size < 1 << 48 for _, shape in described for size in shape)
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise WireError("what came with a stripe does not describe the tensors of a snapshot")
    return _lay_out(described)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A description as JSON, and the tensors it speaks of, in order."""

    meta: dict[str, Any]
    """JSON: ``tensors`` has [dtype, shape] of each tensor, ``content`` what they mean."""
    tensors: tuple[Tensor, ...]
    """Views of the live state, or of what was downloaded."""

    @classmethod
    def of(cls, content: dict[str, Any], tensors: Sequence[Tensor]) -> Snapshot:
        """Describe ``tensors`` and return them with ``content`` (JSON)."""
        described = [[_NAMES[tensor.dtype], list(tensor.shape)] for tensor in tensors]
        return cls(meta={"tensors": described, "content": content}, tensors=tuple(tensors))


def _length(places: Sequence[_Place]) -> int:
    return places[-1].stop if places else 0


def stripe_range(total_bytes: int, index: int, stripes: int) -> Range:
    """Return the bytes of stripe ``index`` of ``stripes``; all of them together are everything, none overlap."""
    assert 0 <= index < stripes
    return total_bytes * index // stripes, total_bytes * (index + 1) // stripes


def copy_stripe(snapshot: Snapshot, index: int, count: int) -> tuple[Range, memoryview]:
    """Copy stripe ``index`` of ``count`` to host memory and return which bytes these are, and the bytes.

    The copy is complete on return: the state may change right after.
    """
    places = _read_layout(snapshot.meta)
    start, stop = stripe_range(_length(places), index, count)
    stripe = torch.empty(stop - start, dtype=torch.uint8)
    end = start
    for first, raw in _pieces(snapshot.tensors, places, start, stop):
        stripe[end - start : first - start].zero_()  # between tensors
        end = first + raw.numel()
        stripe[first - start : end - start].copy_(raw)
    stripe[end - start :].zero_()
    return (start, stop), stripe.numpy().data


def _pieces(tensors: Sequence[Tensor], places: Sequence[_Place], start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the bytes of ``tensors`` that lie in start … stop, each run with its position."""
    for tensor, place in zip(tensors, places, strict=True):
        first, last = max(start, place.start), min(stop, place.stop)
        if first < last:
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            yield first, raw[first - place.start : last - place.start]


class StripeAssembler:
    """Put stripes together; several threads may fill different ones at the same time."""

    def __init__(self, meta: dict[str, Any]) -> None:
        """Prepare memory for the snapshot that ``meta`` describes; raises WireError."""
        self._meta = meta
        self._places = _read_layout(meta)
        self.total_bytes = _length(self._places)
        """Length of the run of bytes."""
        self._bytes = torch.empty(self.total_bytes, dtype=torch.uint8)
        self._memory = self._bytes.numpy().data
        self._filled: tuple[Range, ...] = ()
        self._lock = threading.Lock()

    def check(self, meta: dict[str, Any]) -> None:
        """Raise WireError when a stripe's ``meta`` is not that of the first: their donors' states differ."""
        if meta != self._meta and json.dumps(meta) != json.dumps(self._meta):  # a NaN is not equal to itself
            raise WireError("two donors describe different states: their stripes cannot be combined")

    def window(self, part: Range) -> memoryview:
        """Return the memory of the bytes ``part``, to receive into; then call ``filled``; raises WireError."""
        if not 0 <= part[0] <= part[1] <= self.total_bytes:
            raise WireError(f"bytes {part[0]} to {part[1]} of a snapshot that has {self.total_bytes}")
        return self._memory[part[0] : part[1]]

    def filled(self, part: Range) -> None:
        """Note that the bytes ``part`` are there."""
        with self._lock:
            self._filled = union([*self._filled, part])

    @property
    def missing(self) -> tuple[Range, ...]:
        """The bytes that are not there yet."""
        return subtract([(0, self.total_bytes)], self._filled)

    @property
    def complete(self) -> bool:
        """Whether every byte is there."""
        return not self.missing

    def snapshot(self) -> Snapshot:
        """Return the whole, its tensors views of the downloaded bytes; raises NotReady."""
        if not self.complete:
            raise NotReady(f"{count(self.missing)} of the {self.total_bytes} bytes of a snapshot are still to come")
        tensors = [self._bytes[p.start : p.stop].view(p.dtype).view(p.shape) for p in self._places]
        return Snapshot(meta=self._meta, tensors=tuple(tensors))
