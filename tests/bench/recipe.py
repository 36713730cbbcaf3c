"""The recipe's model and data in real training, for us and for plain HSDP alike, a block of steps at a time.

Both jobs live side by side and take turns: the one whose turn it is not waits for a line on its standard input, so that
whatever the machine does besides hits both. The first line is a block that does not count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
from tests.bench.workload import emit
from torch.distributed.device_mesh import DeviceMesh

from fthsdp.data.text import TextDataset
from fthsdp.recipes.llama import SIZES, Llama, ModelSize, shard

__all__ = ["BATCH", "LENGTH", "MICRO_BATCH", "RANKS", "REPLICAS", "dataset", "gates", "training"]

REPLICAS, RANKS = 2, 2
MODEL = ModelSize.SMALL
BATCH, MICRO_BATCH = 4, 2
"""Samples of a replica in a step, and of a rank at once."""
LENGTH = 64
"""Bytes of a sample."""
CLIP = 1.0


def dataset() -> TextDataset:
    """Return the recipe's default text."""
    return TextDataset(None, length=LENGTH)


def training(
    mesh: DeviceMesh,
) -> tuple[Llama, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return model, optimizer and scheduler as the recipe has them."""
    torch.manual_seed(0)
    model = Llama(SIZES[MODEL])
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 1000))


def gates() -> Iterator[None]:
    """Yield once before each step, which may then begin; a line of input allows as many steps as it says."""
    emit("ready")
    for line in sys.stdin:
        began, busy = time.monotonic(), time.process_time()
        for _ in range(int(line)):
            yield
        emit("block", began=began, busy=time.process_time() - busy)
