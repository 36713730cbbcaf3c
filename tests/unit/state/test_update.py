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
        reduced = live.gradients(step)
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
