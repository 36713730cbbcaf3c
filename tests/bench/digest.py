"""What the digest of the state costs, which each rank computes in each step: ``python -m tests.bench.digest``.

It is begun with a step and needed at the end of the backward pass, so what counts is what the step waits for it; what
it takes of a processor stands beside that. One thread, as a rank on a shared machine has. The state is that of AdamW:
twelve bytes for each parameter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from tests.bench.figures import Figure, at_most, table
from tests.bench.plan import FULL, Plan
from tests.bench.workload import Flat
from torch import Tensor, nn

from fthsdp.recipes.llama import SIZES, Llama, LlamaConfig, ModelSize, next_token_loss
from fthsdp.state import TrainState

__all__ = ["digests"]

MEDIUM = LlamaConfig(num_layers=10, width=512, num_heads=8, num_kv_heads=4, hidden_width=1536)
"""32 million parameters."""
SAMPLES, LENGTH = 4, 256
"""A rank's samples in a step, and bytes of each: those of the demo."""
EMULATED = 0.25
"""Seconds of a forward and backward pass on an accelerator, which leaves the processor free."""


def digests(plan: Plan) -> list[Figure]:
    """Return the digest's share of a step of the demo's model, of one of 32 M parameters, and on an accelerator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return list(_figures(plan))
    finally:
        torch.set_num_threads(threads)


def _figures(plan: Plan) -> Iterator[Figure]:
    for config, name in ((SIZES[ModelSize.TINY], "the demo's model"), (MEDIUM, "32 M parameters")):
        trained = _Trained(
            Llama(config), lambda model: next_token_loss(model, torch.randint(256, (SAMPLES, LENGTH + 1)))
        )
        yield _share(plan, trained, f"wait for the digest / step, {name}, {SAMPLES} x {LENGTH} tokens")
    yield _share(plan, _Trained(Flat(32.0), _emulated), f"the same, 32 M parameters, {EMULATED} s of an accelerator")


def _emulated(model: nn.Module) -> Tensor:
    time.sleep(EMULATED)
    loss: Tensor = model(torch.ones(1))
    return loss


class _Trained:
    """A model in one rank."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        torch.manual_seed(0)
        self._model, self._loss = model, loss
        self.state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.megabytes = 3 * sum(parameter.nbytes for parameter in model.parameters()) / 1e6

    def step(self) -> tuple[float, float]:
        """Return the seconds of a step, and how many of them the digest of the state before it took."""
        began = time.perf_counter()
        self.state.begin_digest()
        started = time.perf_counter()
        flat: list[Tensor] = []
        self.state.arm(lambda _, bucket: flat.append(bucket))
        self._loss(self._model).backward()  # type: ignore[no-untyped-call]
        self.state.flush()
        computed = time.perf_counter()
        self.state.digest()
        ready = time.perf_counter()
        self.state.update(flat, scale=1.0, norm_squared=0.0)
        return time.perf_counter() - began, (started - began) + (ready - computed)

    def work(self) -> float:
        """Return the seconds of a processor that a digest takes."""
        began = time.thread_time()
        self.state.digest()
        return time.thread_time() - began


def _share(plan: Plan, trained: _Trained, name: str) -> Figure:
    trained.step()  # makes the optimizer's state
    steps = [trained.step() for _ in range(2 * plan.repetitions + 1)]
    work = statistics.median(trained.work() for _ in steps)
    step = statistics.median(seconds for seconds, _ in steps)
    return Figure(
        name=name,
        unit="%",
        values=tuple(wait / seconds for seconds, wait in steps),
        must=at_most(0.01),
        note=(
            f"{work * 1e3:.2f} ms of a processor for {trained.megabytes:.0f} MB,"
            f" {work / trained.megabytes * 1e3:.3f} ms per MB: {work / step:.1%} of a step of {step:.2f} s"
        ),
    )


if __name__ == "__main__":
    print(table(digests(FULL)))
