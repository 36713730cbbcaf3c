import threading

import pytest
import torch
from torch import nn

from fthsdp.catchup.snapshot import Snapshot
from fthsdp.errors import ConfigError, WireError
from fthsdp.state import TrainState


def check_identical_future(ours, theirs, first):
    assert ours.state.digest() == theirs.state.digest()
    for step in range(first, first + 4):
        ours.step(step)
        theirs.step(step)
        assert ours.state.digest() == theirs.state.digest()
        assert ours.losses[-3:] == theirs.losses[-3:]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_restored_replica_trains_on_bit_by_bit(make, transfer, optimizer, steps):
    donor, joiner = make(optimizer), make(optimizer, seed=1)
    for step in range(steps):
        donor.step(step)
    transfer(donor.state, joiner.state)
    check_identical_future(donor, joiner, steps)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_the_learning_rate_goes_on_where_it_was(make, transfer, scheduler, steps):
    donor, joiner = make(scheduler=scheduler), make(scheduler=scheduler, seed=1)
    for step in range(steps):
        donor.step(step)
    transfer(donor.state, joiner.state)
    for step in range(steps, steps + 6):
        donor.step(step)
        joiner.step(step)
        rates = [[group["lr"] for group in job.state.optimizer.param_groups] for job in (donor, joiner)]
        assert rates[0] == rates[1]
        assert donor.state.digest() == joiner.state.digest()


def test_restoring_over_a_state_that_trained_already_leaves_nothing_of_it(make, transfer, optimizer):
    donor, joiner = make(optimizer), make(optimizer, seed=1)
    for step in range(7):
        joiner.step(100 + step)
    transfer(donor.state, joiner.state)
    check_identical_future(donor, joiner, 0)


def test_the_user_state_travels(make, transfer, counter):
    donor, joiner = make(user=counter()), make(user=counter())
    donor.state.user.seen = 3
    donor.state.user.average = torch.tensor([1.0, 2.0])
    transfer(donor.state, joiner.state)
    assert joiner.state.user.seen == 3
    assert joiner.state.user.average.equal(torch.tensor([1.0, 2.0]))


def test_a_restored_state_shares_no_memory_with_the_snapshot(make):
    donor, joiner = make(), make(seed=1)
    donor.step(0)
    snapshot = donor.state.snapshot()
    joiner.state.restore(snapshot)
    before = joiner.state.digest()
    for tensor in snapshot.tensors:
        tensor.zero_()
    assert joiner.state.digest() == before


def test_a_snapshot_holds_views_so_that_only_stripes_are_copied(make):
    job = make()
    snapshot = job.state.snapshot()
    assert snapshot.tensors[0].data_ptr() in {p.data_ptr() for p in job.state.model.parameters()}


def test_the_layout_is_the_same_on_all_replicas(make):
    donors = make(), make()
    for donor in donors:
        donor.step(0)
    assert donors[0].state.snapshot().meta == donors[1].state.snapshot().meta


def test_state_that_cannot_travel_is_named(make, counter):
    user = counter()
    user.seen = object()
    with pytest.raises(ConfigError, match=r"the user state\['seen'\] is a object"):
        make(user=user).state.snapshot()


def linear(width=2, *, sgd=True, scheduler=False, groups=1):
    model = nn.Linear(width, 2)
    parameters = list(model.parameters())
    split = [parameters] if groups == 1 else [[p] for p in parameters]
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind([{"params": part} for part in split], lr=1)
    made = torch.optim.lr_scheduler.ConstantLR(optimizer) if scheduler else None
    return TrainState(model, optimizer, scheduler=made)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"width": 3}, r"weight is float32\[2, 3\] here and float32\[2, 2\] in the other replicas"),
        ({"sgd": False}, "have another optimizer or scheduler"),
        ({"scheduler": True}, "have another optimizer or scheduler"),
        ({"groups": 2}, "optimizer holds other parameters"),
    ],
)
def test_a_state_of_another_script_is_refused_and_nothing_changes(options, sentence):
    state = linear(**options)
    before = state.digest()
    with pytest.raises(ConfigError, match=sentence):
        state.restore(linear().snapshot())
    assert state.digest() == before


@pytest.mark.parametrize(
    "content",
    [None, {}, {"model": 3}, {"model": {"weight": 99}, "optimizer": {}, "groups": [], "scheduler": None, "user": None}],
)
def test_nonsense_is_no_state(content):
    with pytest.raises(WireError, match="does not describe the state of a training job"):
        linear().restore(Snapshot.of(content, []))


def test_the_state_stays_as_it_is_while_somebody_reads_it(make):
    job = make()
    job.step(0)
    before = [tensor.clone() for tensor in job.state.snapshot().tensors]
    snapshot = job.state.snapshot()
    updating, steps, read = threading.Event(), threading.Event(), []
    job.state.optimizer.register_step_pre_hook(lambda *_: steps.set())

    def look():
        assert updating.wait(30)
        assert not steps.wait(0.5)
        read.extend(tensor.clone() for tensor in snapshot.tensors)

    job.state.read_beside(look)
    reduced = [bucket.clone() for bucket in job.gradients(1)]  # a forward and a backward do not wait
    update = threading.Thread(
        target=job.state.update, args=(reduced,), kwargs={"scale": 1 / 12, "norm_squared": 1.0}, daemon=True
    )
    update.start()
    updating.set()
    update.join(30)
    assert not update.is_alive()
    assert job.state.updates == 2
    assert all(a.equal(b) for a, b in zip(before, read, strict=True))


def test_what_a_reader_raises_is_raised_before_the_state_changes(make):
    job = make()
    job.state.read_beside(lambda: 1 / 0)
    before = job.state.digest()
    with pytest.raises(ZeroDivisionError):
        job.step(0)
    assert job.state.digest() == before


def test_user_state_that_changes_between_updates_is_the_same_in_all_stripes(make, counter):
    user = counter()
    job = make(user=user)
    snapshot = job.state.snapshot()
    user.average += 1
    other = make(user=counter(), seed=1)
    other.state.restore(snapshot)
    assert other.state.user.average.equal(torch.zeros(2))
