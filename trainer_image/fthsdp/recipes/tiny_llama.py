"""Train a small Llama on bytes of text: ``python -m fthsdp.recipes.tiny_llama --steps 60``.

A whole training script, ordinary PyTorch but for the ``replica_group`` around it. Run it with ``fthsdp run`` or as the
command of an FTHSDPJob's container. Exit code 2 and one sentence for arguments that cannot work.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fthsdp
from fthsdp.data.text import TextDataset, streamed
from fthsdp.errors import ConfigError
from fthsdp.recipes.llama import SIZES, Llama, ModelSize, next_token_loss, shard

__all__ = ["Options", "main", "parse"]

_EMULATED_LENGTH = 8
"""Bytes of each window that still go through the model when compute is emulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says; raises ConfigError for what cannot work."""

    steps: int
    model: ModelSize
    batch_size: int
    micro_batch_size: int
    sequence_length: int
    data: tuple[Path, ...] | None
    lanes: int
    learning_rate: float
    clip_grad_norm: float
    seed: int
    emulate_compute: float | None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batch_size", "sequence_length"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.lanes >= 0, "lanes", self.lanes, "0 or more")
        for name in ("learning_rate", "clip_grad_norm"):
            _require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a number above 0")
        _require(0 <= self.seed < 1 << 63, "seed", self.seed, "a whole number from 0 to 2**63-1")
        if self.emulate_compute is not None:
            _require(
                0 <= self.emulate_compute < math.inf, "emulate_compute", self.emulate_compute, "seconds, 0 or more"
            )


def _require(valid: bool, name: str, value: object, right: str) -> None:
    if not valid:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: {right} is needed")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; raises ConfigError."""
    parser = _Parser(prog="tiny_llama", description="Train a small Llama on bytes of text.")
    parser.add_argument("--steps", type=int, default=60, help="updates of the whole run (default: %(default)s)")
    parser.add_argument("--model", choices=[size.value for size in ModelSize], default="tiny", help="size by name")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a replica in a step")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="samples that a rank computes at once")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes of a sample")
    parser.add_argument(
        "--data", type=Path, nargs="+", help="text files (default: the Python standard library's source)"
    )
    parser.add_argument(
        "--lanes", type=int, default=0, help="read the text as a stream in this many lanes (default: at random)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its highest; AdamW, cosine with warm-up")
    parser.add_argument("--clip-grad-norm", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters and of the order of the samples")
    parser.add_argument(
        "--emulate-compute",
        type=float,
        metavar="SECONDS",
        help="sleep this long in each step, as if an accelerator computed; only the first"
        f" {_EMULATED_LENGTH} bytes of each sample are really trained",
    )
    options = vars(parser.parse_args(arguments))
    data = options.pop("data")
    model = ModelSize(options.pop("model"))
    return Options(data=None if data is None else tuple(data), model=model, **options)


def learning_rate_factor(step: int, steps: int) -> float:
    """Rise over the first tenth of the run, then fall to a tenth along a cosine."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))


def emulated_loss(model: nn.Module, windows: Tensor, seconds: float) -> Tensor:
    """Sleep, then return the loss over the first bytes of each window.

    The processor stays free for others, as with an accelerator, while gradients still depend on every parameter and
    every sample, so that losses and digests mean what they always do.
    """
    time.sleep(seconds)
    return next_token_loss(model, windows[:, : _EMULATED_LENGTH + 1])


def train(options: Options, text: TextDataset) -> None:
    """Train to the last step, through whatever fails on the way."""
    dataset = streamed(text, options.lanes) if options.lanes else text
    with fthsdp.replica_group(seed=options.seed) as group:
        torch.manual_seed(options.seed)
        model = Llama(SIZES[options.model]).to(group.device)
        shard(model, group.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: learning_rate_factor(n, options.steps))
        state = fthsdp.TrainState(model, optimizer, scheduler=scheduler, clip_grad_norm=options.clip_grad_norm)
        group.log_final = True
        sleep = (options.emulate_compute or 0.0) * dist.get_world_size() / options.batch_size  # for each sample
        for step in group.steps(
            state,
            until=options.steps,
            batch_size=options.batch_size,
            micro_batch_size=options.micro_batch_size,
            lanes=options.lanes,
        ):
            for windows in step.batches(dataset):
                if options.emulate_compute is None:
                    step.backward(next_token_loss(model, windows))
                else:
                    step.backward(emulated_loss(model, windows, sleep * len(windows)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and return its exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        train(options, TextDataset(options.data, length=options.sequence_length))
    except ConfigError as error:
        print(f"tiny_llama: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
