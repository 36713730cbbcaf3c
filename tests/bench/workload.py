"""What is trained where stalls and joins are measured, by us and by every peer alike. Needs torch and nothing else.

Compute is emulated by sleeping, as an accelerator would leave the processors free. Parameters, gradients and optimizer
are real ones of the size asked for: all that has to be exchanged, updated, downloaded and restored is really there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Flat", "Samples", "Workload", "emit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Size and pace of one replica, which is one process."""

    parameters: float = 32.0
    """Millions."""
    compute: float = 0.25
    """Seconds of each step's forward and backward pass."""
    samples: int = 1
    """That a replica trains in a step."""
    download: float = 0.0
    """Seconds that the state takes on its way to a newcomer; 0: as fast as it goes."""

    def arguments(self) -> list[str]:
        """Return a command line that ``parse`` reads."""
        return [word for name in self.__slots__ for word in (f"--{name}", str(getattr(self, name)))]

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Workload:
        """Read the command line of a worker."""
        parser = argparse.ArgumentParser()
        for name, kind in (("parameters", float), ("compute", float), ("samples", int), ("download", float)):
            parser.add_argument(f"--{name}", type=kind, default=getattr(cls(), name))
        return cls(**vars(parser.parse_args(arguments)))


class _Gradient(torch.autograd.Function):
    """A gradient of the right size, as a real backward pass would leave it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(parameter, value)
        return parameter.view(-1)[0].clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        parameter, value = ctx.saved_tensors
        return torch.full_like(parameter, float(value * outputs[0])), None


class Flat(nn.Module):
    """Parameters in eight equal parts; the loss of a batch (a vector of numbers) depends on all of them."""

    PARTS = 8

    def __init__(self, millions: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        numel = int(millions * 1_000_000) // self.PARTS
        self.parts = nn.ParameterList([torch.randn(numel) for _ in range(self.PARTS)])

    def forward(self, batch: Tensor) -> Tensor:
        value = batch.mean()
        losses = [_Gradient.apply(part, value) for part in self.parts]  # type: ignore[no-untyped-call]
        return torch.stack(losses).mean()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """A new AdamW over all of them."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Samples:
    """As many as anybody wants, each a number of its own."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(1e-3 * (1 + index % 97))


def emit(what: str, **fields: Any) -> None:
    """Tell the benchmark what this process does now."""
    line = json.dumps({"t": time.monotonic(), "what": what, **fields}) + "\n"
    os.write(1, line.encode())
