"""Which part of each tensor a rank holds, and a copy of all of it in host memory.

The state is ``TrainState.snapshot()``, the same description of everything that decides the next update which a newcomer
downloads. DCP's own ``get_state_dict`` steps an optimizer that has no state yet and knows no user state; the snapshot
restores bit by bit. Its tensors are filed where ``get_state_dict`` would have them, so that plain DCP can load model
and optimizer; a sharded one is known by its place in the whole, so that it can be cut differently when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fthsdp.catchup.snapshot import Snapshot
from fthsdp.digest import digest

__all__ = ["Box", "Copied", "HostCopy", "Path", "Shards"]

Path = tuple[str | int, ...]
"""Of a value in a nested state dict."""
_ALIGNMENT = 64
_Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The part of a sharded tensor that one rank holds, in the coordinates of the whole."""

    shape: tuple[int, ...]
    """Of the whole."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    written: bool
    """Whether this rank writes it: of several ranks that hold the same part, one does."""


class Shards:
    """How a model is sharded on this rank."""

    def __init__(self, model: nn.Module) -> None:
        named = chain(model.named_parameters(), model.named_buffers())
        self.boxes = {name: _box(tensor) for name, tensor in named if isinstance(tensor, DTensor)}
        """By name, of the sharded parameters and buffers; sharded optimizer tensors are cut as their parameter is."""

    def places(self, content: _Json) -> dict[int, tuple[Path, Box | None]]:
        """Return the path, and the box if it is sharded, of each model and optimizer tensor of a snapshot."""
        found: dict[int, tuple[Path, Box | None]] = {
            number: (("model", name), self.boxes.get(name)) for name, number in content["model"].items()
        }
        for name, entries in content["optimizer"].items():
            for key, entry in entries.items():
                if "tensor" in entry:
                    box = self.boxes[name] if entry["sharded"] else None
                    found[entry["tensor"]] = (("optim", "state", name, key), box)
        return found


def _box(tensor: DTensor) -> Box:
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    first = all(at == 0 for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())
    empty = math.prod(sizes) == 0 and tensor.numel() > 0
    return Box(shape=tuple(tensor.shape), offsets=tuple(offsets), sizes=tuple(sizes), written=first and not empty)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copied:
    """A rank's whole state in host memory."""

    content: _Json
    """What the tensors mean."""
    tensors: tuple[Tensor, ...]
    shards: Shards

    def digest(self) -> int:
        """Return 64 bits over every bit of every tensor."""
        return digest(self.tensors)

    def common(self) -> str:
        """Return a digest of all that is not sharded: when all ranks have the same, storing it once is enough."""
        sharded = {number for number, (_, box) in self.shards.places(self.content).items() if box is not None}
        plain = [tensor for number, tensor in enumerate(self.tensors) if number not in sharded]
        text = json.dumps([self.content, [list(tensor.shape) for tensor in plain], digest(plain)])
        return hashlib.sha256(text.encode()).hexdigest()


class HostCopy:
    """Host memory for one copy of a rank's state. It is kept: touching fresh memory costs more than the copying."""

    def __init__(self) -> None:
        self._copies: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def take(self, snapshot: Snapshot, shards: Shards) -> Copied:
        """Copy what ``snapshot`` views; complete on return. The copy is good until the next call."""
        tensors = snapshot.tensors
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if [(copy.dtype, copy.shape) for copy in self._copies] != [(tensor.dtype, tensor.shape) for tensor in tensors]:
            self._copies = _allocate(tensors, pinned=bool(devices))
        if tensors:
            torch._foreach_copy_(self._copies, tensors, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return Copied(content=snapshot.meta["content"], tensors=self._copies, shards=shards)


def _allocate(tensors: Sequence[Tensor], *, pinned: bool) -> tuple[Tensor, ...]:
    """Return tensors like the given ones, in one run of host memory."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    places = zip(starts, tensors, strict=True)
    return tuple(memory[start : start + like.nbytes].view(like.dtype).view(like.shape) for start, like in places)
