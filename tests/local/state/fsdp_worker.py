"""One rank of a replica: runs every check below with FSDP2 over gloo and prints what failed, as JSON.

Started by test_fsdp.py as ``python fsdp_worker.py RANK WORLD_SIZE STORE_FILE``; all ranks run the same checks in the
same order.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fthsdp.catchup.snapshot import StripeAssembler, copy_stripe
from fthsdp.errors import ConfigError
from fthsdp.recipes.llama import SIZES, Llama, ModelSize, next_token_loss, shard
from fthsdp.state import TrainState

SAMPLES, MICRO_BATCHES = 4, 3


class Layer(nn.Module):
    def __init__(self, *, unused: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)  # no multiple of the ranks
        self.scale = nn.Parameter(torch.ones(1))  # some ranks have nothing of it
        self.unused = nn.Parameter(torch.full((5,), 2.0)) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


def make_model(seed: int, *, unused: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Layer(unused=unused) for _ in range(4)])


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.2)


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def make_lambda(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))


def make_cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def batch(step: int, rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(SAMPLES, 7, generator=generator)


@dataclass
class Replica:
    """This rank's part of a replica."""

    mesh: DeviceMesh
    make_optimizer: Callable = make_adamw
    make_scheduler: Callable = make_cosine
    seed: int = 0
    clip: float | None = 0.3
    late_sync: bool = True
    unused: bool = True
    log: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = make_model(self.seed, unused=self.unused)
        for layer in self.model:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        optimizer = self.make_optimizer(self.model.parameters())
        self.state = TrainState(
            self.model,
            optimizer,
            scheduler=self.make_scheduler(optimizer),
            clip_grad_norm=self.clip,
            bucket_bytes=200,
        )

    def gradients(self, step: int) -> list[Tensor]:
        self.log.clear()
        buckets: list[Tensor] = []

        def on_ready(number: int, flat: Tensor) -> None:
            self.log.append(number)
            buckets.append(flat)

        for index in range(MICRO_BATCHES):
            last = index == MICRO_BATCHES - 1
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(last or not self.late_sync)
            if last:
                assert self.log == []
                self.state.arm(on_ready)
            (self.model(batch(step, self.mesh.get_local_rank(), index)).square().mean() * SAMPLES).backward()
        self.log.append("backward ended")
        self.state.flush()
        return buckets

    def backward(self, step: int) -> None:
        """Leave the gradients of a step with the parameters."""
        for index in range(MICRO_BATCHES):
            (self.model(batch(step, self.mesh.get_local_rank(), index)).square().mean() * SAMPLES).backward()

    def update(self, reduced: list[Tensor]) -> None:
        norm_squared = torch.tensor(self.state.norm_squared(reduced), dtype=torch.float64)
        dist.all_reduce(norm_squared)
        world_size = self.mesh.size()
        total = world_size * MICRO_BATCHES * SAMPLES
        self.state.update(reduced, scale=world_size / total, norm_squared=norm_squared.item())

    def step(self, step: int) -> None:
        self.update([bucket.clone() for bucket in self.gradients(step)])


def reference_gradients(model: nn.Module, step: int, world_size: int) -> None:
    """Leave the mean gradient over all samples of the step, zeros where unused."""
    for rank in range(world_size):
        for index in range(MICRO_BATCHES):
            (model(batch(step, rank, index)).square().mean() / (MICRO_BATCHES * world_size)).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad


def transfer(source: TrainState, target: TrainState) -> None:
    whole = source.snapshot()
    assembler = StripeAssembler(json.loads(json.dumps(whole.meta)))
    for index in (2, 0, 1):
        part, data = copy_stripe(whole, index, 3)
        assembler.window(part)[:] = data
        assembler.filled(part)
    target.restore(assembler.snapshot())


# --- checks ---------------------------------------------------------------------------------------------------------


def buckets_come_in_order_though_some_parameters_are_unused(mesh: DeviceMesh) -> None:
    replica = Replica(mesh)
    buckets = replica.gradients(0)
    assert tuple(b.numel() for b in buckets) == replica.state.bucket_sizes
    numbers = [entry for entry in replica.log if entry != "backward ended"]
    assert numbers == list(range(len(buckets))), replica.log


def buckets_start_before_backward_ends(mesh: DeviceMesh) -> None:
    replica = Replica(mesh, unused=False)
    replica.gradients(0)
    assert replica.log[-1] == "backward ended", replica.log


def buckets_hold_the_shards_of_the_mean_over_ranks(mesh: DeviceMesh) -> None:
    for late_sync in (True, False):
        replica = Replica(mesh, late_sync=late_sync)
        reduced = torch.cat(replica.gradients(0))
        plain = make_model(0)
        reference_gradients(plain, 0, mesh.size())
        factor = MICRO_BATCHES * SAMPLES  # each loss was multiplied by its samples; ranks are averaged
        gradients = {name: p.grad * factor for name, p in plain.named_parameters()}
        names = [name for name, _ in reversed(list(replica.model.named_parameters()))]
        placements = replica.model[0].scale.placements
        expected = torch.cat([distribute_tensor(gradients[n], mesh, placements).to_local().flatten() for n in names])
        assert torch.allclose(reduced, expected, rtol=1e-5, atol=1e-6), late_sync


def updates_are_those_of_plain_torch_on_one_process(mesh: DeviceMesh) -> None:
    for make_optimizer in (make_adamw, make_sgd):
        replica = Replica(mesh, make_optimizer)
        plain = make_model(0)
        optimizer = make_optimizer(plain.parameters())
        scheduler = make_cosine(optimizer)
        for step in range(4):
            replica.step(step)
            reference_gradients(plain, step, mesh.size())
            nn.utils.clip_grad_norm_(plain.parameters(), replica.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        for (name, ours), (_, theirs) in zip(replica.model.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.allclose(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5), name


def clipping_is_that_of_clip_grad_norm_over_dtensors(mesh: DeviceMesh) -> None:
    ours, theirs = Replica(mesh, make_sgd, clip=0.01), Replica(mesh, make_sgd, clip=0.01)
    for step in range(3):
        ours.step(step)
        theirs.backward(step)
        for p in theirs.model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(MICRO_BATCHES * SAMPLES)
        norm = nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.01)
        assert isinstance(norm, DTensor)
        assert norm.full_tensor() > 0.01
        theirs.state.optimizer.step()
        theirs.state.scheduler.step()
        theirs.state.optimizer.zero_grad()
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        assert torch.allclose(a.to_local(), b.to_local(), rtol=1e-5, atol=1e-6), name


def a_restored_replica_trains_on_bit_by_bit(mesh: DeviceMesh) -> None:
    for make_optimizer, make_scheduler in ((make_adamw, make_lambda), (make_sgd, make_cosine)):
        for steps in (0, 1, 3):
            donor = Replica(mesh, make_optimizer, make_scheduler)
            joiner = Replica(mesh, make_optimizer, make_scheduler, seed=1)
            for step in range(steps):
                donor.step(step)
            transfer(donor.state, joiner.state)
            assert donor.state.digest() == joiner.state.digest()
            for step in range(steps, steps + 3):
                donor.step(step)
                joiner.step(step)
                assert donor.state.digest() == joiner.state.digest(), (make_optimizer, steps, step)
            assert donor.state.optimizer.param_groups[0]["lr"] == joiner.state.optimizer.param_groups[0]["lr"]


def a_shadow_replays_updates_bit_by_bit_without_any_backward(mesh: DeviceMesh) -> None:
    donor, shadow = Replica(mesh), Replica(mesh, seed=1)
    donor.step(0)
    transfer(donor.state, shadow.state)
    kept = []
    for step in (1, 2, 3):
        reduced = [bucket.clone() for bucket in donor.gradients(step)]
        kept.append(reduced)
        donor.update(reduced)
    for reduced in kept:
        shadow.update(reduced)
    assert donor.state.digest() == shadow.state.digest()
    donor.step(4)
    shadow.step(4)
    assert donor.state.digest() == shadow.state.digest()


def restoring_after_a_forward_leaves_nothing_of_the_old_parameters(mesh: DeviceMesh) -> None:
    donor, joiner = Replica(mesh), Replica(mesh, seed=1)
    with torch.no_grad():
        joiner.model(batch(0, 0, 0))  # the root stays unsharded after a forward
    transfer(donor.state, joiner.state)
    with torch.no_grad():
        assert joiner.model(batch(0, 0, 0)).equal(donor.model(batch(0, 0, 0)))


def the_digest_finds_a_flipped_bit_in_each_tensor(mesh: DeviceMesh) -> None:
    replica = Replica(mesh)
    replica.step(0)
    before = replica.state.digest()
    for tensor in replica.state.snapshot().tensors:
        if tensor.numel():
            tensor.view(-1).view(torch.uint8)[-1] ^= 4
            assert replica.state.digest() != before
            tensor.view(-1).view(torch.uint8)[-1] ^= 4
    assert replica.state.digest() == before


def a_model_that_is_not_sharded_is_refused(mesh: DeviceMesh) -> None:
    if mesh.size() == 1:
        return  # the only rank has it all
    model = make_model(0)
    with pytest.raises(ConfigError, match=r"0\.scale is not sharded.*fully_shard\(model, mesh=group\.mesh\)"):
        TrainState(model, make_sgd(model.parameters()))


def the_tiny_llama_learns(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Llama(SIZES[ModelSize.TINY])
    shard(model, mesh)
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=3e-3), clip_grad_norm=1.0)
    windows = torch.arange(2 * 17).view(2, 17) % 256
    losses = []
    for _ in range(5):
        reduced: list[Tensor] = []
        state.arm(lambda _, flat, into=reduced: into.append(flat))
        loss = next_token_loss(model, windows)
        loss.backward()
        state.flush()
        norm_squared = torch.tensor(state.norm_squared(reduced), dtype=torch.float64)
        dist.all_reduce(norm_squared)
        state.update(reduced, scale=1.0, norm_squared=norm_squared.item())
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, losses


CHECKS = [
    buckets_come_in_order_though_some_parameters_are_unused,
    buckets_start_before_backward_ends,
    buckets_hold_the_shards_of_the_mean_over_ranks,
    updates_are_those_of_plain_torch_on_one_process,
    clipping_is_that_of_clip_grad_norm_over_dtensors,
    a_restored_replica_trains_on_bit_by_bit,
    a_shadow_replays_updates_bit_by_bit_without_any_backward,
    restoring_after_a_forward_leaves_nothing_of_the_old_parameters,
    the_digest_finds_a_flipped_bit_in_each_tensor,
    a_model_that_is_not_sharded_is_refused,
    the_tiny_llama_learns,
]


def main(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    failed = {}
    for check in CHECKS:
        try:
            check(mesh)
        except Exception:  # the other checks still have something to say
            failed[check.__name__] = traceback.format_exc()
    print(json.dumps(failed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
