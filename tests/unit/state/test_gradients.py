from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from fthsdp.errors import ConfigError
from fthsdp.state import TrainState


def test_buckets_come_in_order_and_have_the_announced_sizes(make):
    job = make()
    assert len(job.state.bucket_sizes) > 3
    buckets = job.gradients(0)
    assert tuple(bucket.numel() for bucket in buckets) == job.state.bucket_sizes
    assert {bucket.dtype for bucket in buckets} == {torch.float32}


def test_buckets_hold_each_parameter_once_and_no_more_than_their_size_says(make):
    job = make(bucket_bytes=600)
    total = sum(p.numel() for p in job.state.model.parameters() if p.requires_grad)
    assert sum(job.state.bucket_sizes) == total
    assert all(size <= 150 or size == 256 or size == 128 for size in job.state.bucket_sizes)


def test_some_buckets_are_ready_before_backward_ends():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1), bucket_bytes=80)
    events: list[object] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    state.arm(lambda number, _: events.append(number))
    model(torch.ones(1, 4)).sum().backward()
    assert events[:3] == [0, 1, 2]
    assert "first layer" in events
    state.flush()
    assert [event for event in events if event != "first layer"] == [0, 1, 2, 3]


def test_only_the_armed_micro_batch_hands_anything_over(make):
    job = make()
    x = torch.ones(4, 8)
    job.state.model(x, use=True).backward()  # not armed
    handed: list[int] = []
    job.state.arm(lambda number, _: handed.append(number))
    assert handed == []
    job.state.model(x, use=True).backward()
    job.state.flush()
    assert handed == list(range(len(job.state.bucket_sizes)))


def test_gradients_are_summed_over_micro_batches(make):
    job, reference = make(), make()
    buckets = job.gradients(4, micro_batches=3)
    generator = torch.Generator().manual_seed(4)
    for index in range(3):
        (reference.state.model(torch.randn(4, 8, generator=generator), use=index == 0) * 4).backward()
    expected = [
        torch.zeros(p.numel()) if p.grad is None else p.grad.float().flatten()
        for _, p in reversed(list(reference.state.model.named_parameters()))
        if p.requires_grad
    ]
    assert torch.cat(buckets).equal(torch.cat(expected))


def test_a_parameter_that_only_an_earlier_micro_batch_used_keeps_that_gradient(make):
    job, reference = make(), make()
    job.gradients(0, micro_batches=2)
    generator = torch.Generator().manual_seed(0)
    (reference.state.model(torch.randn(4, 8, generator=generator), use=True) * 4).backward()
    slot = next(slot for slot in job.state._slots if slot.name == "sometimes")
    assert slot.part(job.state._buckets._flat).equal(reference.state.model.sometimes.grad)
    assert reference.state.model.sometimes.grad.abs().sum() > 0


def test_what_was_handed_over_lies_nowhere_else(make):
    job = make()
    x = torch.ones(4, 8)
    job.state.model(x, use=True).backward()
    assert job.state.model.sometimes.grad is not None
    job.state.arm(lambda number, flat: None)
    job.state.model(x, use=False).backward()
    job.state.flush()
    assert all(p.grad is None for p in job.state.model.parameters())


class _Remembering(torch.optim.Optimizer):
    """Keeps the last gradient itself, as diffGrad does, or a part of its memory."""

    def __init__(self, parameters: Iterable[nn.Parameter], keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._keep = keep

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * parameter.grad)
            self.state[parameter]["last"] = self._keep(parameter.grad)


@pytest.mark.parametrize("keep", [lambda gradient: gradient, lambda gradient: gradient.data.view(-1)[:1]])
def test_a_gradient_that_an_optimizer_keeps_stays_as_it_is(keep):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    state = TrainState(model, _Remembering(model.parameters(), keep))
    for step in range(3):
        buckets: list[torch.Tensor] = []
        before = state.digest()
        state.arm(lambda _, flat, buckets=buckets: buckets.append(flat))
        model(torch.full((2, 3), float(step + 1))).sum().backward()
        state.flush()
        assert state.digest() == before
        state.update([bucket.clone() for bucket in buckets], scale=1.0, norm_squared=1.0)


@pytest.mark.parametrize("coarse", [torch.float32, torch.bfloat16])
def test_updates_take_no_memory_that_backward_gave_back(make, coarse):
    job = make("sgd", coarse=coarse)
    memory: dict[torch.Tensor, set[int]] = {}

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.dtype == torch.float32):
            memory.setdefault(p, set()).add(p.grad.untyped_storage().data_ptr())

    job.state.optimizer.register_step_pre_hook(look)
    for step in range(3):
        buckets = job.gradients(step)
        reduced = [bucket.clone() for bucket in buckets]
        job.state.update(reduced, scale=0.1, norm_squared=job.state.norm_squared(reduced))
    theirs = {bucket.untyped_storage().data_ptr() for bucket in buckets}
    assert all(places <= theirs and len(places) == 1 for places in memory.values())


def test_unused_parameters_have_gradient_zero(make):
    job = make()
    job.gradients(0)
    job.gradients(1)
    slot = next(slot for slot in job.state._slots if slot.name == "never")
    assert slot.part(job.state._buckets._flat).equal(torch.zeros(5))


def test_what_was_handed_over_is_not_what_the_next_backward_writes_to(make):
    job = make()
    buckets = job.gradients(0)
    copies = [bucket.clone() for bucket in buckets]
    job.state.model(torch.ones(4, 8), use=True).backward()
    assert all(bucket.equal(copy) for bucket, copy in zip(buckets, copies, strict=True))


def test_a_second_backward_after_arming_is_refused_by_name(make):
    job = make()
    job.state.arm(lambda number, flat: None)
    job.state.model(torch.ones(4, 8), use=True).backward()
    with pytest.raises(ConfigError, match="got another gradient after its final one was handed over"):
        job.state.model(torch.ones(4, 8), use=True).backward()


def test_the_norm_is_that_of_all_gradients(make):
    job = make()
    buckets = job.gradients(0)
    expected = torch.cat(buckets).double().square().sum().item()
    assert job.state.norm_squared(buckets) == pytest.approx(expected, rel=1e-6)


def test_the_norm_is_exact_for_long_buckets():
    model = nn.Linear(3000, 401, bias=False)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1))
    flat = torch.randn(state.bucket_sizes[0])
    assert state.norm_squared([flat]) == pytest.approx(flat.double().square().sum().item(), rel=3e-7)


def test_update_leaves_the_reduced_gradients_as_they_are(make):
    job = make()
    reduced = [bucket.clone() for bucket in job.gradients(0)]
    copies = [bucket.clone() for bucket in reduced]
    job.state.update(reduced, scale=0.1, norm_squared=job.state.norm_squared(reduced))
    assert all(a.equal(b) for a, b in zip(reduced, copies, strict=True))
    assert all(p.grad is None for p in job.state.model.parameters())
