"""What the ranks of a replica do in the tests of checkpoints; what they return travels to the test as JSON."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.local.checkpoint.replica import DEADLINE, Json, Rank, User, whole


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
    """Store one checkpoint, then die before the n-th change that the thread of the second makes in a folder."""
    import threading

    state = me.state(sharded=False)
    checkpoints = me.checkpoints(root, keep=1)
    me.train(state, range(1, 2))
    me.save(checkpoints, 1, state)
    seen = 0

    def watch(event: str, arguments: Any) -> None:
        nonlocal seen
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or (
            event == "open" and arguments[1] == "w"
        )
        if changes and threading.current_thread().name == "fthsdp-checkpoint-2":
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
