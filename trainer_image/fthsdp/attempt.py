"""One attempt after another to reduce the gradients of one step along this rank's rail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from fthsdp.coordinator.messages import Assigned
from fthsdp.errors import RingBroken
from fthsdp.ftar import Engine, Work
from fthsdp.protocol.header import Header
from fthsdp.protocol.requests import Reduced

__all__ = ["Attempt", "BufferPool"]

_POLL = 0.02
"""Seconds between looks for something to do while the ring works."""


class BufferPool:
    """Flat buffers for reduced gradients, used again once the step after next is prepared."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._free: list[list[torch.Tensor]] = []
        self.zeros = [torch.zeros(n, dtype=torch.float32) for n in sizes]
        """What a member contributes that has nothing to contribute."""

    def take(self) -> list[torch.Tensor]:
        """Return one buffer per bucket; what is in them is undefined."""
        # Written to here: else new memory becomes real while the ring fills it, and all members wait for that.
        return self._free.pop() if self._free else [torch.empty(n, dtype=torch.float32).zero_() for n in self.sizes]

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Let these buffers be used again."""
        if tuple(b.numel() for b in buffers) == self.sizes:
            self._free.append(list(buffers))


@dataclass(frozen=True, slots=True)
class _Submitted:
    """What is under way in one ring."""

    buckets: list[Work[None]]
    header: Work[list[bytes]]


class Attempt:
    """The local gradients of one step and what the rings make of them.

    The gradients handed over stay untouched, so that a broken ring costs a new exchange and no new computation. Buckets
    go on their way while the backward pass still runs; ``close`` adds the header and says that nothing more will come.
    """

    def __init__(self, engine: Engine, pool: BufferPool, *, step: int, shadow: bool = False) -> None:
        self.step = step
        self.shadow = shadow
        self._engine = engine
        self._pool = pool
        self._sources: list[torch.Tensor] = []
        self._buckets: list[Work[None]] = []
        self._before: list[torch.Tensor] = []
        """What was at hand when the attempt was reopened: added to what comes now."""
        self._header: Header | None = None
        self._submitted: _Submitted | None = None
        self.reduced = pool.take()

    def give(self, bucket: int, source: torch.Tensor) -> None:
        """Hand over the local gradients of the next bucket (flat fp32, left as it is until the step is committed)."""
        assert bucket == len(self._buckets), f"bucket {bucket} after {len(self._buckets) - 1}"
        if bucket < len(self._before):
            source = source + self._before[bucket]
        self._sources.append(source)
        self._buckets.append(self._reduce(bucket))

    def close(self, header: Header) -> None:
        """Fill up with zeros what was not handed over, and send the header."""
        for bucket in range(len(self._buckets), len(self._pool.sizes)):
            self.give(bucket, self._pool.zeros[bucket])
        self._header = header
        self._submitted = _Submitted(self._buckets, self._gather(header))

    def again(self, heard: int) -> None:
        """Submit the same gradients to the ring that is active now."""
        assert self._header is not None
        self._header = replace(self._header, heard=heard)
        buckets = [self._reduce(bucket) for bucket in range(len(self._sources))]
        self._submitted = _Submitted(buckets, self._gather(self._header))

    def reopen(self) -> None:
        """Take further gradients of the same step, to be added to those at hand."""
        # The next backward fills the buffers that it handed over in the last one.
        self._before = [source.clone() for source in self._sources]
        self._sources, self._buckets, self._submitted = [], [], None

    def result(self, assigned: Assigned, idle: Callable[[], bool] | None = None) -> Reduced | None:
        """Wait for the ring and return what it made of the step, or None when it broke.

        ``idle`` is called while the ring works; it returns whether it found something to do.
        """
        assert self._submitted is not None
        while idle is not None and not self._submitted.header.done():
            if not idle():
                with suppress(TimeoutError, RingBroken):
                    self._submitted.header.wait(_POLL)
        try:
            for work in self._submitted.buckets:
                work.wait()
            headers = tuple(self._submitted.header.wait())
        except RingBroken:
            return None
        return Reduced(step=self.step, gradients=self.reduced, headers=headers, assigned=assigned)

    def _reduce(self, bucket: int) -> Work[None]:
        return self._engine.all_reduce(
            step=self.step, bucket=bucket, source=self._sources[bucket], out=self.reduced[bucket]
        )

    def _gather(self, header: Header) -> Work[list[bytes]]:
        return self._engine.all_gather(step=self.step, payload=header.pack())
