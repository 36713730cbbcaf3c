"""What the progress thread and the training thread take from each other.

Two members reduce 32 MB while their training threads wait, run kernels of torch, or run Python code; then these threads
work for as long with no ring beside them. The GIL is switched at our interval and at Python's own, one repetition after
the other. Two processes with two busy threads each share two cores, so each thread can have half of what it has alone:
what is beyond that is the GIL.

``python -m tests.bench.gil STORE REPETITIONS`` is both members (the second one as a child), which meet by way of STORE.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from tests.bench.engines import in_a_ring
from tests.bench.figures import PAIRED, Figure
from tests.bench.plan import Plan
from tests.bench.processes import BenchmarkFailed, run_to_its_end

from fthsdp.ftar import Engine
from fthsdp.group import SWITCH_INTERVAL

__all__ = ["shared_gil"]

NUMEL = 8 << 20
DEFAULT_INTERVAL = 0.005
"""Python's own switch interval, in seconds."""
SQUARE = torch.rand(256, 256)


def _python() -> None:
    for number in range(1000):
        number * number


def _kernel() -> None:
    torch.mm(SQUARE, SQUARE)


WORK: dict[str, Callable[[], None]] = {"torch's kernels": _kernel, "Python code": _python}


def member(rank: int, store: str, repetitions: int) -> None:
    """Measure as one of the two; the first one prints its times and rates."""
    found: dict[str, list[float]] = {}
    with in_a_ring(rank, 2, store) as engine:
        source, out = torch.rand(NUMEL), torch.empty(NUMEL)
        for repetition in range(-1, repetitions):
            for interval, whose in ((SWITCH_INTERVAL, "ours"), (DEFAULT_INTERVAL, "default")):
                sys.setswitchinterval(interval)
                measured = _measure(engine, source, out)
                if repetition >= 0:
                    for name, value in measured.items():
                        found.setdefault(f"{whose} {name}", []).append(value)
    if rank == 0:
        print(json.dumps(found))


def _measure(engine: Engine, source: torch.Tensor, out: torch.Tensor) -> dict[str, float]:
    dist.barrier()
    began = time.perf_counter()
    engine.all_reduce(step=1, bucket=0, source=source, out=out).wait(60)
    found = {"waits": time.perf_counter() - began}
    for name, work in WORK.items():
        dist.barrier()
        began, count = time.perf_counter(), 0
        reducing = engine.all_reduce(step=1, bucket=0, source=source, out=out)
        while not reducing.done():
            work()
            count += 1
        found[name] = time.perf_counter() - began
        dist.barrier()
        found[f"pace in {name}"] = count / found[name] / _pace_alone(work, found[name])
    return found


def _pace_alone(work: Callable[[], None], seconds: float) -> float:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work()
        count += 1
    return count / (time.perf_counter() - began)


def shared_gil(plan: Plan) -> list[Figure]:
    """Measure and return the rows; no bound is promised for them."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        code, output = run_to_its_end([sys.executable, "-m", "tests.bench.gil", store, str(plan.bandwidth)])
    if code:
        raise BenchmarkFailed(f"the two members ended with exit code {code}\n{output}")
    found: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return [_row(name, found) for name in WORK]


def _row(name: str, found: Mapping[str, list[float]]) -> Figure:
    waits, ours, default = (
        statistics.median(found[key]) for key in ("ours waits", f"ours pace in {name}", f"default pace in {name}")
    )
    return Figure(
        name=f"all-reduce of 32 MB while the training thread runs {name}",
        unit=PAIRED,
        values=tuple(found[f"ours {name}"]),
        peer="Python's own interval",
        peer_values=tuple(found[f"default {name}"]),
        note=f"{waits:.3g} s while it waits; meanwhile it keeps {ours:.0%} of its pace,"
        f" and at Python's own interval {default:.0%}",
    )


def main(store: str, repetitions: str, rank: str = "0") -> None:
    """Be one of the members, and start the other one."""
    if rank == "0":
        with subprocess.Popen([sys.executable, "-m", "tests.bench.gil", store, repetitions, "1"]):
            member(0, store, int(repetitions))
    else:
        member(1, store, int(repetitions))


if __name__ == "__main__":
    main(*sys.argv[1:])
