"""A 64-bit digest of tensors that changes with any single bit and costs one pass over the memory.

The bits are read as 64-bit integers and summed modulo 2**64 with odd weights: flipping bit k of a word changes the sum
by ±2**k times an odd number, which is never 0. Inside a block words of one column share a weight, so that the pass is a
plain sum that stays in the cache, at the speed of memory. The sum is scrambled at the end, so that any bit counts in
any part of the digest. It is made to find divergence and broken hardware, not to resist an attacker.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from fthsdp.scramble import GAMMA, MASK, scramble

__all__ = ["digest"]

_COLUMNS = 64
_ROWS = 1024
"""Rows of a block, which has half a megabyte: larger ones leave the cache, smaller ones give more sums to weigh."""
_SMALL = 1 << 16
"""Bytes below which tensors are put together first: a call for each would cost more than copying them."""


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """Return the digest of the bits of ``tensors`` in their order: 0 … 2**64-1.

    Any dtypes and shapes, on one device or several; shapes and dtypes themselves do not count.
    """
    devices: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device, []).append(tensor.contiguous().reshape(-1).view(torch.uint8))
    found: list[int] = []
    for raw in devices.values():
        found += torch.stack([_weighted_sum(words) for words in _words(raw)]).tolist()  # the only wait for the device
    return scramble(sum(_odd(position) * value for position, value in enumerate(found)) & MASK)


def _words(raw: Iterable[Tensor]) -> list[Tensor]:
    """Return the bytes of one device's tensors as 64-bit words, in few pieces."""
    small: list[Tensor] = []
    large: list[Tensor] = []
    for one in raw:
        whole = one.numel() // 8 * 8 if one.numel() >= _SMALL else 0
        if whole:
            large.append(one[:whole])
        small.append(one[whole:])
    together = torch.cat(small)
    together = torch.nn.functional.pad(together, (0, -together.numel() % 8))
    return [(one.clone() if one.storage_offset() % 8 else one).view(torch.int64) for one in (together, *large)]


def _weighted_sum(words: Tensor) -> Tensor:
    """Sum the words of one piece: a 0-d int64 tensor on its device."""
    blocks = words.numel() // (_ROWS * _COLUMNS)
    whole = blocks * _ROWS * _COLUMNS
    rows = (words.numel() - whole) // _COLUMNS
    end = whole + rows * _COLUMNS
    sums = torch.cat(
        [
            words[:whole].view(blocks, _ROWS, _COLUMNS).sum(1).view(-1),
            words[whole:end].view(rows, _COLUMNS).sum(0),
            words[end:],
        ]
    )
    return (sums * _weights(words.device, sums.numel().bit_length())[: sums.numel()]).sum()


@cache
def _weights(device: torch.device, bits: int) -> Tensor:
    return torch.tensor([_signed(_odd(column)) for column in range(1 << bits)], dtype=torch.int64, device=device)


def _odd(position: int) -> int:
    """Return the odd weight of a position."""
    return scramble(position * GAMMA) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
