import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from fthsdp.catchup.snapshot import StripeAssembler, copy_stripe
from fthsdp.state import TrainState

torch.set_num_threads(1)


class Model(nn.Module):
    """Parameters of several dtypes, a buffer, a tied weight, one that only some batches use and one that none does."""

    def __init__(self, coarse: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.coarse = nn.Linear(16, 16).to(coarse)
        self.last = nn.Linear(16, 16)
        self.tied = self.last
        self.sometimes = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.full((5,), 2.0))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor, *, use: bool) -> torch.Tensor:
        x = self.norm(self.first(x) + self.table.sum())
        x = self.tied(self.last(x) + self.coarse(x.to(self.coarse.weight.dtype)).float())
        return x.square().mean() + (self.sometimes.sum() * x.mean() if use else 0.0)


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adamw-amsgrad-foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, foreach=True),
    "adamw-tensor-lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "sgd-momentum-dampening": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, dampening=0.3),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}
SCHEDULERS = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
    "multistep": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4, 6]),
    "onecycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "warmup-then-cosine": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        ],
        milestones=[3],
    ),
}


class Counter:
    """User state."""

    def __init__(self) -> None:
        self.seen, self.average = 0, torch.zeros(2)

    def state_dict(self):
        return {"seen": self.seen, "average": self.average}

    def load_state_dict(self, state) -> None:
        self.seen, self.average = state["seen"], state["average"]


@dataclass
class Job:
    """One replica of one rank."""

    state: TrainState
    losses: list[float] = field(default_factory=list)

    def gradients(self, step: int, *, micro_batches: int = 3) -> list[torch.Tensor]:
        """Run forward and backward of a step and return the buckets in the order in which they came."""
        generator = torch.Generator().manual_seed(step)
        buckets: list[torch.Tensor] = []

        def on_ready(number: int, flat: torch.Tensor) -> None:
            assert number == len(buckets)
            buckets.append(flat)

        for index in range(micro_batches):
            if index == micro_batches - 1:
                self.state.arm(on_ready)
            loss = self.state.model(torch.randn(4, 8, generator=generator), use=index == 0)
            (loss * 4).backward()
            self.losses.append(loss.item())
        self.state.flush()
        return buckets

    def step(self, step: int) -> None:
        reduced = [bucket.clone() for bucket in self.gradients(step)]
        self.state.update(reduced, scale=1 / 12, norm_squared=self.state.norm_squared(reduced))


def make(
    optimizer="adamw", scheduler="cosine", *, seed=0, clip=0.5, user=None, bucket_bytes=600, coarse=torch.bfloat16
) -> Job:
    torch.manual_seed(seed)
    model = Model(coarse)
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    made = OPTIMIZERS[optimizer]([{"params": matrices}, {"params": plain, "weight_decay": 0.0}])
    with warnings.catch_warnings():  # SequentialLR steps its parts before any optimizer step
        warnings.simplefilter("ignore")
        made_scheduler = SCHEDULERS[scheduler](made)
    return Job(
        TrainState(model, made, scheduler=made_scheduler, clip_grad_norm=clip, user=user, bucket_bytes=bucket_bytes)
    )


def transfer(source: TrainState, target: TrainState, donors: int = 3) -> None:
    """Send a state in stripes, as to a joiner."""
    whole = source.snapshot()
    assembler = StripeAssembler(whole.meta)
    for index in range(donors):
        part, data = copy_stripe(whole, index, donors)
        assembler.window(part)[:] = data
        assembler.filled(part)
    target.restore(assembler.snapshot())


@pytest.fixture(name="make")
def make_fixture():
    return make


@pytest.fixture(name="transfer")
def transfer_fixture():
    return transfer


@pytest.fixture(name="counter")
def counter_fixture():
    return Counter


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request):
    return request.param


@pytest.fixture(params=SCHEDULERS)
def scheduler(request):
    return request.param
