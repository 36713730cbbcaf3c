"""Whatever decides an update is part of the state, and the same in all replicas; what cannot be is named."""

import pytest
import torch
from torch import nn

from fthsdp.errors import ConfigError
from fthsdp.state import TrainState


class Coarse(torch.optim.Optimizer):
    """SGD that rounds at random, as optimizers with bf16 weights do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.rand_like(parameter) * 1e-3
                parameter.sub_(parameter.grad * group["lr"] + noise)


class Averaged(nn.Module):
    """A weight and its average over the updates, which a hook of the optimizer keeps."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("average", torch.zeros(4))

    def average_in(self, *_):
        with torch.no_grad():
            self.average.lerp_(self.weight, 0.1)


class Counting(nn.Module):
    """Its forward changes a buffer."""

    def __init__(self, persistent):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()), persistent=persistent)

    def forward(self):
        self.count += 1
        return self.weight.sum()


class Extra(nn.Module):
    """Has state that is neither parameter nor buffer."""

    def __init__(self, value):
        super().__init__()
        self.weight, self.value = nn.Parameter(torch.ones(4)), value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        self.value = value


def sgd(model, **options):
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def update(state, gradient=1.0):
    reduced = [torch.full((size,), gradient) for size in state.bucket_sizes]
    state.update(reduced, scale=1.0, norm_squared=state.norm_squared(reduced))


def test_an_optimizer_that_rounds_at_random_does_the_same_in_all_replicas(transfer):
    models = [nn.Linear(3, 2) for _ in range(2)]
    donor, joiner = (TrainState(model, Coarse(model.parameters())) for model in models)
    update(donor)
    transfer(donor, joiner)
    drawn = []
    for number in range(3):
        for seed, state in enumerate((donor, joiner)):
            torch.manual_seed(100 * number + seed)  # each replica drew its own numbers in its forward
            update(state)
        assert donor.digest() == joiner.digest()
        drawn.append(models[0].weight.clone())
    assert not torch.equal(drawn[0] - drawn[1], drawn[1] - drawn[2])


def test_an_average_of_the_weights_kept_by_a_hook_is_replayed(transfer):
    models = [Averaged() for _ in range(2)]
    states = [sgd(model) for model in models]
    for model, state in zip(models, states, strict=True):
        state.optimizer.register_step_post_hook(model.average_in)
    update(states[0])
    transfer(*states)
    for state in states:
        update(state)
    assert models[0].average.equal(models[1].average)
    assert states[0].digest() == states[1].digest()


def test_a_buffer_that_a_forward_changes_is_named():
    model = Counting(persistent=True)
    state = sgd(model)
    state.digest()  # the run begins
    model().backward()
    with pytest.raises(ConfigError, match="a forward changed the buffer count: replicas see different samples"):
        update(state)


def test_a_buffer_may_be_loaded_before_the_run_begins_and_changed_when_it_is_not_kept():
    model = Averaged()
    state = sgd(model)
    model.load_state_dict({"weight": torch.zeros(4), "average": torch.ones(4)})
    update(state)
    changing = Counting(persistent=False)
    state = sgd(changing)
    state.digest()
    changing().backward()
    update(state)


def test_extra_state_of_modules_travels(transfer):
    donor, joiner = (Extra({"amax": torch.ones(2), "steps": 3}), Extra({"amax": torch.zeros(2), "steps": 0}))
    transfer(sgd(donor), sgd(joiner))
    assert joiner.value["amax"].equal(torch.ones(2))
    assert joiner.value["steps"] == 3


def test_extra_state_that_cannot_travel_is_named_at_once():
    with pytest.raises(ConfigError, match=r"the model's extra state\[''\] is a object"):
        sgd(Extra(object()))


def test_the_number_of_updates_travels(transfer):
    states = [sgd(nn.Linear(2, 2)) for _ in range(2)]
    for _ in range(3):
        update(states[0])
    transfer(*states)
    assert states[1].updates == 3


# --- the scale of the loss --------------------------------------------------------------------------------------------


def scaler(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 2, **options})


def scaled_step(state, loss=1.0):
    """Run a step in which the loss is the sum of the weights, times ``loss``."""
    flat = []
    state.arm(lambda _, bucket: flat.append(bucket))
    state.scaled(sum(p.sum() for p in state.model.parameters()) * loss).backward()
    state.flush()
    state.update(flat, scale=1.0, norm_squared=state.norm_squared(flat))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_scale_of_the_loss_changes_no_update(clip):
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, given in zip(models, (scaler(), None), strict=True):
        scaled_step(sgd(model, scaler=given, clip_grad_norm=clip))
    assert torch.allclose(models[0].weight, models[1].weight)


def test_the_scale_moves_as_torch_moves_it():
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    ours, theirs = scaler(), scaler()
    state, optimizer = sgd(model, scaler=ours), torch.optim.SGD(reference.parameters(), lr=0.1)
    for loss in (1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0):
        scaled_step(state, loss)
        theirs.scale(sum(p.sum() for p in reference.parameters()) * loss).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.state_dict() == theirs.state_dict()


def test_gradients_that_overflowed_change_nothing_but_the_scale():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainState(model, optimizer, scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), scaler=scaler())
    before = [p.clone() for p in model.parameters()]
    scaled_step(state, float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert (state.scaler.get_scale(), state.scheduler.last_epoch, state.updates) == (4.0, 0, 1)


def test_the_scale_travels_and_counts_in_the_digest(transfer):
    models = [nn.Linear(3, 2) for _ in range(2)]
    donor, joiner = (sgd(model, scaler=scaler()) for model in models)
    scaled_step(donor)
    scaled_step(donor, float("inf"))
    transfer(donor, joiner)
    assert donor.digest() == joiner.digest()
    joiner.scaler.load_state_dict(joiner.scaler.state_dict() | {"scale": 2.0})
    assert donor.digest() != joiner.digest()


def test_a_scaler_that_only_some_replicas_have_is_refused():
    with pytest.raises(ConfigError, match="only some replicas have a scheduler, a scaler"):
        sgd(nn.Linear(2, 2)).restore(sgd(nn.Linear(2, 2), scaler=scaler()).snapshot())


def test_a_scaler_that_is_switched_off_does_nothing(transfer):
    models = [nn.Linear(3, 2) for _ in range(2)]
    states = [sgd(model, scaler=scaler(enabled=False)) for model in models]
    scaled_step(states[0])
    transfer(*states)
    assert states[0].digest() == states[1].digest()
