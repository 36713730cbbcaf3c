"""A 64-bit digest of tensors that changes with any single bit and costs one pass over the memory.

The bits are read as 64-bit integers and summed modulo 2**64 with odd weights: flipping bit k of a word changes the sum
by ±2**k times an odd number, which is never 0. Words of one column share a weight, so that the pass is a plain column
sum at the speed of memory. It is made to find divergence and broken hardware, not to resist an attacker.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from fthsdp.scramble import GAMMA, MASK, scramble

__all__ = ["digest"]

_COLUMNS = 1024


def digest(tensors: Iterable[Tensor]) -> int:
    """Return the digest of the bits of ``tensors`` in their order: 0 … 2**64-1.

    Any dtypes and shapes, on one device or several; shapes and dtypes themselves do not count.
    """
    sums: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            sums.setdefault(tensor.device, []).append((_odd(position), _weighted_sum(tensor)))
    total = 0
    for found in sums.values():
        values = torch.stack([value for _, value in found]).tolist()  # the only wait for the device
        total += sum(weight * value for (weight, _), value in zip(found, values, strict=True))
    return total & MASK


def _weighted_sum(tensor: Tensor) -> Tensor:
    """Sum the words of one tensor with the weights of their columns: a 0-d int64 tensor on its device."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    if whole < raw.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        rest[: raw.numel() - whole] = raw[whole:]
        return _column_sums(words) + rest.view(torch.int64)[0] * _odd(_COLUMNS)
    return _column_sums(words)


def _column_sums(words: Tensor) -> Tensor:
    weights = _weights(words.device)
    rows = words.numel() // _COLUMNS
    table, rest = words[: rows * _COLUMNS], words[rows * _COLUMNS :]
    return (table.view(rows, _COLUMNS).sum(0) * weights).sum() + (rest * weights[: rest.numel()]).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    return torch.tensor([_odd(column) for column in range(_COLUMNS)], dtype=torch.int64, device=device)


def _odd(position: int) -> int:
    """Return the odd weight of a position, as a signed 64-bit number."""
    value = scramble(position * GAMMA) | 1
    return value - (1 << 64) if value >> 63 else value
