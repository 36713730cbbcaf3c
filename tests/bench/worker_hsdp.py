"""A rank of the recipe's training under plain HSDP: FSDP2 over a two-dimensional mesh, gloo, no fault tolerance."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.bench import recipe
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import default_collate

from fthsdp.data.sampler import order
from fthsdp.recipes.llama import next_token_loss

__all__: list[str] = []


def main() -> None:
    """Train a block of steps for each line of input."""
    torch.set_num_threads(1)
    data = recipe.dataset()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (recipe.REPLICAS, recipe.RANKS), mesh_dim_names=("replicate", "shard"))
    model, optimizer, scheduler = recipe.training(mesh)
    share = recipe.BATCH // recipe.RANKS
    first = dist.get_rank() * share
    for _ in recipe.gates():
        for at in range(0, share, recipe.MICRO_BATCH):
            numbers = range(first + at, first + at + recipe.MICRO_BATCH)
            windows = default_collate([data[order(number, len(data), 0)] for number in numbers])
            # Gradients stay inside the replica until the step's last micro-batch, as with us.
            model.set_requires_all_reduce(at + recipe.MICRO_BATCH >= share)  # type: ignore[operator]
            (next_token_loss(model, windows) * recipe.MICRO_BATCH / share).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        first += recipe.REPLICAS * recipe.BATCH


if __name__ == "__main__":
    main()
