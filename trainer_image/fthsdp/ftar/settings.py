"""What can be set about the transport across replicas, and the rules that the values keep among themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fthsdp.errors import ConfigError

__all__ = ["FtarSettings", "WireDtype"]

_LARGEST_CHUNK = 1 << 30
_MOST_STREAMS = 16


class WireDtype(StrEnum):
    """How a number travels. Sums are built in float32 whatever it is."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def item_bytes(self) -> int:
        """Bytes of a number on the wire."""
        return 4 if self is WireDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FtarSettings:
    """Settings of an Engine; raises ConfigError when they break a rule. All members of a job use the same."""

    chunk_bytes: int = 2 << 20
    """Bytes, 2 MiB: largest piece that travels as one frame. Smaller ones cost more turns of the progress loop, larger
    ones let the neighbour wait longer for what it may send on. A frame once begun is finished before a keep-alive can
    follow it, so on the slowest link that is to be used it must take well below ``silence_timeout``."""
    window: int = 16
    """Frames of ``chunk_bytes``, 16: what a receiver lets its neighbour send ahead, over all streams. Times
    ``chunk_bytes`` it bounds what is under way between two neighbours (32 MiB); it should be above bandwidth times
    round trip (25 GB/s over 1 ms are 25 MB)."""
    streams: int = 1
    """Connections to each neighbour, 1: chunks are dealt over them in turn. One fills a loopback or a short link; more
    help where the network gives a share to each connection, or one of them cannot fill a long fat link."""
    wire_dtype: WireDtype = WireDtype.FLOAT32
    """How numbers travel, float32: with bfloat16 or float16 half the bytes do, and each partial sum is rounded before
    it is sent. All members still end with the same bits."""
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
        if not 1 <= self.streams <= _MOST_STREAMS:
            raise ConfigError(f"streams is {self.streams}: it has to be from 1 to {_MOST_STREAMS}")
        if self.window < self.streams:
            raise ConfigError(
                f"window ({self.window}) is below streams ({self.streams}): each stream needs a chunk under way"
            )
        if self.wire_dtype not in list(WireDtype):
            raise ConfigError(f"wire_dtype is {self.wire_dtype!r}: it has to be one of {', '.join(WireDtype)}")
        object.__setattr__(self, "wire_dtype", WireDtype(self.wire_dtype))
        for name in ("keepalive_interval", "silence_timeout", "connect_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}: it has to be a positive number of seconds")
        if self.silence_timeout < 3 * self.keepalive_interval:
            raise ConfigError(
                f"silence_timeout ({self.silence_timeout} s) is below three times keepalive_interval"
                f" ({self.keepalive_interval} s): one late keep-alive would look like a failure"
            )

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> FtarSettings:
        """Read what is set, leave the rest at its default; raises ConfigError that names the variable."""
        given = {field: _parse(env, name, kind) for name, (field, kind) in _VARIABLES.items() if env.get(name)}
        try:
            return cls(**given)
        except ConfigError as error:
            named = ", ".join(name for name in _VARIABLES if env.get(name))
            raise ConfigError(f"{error} (from {named})") from error


_VARIABLES: dict[str, tuple[str, type]] = {
    "FTHSDP_FTAR_CHUNK_BYTES": ("chunk_bytes", int),
    "FTHSDP_FTAR_WINDOW": ("window", int),
    "FTHSDP_FTAR_STREAMS": ("streams", int),
    "FTHSDP_FTAR_WIRE_DTYPE": ("wire_dtype", WireDtype),
    "FTHSDP_KEEPALIVE_INTERVAL": ("keepalive_interval", float),
    "FTHSDP_SILENCE_TIMEOUT": ("silence_timeout", float),
    "FTHSDP_CONNECT_TIMEOUT": ("connect_timeout", float),
}
"""Environment variable, and the field and type that it sets."""
_WANTED = {int: "a whole number", float: "a number of seconds", WireDtype: f"one of {', '.join(WireDtype)}"}


def _parse(env: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        return kind(env[name])
    except ValueError as error:
        raise ConfigError(f"{name}={env[name]!r} is not {_WANTED[kind]}") from error
