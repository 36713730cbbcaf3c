import pytest
import torch
from torch import nn

from fthsdp.errors import ConfigError
from fthsdp.state import TrainState


def reference_step(job, step):
    """The same step as plain torch runs it."""
    model, optimizer = job.state.model, job.state.optimizer
    generator = torch.Generator().manual_seed(step)
    for index in range(3):
        (model(torch.randn(4, 8, generator=generator), use=index == 0) * 4).backward()
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad is not None:
            p.grad /= 12
    if job.state.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), job.state.clip_grad_norm)
    optimizer.step()
    if job.state.scheduler is not None:
        job.state.scheduler.step()
    optimizer.zero_grad()


def assert_close(job, reference):
    for (name, ours), (_, theirs) in zip(
        job.state.model.named_parameters(), reference.state.model.named_parameters(), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_updates_are_those_of_plain_torch(make, optimizer, clip):
    job, reference = (make(optimizer, clip=clip, coarse=torch.float32) for _ in range(2))
    for step in range(4):
        job.step(step)
        reference_step(reference, step)
    assert_close(job, reference)
    assert job.state.optimizer.param_groups[0]["lr"] == reference.state.optimizer.param_groups[0]["lr"]


def test_a_shadow_that_never_ran_backward_updates_like_the_others(make):
    live, shadow = make(), make()
    for step in range(4):
        reduced = [bucket.clone() for bucket in live.gradients(step)]
        norm_squared = live.state.norm_squared(reduced)
        for job in (live, shadow):
            job.state.update(reduced, scale=1 / 12, norm_squared=norm_squared)
        assert live.state.digest() == shadow.state.digest()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm=nan"),
        ({"bucket_bytes": 3}, "bucket_bytes=3"),
    ],
)
def test_options_that_cannot_work_are_named(options, sentence):
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=sentence):
        TrainState(model, torch.optim.SGD(model.parameters(), lr=1), **options)


def refused(model, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(ConfigError) as caught:
        TrainState(model, optimizer, **options)
    return str(caught.value)


def test_running_statistics_are_refused_since_replicas_would_differ():
    assert "1 is a BatchNorm1d with running statistics" in refused(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_batch_norm_without_running_statistics_is_welcome():
    model = nn.BatchNorm1d(2, track_running_stats=False)
    TrainState(model, torch.optim.SGD(model.parameters(), lr=1))


def test_a_model_without_trained_parameters_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    assert "no parameter to train" in refused(model)


def test_parameters_without_memory_are_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert "weight is on the meta device" in refused(model)


def test_complex_parameters_are_refused():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    assert "weight is torch.complex64" in refused(model)


def test_an_optimizer_of_another_model_is_refused():
    other = torch.optim.SGD(nn.Linear(3, 4).parameters(), lr=1)
    assert "parameter 0 of the optimizer, of shape [4, 3], is none of the model's" in refused(nn.Linear(2, 2), other)


def test_a_scheduler_of_another_optimizer_is_refused():
    model = nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=1))
    assert "belongs to another optimizer" in refused(model, scheduler=scheduler)


def test_a_scheduler_that_needs_a_metric_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    assert "needs a metric" in refused(model, optimizer, scheduler=scheduler)


# --- a learning rate for one step -------------------------------------------------------------------------------------


def rates(job):
    return [float(group["lr"]) for group in job.state.optimizer.param_groups]


def update(job, reduced, **options):
    job.state.update(reduced, scale=1 / 12, norm_squared=job.state.norm_squared(reduced), **options)


def test_a_factor_scales_the_learning_rate_of_one_step(make):
    scaled, reference = make("sgd", scheduler="none", clip=None), make("sgd", scheduler="none", clip=None)
    for group in reference.state.optimizer.param_groups:
        group["lr"] *= 0.75
    update(scaled, scaled.gradients(0), lr_factor=0.75)
    update(reference, reference.gradients(0))
    for group in reference.state.optimizer.param_groups:
        group["lr"] = 0.01
    assert scaled.state.digest() == reference.state.digest()
    assert rates(scaled) == [0.01, 0.01]


@pytest.mark.parametrize("kind", ["adamw", "adamw-tensor-lr"])
def test_the_schedule_never_sees_the_factor(make, kind, scheduler):
    scaled, plain = make(kind, scheduler), make(kind, scheduler)
    held = [group["lr"] for group in scaled.state.optimizer.param_groups]
    for step in range(8):
        update(scaled, scaled.gradients(step), lr_factor=1 / 3)
        update(plain, plain.gradients(step))
        assert rates(scaled) == rates(plain)
    if isinstance(held[0], torch.Tensor):
        assert all(group["lr"] is lr for group, lr in zip(scaled.state.optimizer.param_groups, held, strict=True))
    assert scaled.state.digest() != plain.state.digest()


def test_a_replay_with_the_same_factors_has_the_same_bits(make, transfer, optimizer):
    live, joiner = make(optimizer), make(optimizer, seed=1)
    transfer(live.state, joiner.state)
    for step, factor in enumerate([0.75, 1.0, 2 / 3, 0.5]):
        reduced = [bucket.clone() for bucket in live.gradients(step)]
        norm_squared = live.state.norm_squared(reduced)
        for job in (live, joiner):
            job.state.update(reduced, scale=1 / 12, norm_squared=norm_squared, lr_factor=factor)
        assert live.state.digest() == joiner.state.digest()


def test_the_learning_rate_is_restored_when_the_optimizer_fails(make):
    job = make()
    reduced = job.gradients(0)
    job.state.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update(job, reduced, lr_factor=0.5)
    assert rates(job) == [0.01, 0.01]


def test_an_optimizer_without_a_learning_rate_cannot_be_scaled():
    class Sign(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            raise AssertionError("the optimizer was reached")

    model = nn.Linear(2, 2)
    state = TrainState(model, Sign(model.parameters()))
    with pytest.raises(ConfigError, match="Sign has no learning rate 'lr' in its groups"):
        state.update([torch.zeros(6)], scale=1.0, norm_squared=0.0, lr_factor=0.5)
