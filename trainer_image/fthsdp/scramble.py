"""Numbers made of others as if at random, the same everywhere."""

import hashlib
from collections.abc import Iterable

__all__ = ["GAMMA", "MASK", "fingerprint", "scramble"]

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
"""Distance between the states of SplitMix64."""


def scramble(value: int) -> int:
    """Spread ``value`` over 64 bits, one to one: SplitMix64 (Steele, Lea and Flood, 2014) from this state."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def fingerprint(parts: Iterable[int | str]) -> str:
    """Return 16 hex digits that stand for these in this order: the digests, or the addresses, of all ranks as one."""
    return hashlib.sha256(",".join(map(str, parts)).encode()).hexdigest()[:16]
