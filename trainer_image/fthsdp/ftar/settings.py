"""What can be set about the transport across replicas, and the rules that the values keep among themselves."""

from __future__ import annotations

from dataclasses import dataclass

from fthsdp.errors import ConfigError

__all__ = ["FtarSettings"]

_LARGEST_CHUNK = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class FtarSettings:
    """Settings of an Engine; raises ConfigError when they break a rule. All members of a job use the same."""

    chunk_bytes: int = 8 << 20
    """Bytes, 8 MiB: largest piece that travels as one frame. A frame once begun is finished before a keep-alive can
    follow it, so on the slowest link that is to be used it must take well below ``silence_timeout``."""
    window: int = 4
    """Frames of ``chunk_bytes``, 4: what a receiver lets its neighbour send ahead. Times ``chunk_bytes`` it bounds what
    is under way between two neighbours; it should be above bandwidth times round trip (25 GB/s over 1 ms are 25 MB)."""
    keepalive_interval: float = 1.0
    """Seconds, 1: longest time without a sign of life to a neighbour. Costs 32 bytes each."""
    silence_timeout: float = 5.0
    """Seconds, 5: a neighbour that was not heard of for so long is taken for frozen or unreachable. At least three
    keep-alives, so that one late thread is no failure."""
    connect_timeout: float = 10.0
    """Seconds, 10: time for both neighbours of a new ring to be connected."""

    def __post_init__(self) -> None:
        """Check each value and the order of the times."""
        if not 4 <= self.chunk_bytes <= _LARGEST_CHUNK or self.chunk_bytes % 4:
            raise ConfigError(
                f"chunk_bytes is {self.chunk_bytes}: it has to be a multiple of 4 from 4 to {_LARGEST_CHUNK}"
            )
        if self.window < 1:
            raise ConfigError(f"window is {self.window}: at least one chunk has to be under way")
        for name in ("keepalive_interval", "silence_timeout", "connect_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}: it has to be a positive number of seconds")
        if self.silence_timeout < 3 * self.keepalive_interval:
            raise ConfigError(
                f"silence_timeout ({self.silence_timeout} s) is below three times keepalive_interval"
                f" ({self.keepalive_interval} s): one late keep-alive would look like a failure"
            )
