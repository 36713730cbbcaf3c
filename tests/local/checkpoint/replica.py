"""Replicas of real processes for tests of checkpoints.

Ranks are forked from one process that has imported torch, each with its own part of a replica over gloo.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.local.forks import FORKS

DEADLINE = 120.0
Json = Any


# --- starting ranks ---------------------------------------------------------------------------------------------------


class Replica:
    """The processes of one replica, all doing ``task(rank, root, *arguments)``."""

    def __init__(self, task: Callable[..., Json], root: Path, *arguments: Json, ranks: int = 2) -> None:
        folder = next(parent for parent in root.parents if parent.is_dir())
        store = folder / f"store-{secrets.token_hex(4)}"
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            ours, theirs = FORKS.Pipe(duplex=False)
            process = FORKS.Process(target=_be_a_rank, args=(theirs, rank, ranks, store, task, root, arguments))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def results(self) -> list[Json]:
        """Return what the ranks return; fails with what a rank raised, or that it died."""
        try:
            return [self._result(rank) for rank in range(len(self.pipes))]
        finally:
            self.kill()

    def _result(self, rank: int) -> Json:
        assert wait([self.pipes[rank]], DEADLINE), f"rank {rank} says nothing"
        kind, value = json.loads(self.pipes[rank].recv_bytes())
        assert kind == "result", f"rank {rank}: {value}"
        return value

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run(task: Callable[..., Json], root: Path, *arguments: Json, ranks: int = 2) -> list[Json]:
    """Let a replica do something and return what its ranks return."""
    return Replica(task, root, *arguments, ranks=ranks).results()


def _be_a_rank(
    pipe: Connection,
    rank: int,
    ranks: int,
    store: Path,
    task: Callable[..., Json],
    root: Path,
    arguments: Sequence[Json],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        with Rank(rank, ranks, store) as me:
            answer = "result", task(me, root, *arguments)
    except BaseException:
        answer = "error", traceback.format_exc()
    pipe.send_bytes(json.dumps(answer).encode())


# --- a rank -----------------------------------------------------------------------------------------------------------


class Rank:
    """One rank: its process group, a model and what it logged."""

    def __init__(self, rank: int, ranks: int, store: Path) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        torch.set_num_threads(1)
        self.rank, self.ranks = rank, ranks
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        self.group = dist.group.WORLD
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.log: list[str] = []
        logging.getLogger("fthsdp").addHandler(_Listener(self.log))
        logging.getLogger("fthsdp").setLevel(logging.INFO)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def state(self, *, seed: int = 0, width: int = 7, sharded: bool = True, sgd: bool = False, user: Any = None) -> Any:
        """Make a training state; ``width`` 7 is no multiple of the ranks."""
        import torch
        from torch.distributed.fsdp import fully_shard

        from fthsdp.state import TrainState

        torch.manual_seed(seed)
        model = torch.nn.Sequential(*[_layer(width) for _ in range(3)])
        if sharded:
            for layer in model:
                fully_shard(layer, mesh=self.mesh)
            fully_shard(model, mesh=self.mesh)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9) if sgd else torch.optim.AdamW(trained, lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return TrainState(model, optimizer, scheduler=scheduler, clip_grad_norm=0.3, user=user)

    def train(self, state: Any, steps: range) -> None:
        """Take steps whose samples depend on the rank."""
        import torch
        import torch.distributed as dist

        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + self.rank)
            buckets: list[Any] = []
            state.arm(lambda _, flat, into=buckets: into.append(flat))
            state.model(torch.randn(4, state.model[0].weight.shape[1], generator=generator)).square().mean().backward()
            state.flush()
            squares = torch.tensor(state.norm_squared(buckets), dtype=torch.float64)
            dist.all_reduce(squares)
            state.update(buckets, scale=1.0, norm_squared=squares.item())

    def checkpoints(self, root: Path, *, every: int = 1, keep: int = 2, replica: int = 0, job: str = "job") -> Any:
        from fthsdp.checkpoint import Checkpoints

        return Checkpoints(
            root, every_steps=every, process_group=self.group, job=job, replica=replica, attempt=0, keep=keep
        )

    def save(self, checkpoints: Any, step: int, state: Any) -> None:
        """Write one checkpoint and wait for what becomes of it."""
        assert checkpoints.begin(step, state, {"next": 10 * step})
        checkpoints.final(step)
        checkpoints.close(linger=DEADLINE)


class _Listener(logging.Handler):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.append(f"{record.levelname} {record.getMessage()}")


def _layer(width: int) -> Any:
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(width, width) / width)
            self.scale = torch.nn.Parameter(torch.ones(1))  # most ranks hold nothing of it
            self.unused = torch.nn.Parameter(torch.full((5,), 2.0))
            self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
            self.register_buffer("shift", torch.randn(2))

        def forward(self, x: Any) -> Any:
            return x + self.scale * torch.tanh(x @ self.weight)

    return Layer()


def whole(state: Any) -> dict[str, str]:
    """Return a digest of each tensor, put together from all ranks, and the rest as text: the same for any sharding."""
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    def text(value: object) -> str:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if not isinstance(value, Tensor):
            return repr(value)
        data = value.detach().contiguous()
        return f"{data.dtype} {tuple(data.shape)} {hashlib.sha256(data.numpy().tobytes()).hexdigest()}"

    found = {name: text(tensor) for name, tensor in state.model.state_dict().items()}
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = text(value)
    for index, group in enumerate(state.optimizer.param_groups):
        found |= {f"group {index}/{key}": text(value) for key, value in group.items() if key != "params"}
    found["updates"] = text(state.updates)
    if state.scheduler is not None:
        found["scheduler"] = text(state.scheduler.state_dict())
    if state.user is not None:
        found["user"] = text(sorted(state.user.state_dict().items()))
    return found


class User:
    """User state that is numbers and a tensor."""

    def __init__(self, value: float) -> None:
        import torch

        self.value, self.average = value, torch.full((2, 3), value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "average": self.average, "raw": b"\x00\xff", "pair": (1, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.average = state["value"], state["average"]
