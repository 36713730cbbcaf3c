"""The gradients of one rank as flat fp32 buckets, in an order that is the same in all replicas.

Buckets begin with the last parameters, whose gradients backward finishes first, and are handed over in order as soon as
they are complete, so that the exchange across replicas runs while backward goes on. What was handed over lies nowhere
else: ``grad`` of its parameters is None from then on, so that the rest of backward finds that memory again. New memory
for as many bytes costs more than what is done with them; for the same reason the update uses the buckets again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fthsdp.errors import ConfigError

__all__ = ["Buckets", "OnReady", "Slot", "deal", "local", "sum_of_squares"]

OnReady = Callable[[int, Tensor], None]
"""Called with the number of a bucket and its flat fp32 gradients, which stay unchanged until the next update."""


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, as a view."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where the gradient of one parameter lies."""

    name: str
    parameter: nn.Parameter
    bucket: int | None
    """None: this rank holds no element of it."""
    start: int
    size: int
    copies: int
    """Ranks of this replica that hold the same elements."""

    def part(self, buckets: Sequence[Tensor]) -> Tensor:
        """Return this parameter's elements of the flat buckets."""
        assert self.bucket is not None
        return buckets[self.bucket][self.start : self.start + self.size]


class Buckets:
    """Collects gradients into flat buckets and hands these over in order."""

    def __init__(self, slots: Sequence[Slot], sizes: Sequence[int]) -> None:
        self._slots = [slot for slot in slots if slot.bucket is not None]
        self._dealt = [[slot for slot in self._slots if slot.bucket == number] for number in range(len(sizes))]
        self._sizes = sizes
        self._flat: list[Tensor] = []
        self._missing: list[set[str]] = []
        self._next = len(sizes)
        self._on_ready: OnReady | None = None
        for slot in self._slots:
            slot.parameter.register_post_accumulate_grad_hook(partial(self._accumulated, slot))  # type: ignore[no-untyped-call]

    def arm(self, on_ready: OnReady) -> None:
        """Take the gradients of the next backward as final, and hand the buckets over."""
        self._make_flat()
        self._missing = [{slot.name for slot in dealt} for dealt in self._dealt]
        self._next = 0
        self._on_ready = on_ready

    def memory(self, slot: Slot) -> Tensor | None:
        """Return where a gradient lies in its bucket, shaped like what this rank holds of the parameter.

        Whoever writes there overwrites what was handed over. None for a parameter that is not like its bucket (fp32,
        contiguous): its gradient needs memory of its own.
        """
        held = local(slot.parameter)
        if slot.bucket is None or held.dtype != torch.float32 or not held.is_contiguous():
            return None
        self._make_flat()
        return slot.part(self._flat).view(held.shape)

    def leave_what_is_kept(self) -> None:
        """After an update: take new memory in place of what somebody keeps, such as an optimizer the last gradient."""
        self._flat = [torch.empty_like(flat) if _is_kept(flat) else flat for flat in self._flat]

    def _make_flat(self) -> None:
        if not self._flat:
            self._flat = [
                torch.empty(size, dtype=torch.float32, device=local(dealt[0].parameter).device)
                for size, dealt in zip(self._sizes, self._dealt, strict=True)
            ]

    def _accumulated(self, slot: Slot, _: Tensor) -> None:
        if self._on_ready is not None:
            self._take(slot)

    @torch.no_grad()
    def _take(self, slot: Slot) -> None:
        """Copy one gradient, and hand over what is complete."""
        assert slot.bucket is not None
        if slot.bucket < self._next:
            raise ConfigError(
                f"{slot.name} got another gradient after its final one was handed over:"
                " in the last micro-batch call backward once, and use no module in two re-entrant checkpoints"
            )
        gradient = slot.parameter.grad
        part = slot.part(self._flat)
        part.zero_() if gradient is None else part.copy_(local(gradient).reshape(-1))
        self._missing[slot.bucket].discard(slot.name)
        self._hand_over()

    def _hand_over(self) -> None:
        assert self._on_ready is not None
        while self._next < len(self._sizes) and not self._missing[self._next]:
            number, self._next = self._next, self._next + 1
            for slot in self._dealt[number]:
                slot.parameter.grad = None
            self._on_ready(number, self._flat[number])

    def flush(self) -> None:
        """Take what did not come in the last backward: an earlier micro-batch's gradient, or none."""
        assert self._on_ready is not None, "arm comes before flush"
        for slot in self._slots:
            if slot.bucket is not None and slot.name in self._missing[slot.bucket]:
                self._take(slot)
        self._on_ready = None


def deal(trained: Sequence[tuple[str, nn.Parameter]], capacity: int) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    """Deal the parameters, last first, into buckets of one device and ``capacity`` elements (or one parameter)."""
    slots: list[Slot] = []
    sizes: list[int] = []
    device = None
    for name, parameter in reversed(trained):
        held = local(parameter)
        size = held.numel()
        if size and (not sizes or sizes[-1] + size > capacity or held.device != device):
            sizes.append(0)
            device = held.device
        bucket, start = (len(sizes) - 1, sizes[-1]) if size else (None, 0)
        copies = _copies(parameter)
        slots.append(Slot(name=name, parameter=parameter, bucket=bucket, start=start, size=size, copies=copies))
        if size:
            sizes[-1] += size
    return tuple(slots), tuple(sizes)


def _copies(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements
    return math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if isinstance(placement, Replicate))


def _is_kept(flat: Tensor) -> bool:
    """Whether another tensor has the same memory."""
    storage = flat.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # of these two


_ROW = 1024


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum in fp32 inside rows and in float64 over them: as fast as fp32, and exact to about 7 digits at any length."""
    whole = flat.numel() // _ROW * _ROW
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double()
    return rows.square().sum() + flat[whole:].double().square().sum()
