"""A rank of the recipe's training under fthsdp, everything on: ``python -m tests.bench.worker_recipe``."""

from __future__ import annotations

import torch
from tests.bench import recipe

import fthsdp
from fthsdp.recipes.llama import next_token_loss

__all__: list[str] = []


def main() -> None:
    """Train a block of steps for each line of input."""
    torch.set_num_threads(1)
    data = recipe.dataset()
    with fthsdp.replica_group() as group:
        model, optimizer, scheduler = recipe.training(group.mesh)
        state = fthsdp.TrainState(model, optimizer, scheduler=scheduler, clip_grad_norm=recipe.CLIP)
        gates = recipe.gates()
        steps = group.steps(state, until=1_000_000, batch_size=recipe.BATCH, micro_batch_size=recipe.MICRO_BATCH)
        for step in steps:
            next(gates)
            for windows in step.batches(data):
                step.backward(next_token_loss(model, windows))


if __name__ == "__main__":
    main()
