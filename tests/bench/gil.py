"""What the progress thread and the training thread take from each other: ``python -m tests.bench.turns``.

Two members reduce 32 MB while their training threads wait, run kernels of torch, or run Python code; then these threads
work for as long with no ring beside them. Python's lock goes from thread to thread in turns as long as we set them, and
in turns as long as Python's own, one repetition after the other. Two processes with two busy threads each share two
cores, so each thread can have half of what it has alone: what is beyond that is the lock.
"""

from __future__ import annotations

import argparse
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
from tests.bench.figures import PAIRED, Figure, table
from tests.bench.plan import FULL, Plan
from tests.bench.processes import BenchmarkFailed, run_to_its_end

from fthsdp.ftar import Engine
from fthsdp.group import LONGEST_TURN

__all__ = ["turns"]

NUMEL = 8 << 20
PYTHONS = 0.005
"""Seconds of a turn that Python has unless told otherwise."""
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
            for turn, whose in ((LONGEST_TURN, "ours"), (PYTHONS, "default")):
                sys.setswitchinterval(turn)
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


def turns(plan: Plan) -> list[Figure]:
    """Measure and return the rows; no bound is promised for them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.turns", "--store", str(Path(folder) / "store")]
        code, output = run_to_its_end([*command, "--repetitions", str(plan.bandwidth)])
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
        peer="Python's own turns",
        peer_values=tuple(found[f"default {name}"]),
        note=f"{waits:.3g} s while it waits; meanwhile it keeps {ours:.0%} of its pace,"
        f" and with Python's own turns {default:.0%}",
    )


def main() -> None:
    """Measure by hand, or be both members (the second one as a child), or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=FULL.bandwidth)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.store:
        print(table(turns(FULL)))
    elif given.rank:
        member(given.rank, given.store, given.repetitions)
    else:
        with subprocess.Popen([sys.executable, "-m", "tests.bench.turns", *sys.argv[1:], "--rank", "1"]):
            member(0, given.store, given.repetitions)


if __name__ == "__main__":
    main()
