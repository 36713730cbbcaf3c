"""Replicas of real processes that write and read checkpoints: what their ranks do, and how they are started.

Ranks are forked from one process that has imported torch, each with its own part of a replica over gloo.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import resource
import secrets
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

DEADLINE = 120.0
Json = Any
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["fthsdp.group", "fthsdp.recipes.tiny_llama", "fthsdp.checkpoint"])


# --- starting ranks ---------------------------------------------------------------------------------------------------


class Replica:
    """The processes of one replica, all doing ``task(rank, root, *arguments)``."""

    def __init__(self, task: Callable[..., Json], root: Path, *arguments: Json, ranks: int = 2) -> None:
        folder = next(parent for parent in root.parents if parent.is_dir())
        store = folder / f"store-{secrets.token_hex(4)}"
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            ours, theirs = _FORKS.Pipe(duplex=False)
            process = _FORKS.Process(target=_be_a_rank, args=(theirs, rank, ranks, store, task, root, arguments))
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


# --- what ranks do in the tests ---------------------------------------------------------------------------------------


def write(me: Rank, root: Path, user: str = "same") -> Json:
    """Train 3 steps, store, train 2 more. Return the state at both points."""
    state = me.state(user=User(0.5 + me.rank * (user == "own")))
    checkpoints = me.checkpoints(root)
    me.train(state, range(1, 4))
    before = whole(state)
    me.save(checkpoints, 3, state)
    me.train(state, range(4, 6))
    return {"stored": before, "later": whole(state), "log": me.log}


def read(me: Rank, root: Path, sharded: bool = True, store: bool = False) -> Json:
    """Load, say what came, train 2 steps; or store it again as a later step."""
    state = me.state(seed=1, sharded=sharded, user=User(9.0))
    checkpoints = me.checkpoints(root)
    loaded = checkpoints.load(state)
    assert loaded is not None
    stored = whole(state)
    if store:
        me.save(checkpoints, loaded.step + 1, state)
    else:
        me.train(state, range(4, 6))
    return {
        "step": loaded.step,
        "sampler": loaded.sampler,
        "digest": loaded.digest,
        "stored": stored,
        "later": whole(state),
        "user": state.user.value,
    }


def read_plainly(me: Rank, checkpoint: Path) -> Json:
    """Load model and optimizer with nothing but torch."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    state = me.state(seed=1)
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=checkpoint)
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return whole(state)


def write_grid(me: Rank, root: Path) -> Json:
    """Store what 2 x 2 ranks hold under tensor and data parallelism: some of it twice, some of it in all of them."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from fthsdp.state import TrainState

    grid = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    model = _grid_model()
    placements = {"cut": (Shard(0), Shard(1)), "part": (Shard(0), Replicate()), "all": (Replicate(), Replicate())}
    for name, placement in placements.items():
        setattr(model, name, torch.nn.Parameter(distribute_tensor(getattr(model, name).detach(), grid, placement)))
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    state.update([torch.ones(size) for size in state.bucket_sizes], scale=1.0, norm_squared=1.0)
    me.save(me.checkpoints(root), 1, state)
    return whole(state)


def read_grid(me: Rank, root: Path) -> Json:
    """Load it into one rank, unsharded."""
    import torch

    from fthsdp.state import TrainState

    model = _grid_model()
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    assert me.checkpoints(root).load(state) is not None
    return whole(state)


def _grid_model() -> Any:
    import torch

    shapes = {"cut": (6, 5), "part": (5, 3), "all": (4,)}
    model = torch.nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
    return model


def read_nothing(me: Rank, root: Path) -> Json:
    return me.checkpoints(root).load(me.state())


def refuse(me: Rank, root: Path, options: Json) -> Json:
    """Load into another state; return the error, and whether the state is as it was."""
    from fthsdp.errors import ConfigError

    state = me.state(seed=1, **options)
    before = whole(state)
    try:
        me.checkpoints(root).load(state)
    except ConfigError as error:
        return {"error": str(error), "unchanged": whole(state) == before}
    return None


def write_several(me: Rank, root: Path, steps: Json, replica: int = 0, job: str = "job") -> Json:
    """Store after each of these steps."""
    state = me.state(user=User(0.5))
    checkpoints = me.checkpoints(root, replica=replica, job=job)
    done = 0
    for step in steps:
        me.train(state, range(done + 1, step + 1))
        done = step
        me.save(checkpoints, step, state)
    return {"log": me.log, "stored": whole(state)}


def change_at_once(me: Rank, root: Path) -> Json:
    """Change the state right after the boundary; two checkpoints, so that the copy's memory is used again."""
    state = me.state()
    checkpoints = me.checkpoints(root)
    found = {}
    for step in (1, 2):
        me.train(state, range(step, step + 1))
        found = whole(state)
        assert checkpoints.begin(step, state, {})
        me.train(state, range(90, 91))
        checkpoints.final(step)
        checkpoints.close(linger=DEADLINE)
    reader = me.state(seed=1)
    assert me.checkpoints(root).load(reader) is not None
    return {"stored": found, "read": whole(reader)}


def never_final(me: Rank, root: Path) -> Json:
    """Three checkpoints that may not count: another step becomes final, the state is undone, the run ends."""
    state = me.state()
    checkpoints = me.checkpoints(root)
    assert checkpoints.begin(1, state, {})
    checkpoints.final(2)
    checkpoints.drop()
    checkpoints.final(1)
    checkpoints.close(linger=DEADLINE)
    assert checkpoints.begin(2, state, {})
    checkpoints.close(linger=DEADLINE)
    checkpoints.final(2)
    checkpoints.close(linger=DEADLINE)
    return {"log": me.log, "names": _names(root)}


@contextmanager
def _held_up(me: Rank, rank: int) -> Iterator[Any]:
    """Let the writing thread of one rank wait where it would write."""
    import threading

    from fthsdp.checkpoint import checkpoints

    go, real = threading.Event(), checkpoints.write_shard

    def wait_first(*arguments: Any, **options: Any) -> Any:
        assert go.wait(DEADLINE)
        return real(*arguments, **options)

    if me.rank == rank:
        checkpoints.write_shard = wait_first
    yield go
    checkpoints.write_shard = real


def busy(me: Rank, root: Path, slow_rank: int) -> Json:
    """Ask for checkpoints while one rank is still writing the first."""
    state = me.state()
    checkpoints = me.checkpoints(root)
    with _held_up(me, slow_rank) as go:
        began = [checkpoints.begin(1, state, {})]
        checkpoints.final(1)
        began += [checkpoints.begin(step, state, {}) for step in (2, 3)]
        go.set()
        checkpoints.close(linger=DEADLINE)
    began.append(checkpoints.begin(4, state, {}))
    checkpoints.final(4)
    checkpoints.close(linger=DEADLINE)
    return {"began": began, "log": me.log, "names": _names(root)}


def end_while_writing(me: Rank, root: Path) -> Json:
    """Close and destroy the process groups while a rank's thread is held up; nothing may hang or count."""
    state = me.state()
    checkpoints = me.checkpoints(root)
    with _held_up(me, 1):
        assert checkpoints.begin(1, state, {})
        checkpoints.final(1)
        began = time.monotonic()
        checkpoints.close(linger=0.2)
        return time.monotonic() - began


def full_disk(me: Rank, root: Path, rank: int) -> Json:
    """No file of this rank may grow beyond 1 kB, as on a full disk; then there is room again."""
    state = me.state()
    checkpoints = me.checkpoints(root)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if me.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    me.train(state, range(1, 2))
    me.save(checkpoints, 1, state)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = _names(root)
    me.train(state, range(2, 3))
    me.save(checkpoints, 2, state)
    return {"log": me.log, "left": left, "names": _names(root)}


def no_folder(me: Rank, root: Path) -> Json:
    """The folder cannot be made; training goes on, and once it can, so do checkpoints."""
    state = me.state()
    obstacle = root.parent
    checkpoints = me.checkpoints(root)
    me.train(state, range(1, 2))
    me.save(checkpoints, 1, state)
    me.group.barrier()
    if me.rank == 0:
        obstacle.unlink()
    me.group.barrier()
    me.train(state, range(2, 3))
    me.save(checkpoints, 2, state)
    return {"log": me.log, "names": _names(root)}


def unpickle_nothing(me: Rank, root: Path) -> Json:
    """Write and read under a watch for pickles that would name a class or a function."""
    found: list[str] = []

    def watch(event: str, arguments: Any) -> None:
        if event == "pickle.find_class":
            found.append(f"{arguments}")

    state = me.state(user=User(0.5))
    checkpoints = me.checkpoints(root)
    me.train(state, range(1, 2))
    sys.addaudithook(watch)
    me.save(checkpoints, 1, state)
    assert checkpoints.load(state) is not None
    return found


def crash_at(me: Rank, root: Path, event_number: int) -> Json:
    """Store one checkpoint, then die before the n-th thing that the thread of the second does to files."""
    import threading

    state = me.state(sharded=False)
    checkpoints = me.checkpoints(root, keep=1)
    me.train(state, range(1, 2))
    me.save(checkpoints, 1, state)
    seen = 0

    def watch(event: str, arguments: Any) -> None:
        nonlocal seen
        if threading.current_thread().name != "fthsdp-checkpoint-2" or str(root) not in str(arguments):
            return
        if event.partition(".")[0] in ("open", "os", "shutil"):
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    me.train(state, range(2, 3))
    sys.addaudithook(watch)
    me.save(checkpoints, 2, state)
    return seen


def keep_writing(me: Rank, root: Path, first: int) -> Json:
    """Go on from the newest for ever, with a checkpoint after each step."""
    state = me.state()
    checkpoints = me.checkpoints(root)
    loaded = checkpoints.load(state)
    step = loaded.step if loaded is not None else 0
    assert step >= first
    while True:
        step += 1
        me.train(state, range(step, step + 1))
        checkpoints.final(step - 1)
        checkpoints.begin(step, state, {"next": step})


def read_what_vanishes(me: Rank, root: Path, at: str) -> Json:
    """Load while the newest checkpoint is deleted under the reader, at ``verify`` or at ``read_shard``."""
    from fthsdp.checkpoint import checkpoints

    real = getattr(checkpoints, at)

    def vanish(*arguments: Any, **options: Any) -> Any:
        me.group.barrier()
        if me.rank == 0 and (root / "step-00000002").exists():
            shutil.rmtree(root / "step-00000002")
        me.group.barrier()
        return real(*arguments, **options)

    setattr(checkpoints, at, vanish)
    loaded = me.checkpoints(root).load(me.state(user=User(9.0)))
    return loaded.step if loaded is not None else None


def read_anything(me: Rank, root: Path) -> Json:
    """Load the newest and store it as a step later: what was left behind is cleared away."""
    state = me.state()
    checkpoints = me.checkpoints(root)
    loaded = checkpoints.load(state)
    assert loaded is not None
    assert loaded.sampler == {"next": loaded.step}
    me.save(checkpoints, loaded.step + 1000, state)
    return {"step": loaded.step}


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []
