"""A 64-bit digest of tensors that changes with any single bit and costs one pass over the memory.

The bits are read as 64-bit integers and summed modulo 2**64 with odd weights: flipping bit k of a word changes the sum
by ±2**k times an odd number, which is never 0. Inside a block words of one column share a weight, so that the pass is a
plain sum that stays in the cache, at the speed of memory. The sum is scrambled at the end, so that any bit counts in
any part of the digest. It is made to find divergence and broken hardware, not to resist an attacker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from fthsdp.scramble import GAMMA, MASK, scramble

__all__ = ["digest"]

_COLUMNS = 64
_ROW = 8 * _COLUMNS
"""Bytes of a row."""
_ROWS = 1024
"""Rows of a block, which has half a megabyte: larger ones leave the cache, smaller ones give more sums to weigh."""
_SMALL = 1 << 14
"""Bytes below which tensors are put together first: calls for each would cost more than copying them."""


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """Return the digest of the bits of ``tensors`` in their order: 0 … 2**64-1.

    Any dtypes and shapes, on one device or several; shapes and dtypes themselves do not count.
    """
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor)
    sums = [_weighted_sum(torch.cat(_sums(held)), device) for device, held in devices.items()]
    return scramble(sum(_odd(position) * int(value) for position, value in enumerate(sums)) & MASK)


def _sums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return few words that hold every bit of one device's tensors: sums over rows, and what is less than a row."""
    small: list[Tensor] = []
    sums: list[Tensor] = []
    for tensor in tensors:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        size = raw.numel()
        if size < _SMALL:
            small.append(raw)
            continue
        whole = size - size % _ROW
        if whole < size:
            small.append(raw[whole:])
        sums += _column_sums(raw[:whole] if whole < size else raw)
    together = torch.cat(small) if small else sums[0].new_empty(0, dtype=torch.uint8)
    sums += _column_sums(torch.nn.functional.pad(together, (0, -together.numel() % _ROW)))
    return sums


def _column_sums(raw: Tensor) -> Iterator[Tensor]:
    rows = (raw.clone() if raw.storage_offset() % 8 else raw).view(torch.int64).view(-1, _COLUMNS)
    whole = rows.shape[0] // _ROWS * _ROWS
    if whole:
        yield rows[:whole].view(-1, _ROWS, _COLUMNS).sum(1).view(-1)
    if whole < rows.shape[0]:
        yield rows[whole:].sum(0)


def _weighted_sum(words: Tensor, device: torch.device) -> Tensor:
    return (words * _weights(device, words.numel().bit_length())[: words.numel()]).sum()


@cache
def _weights(device: torch.device, bits: int) -> Tensor:
    return torch.tensor([_signed(_odd(column)) for column in range(1 << bits)], dtype=torch.int64, device=device)


def _odd(position: int) -> int:
    """Return the odd weight of a position."""
    return scramble(position * GAMMA) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
