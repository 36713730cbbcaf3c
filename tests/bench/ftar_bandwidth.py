"""Bus bandwidth of FTAR and of gloo's all-reduce, side by side: the same processes, the same tensors, in turns.

Run with ``python tests/bench/ftar_bandwidth.py [--megabytes 32 256] [--members 2 3 4] [--repetitions 9]``.
Bus bandwidth is 2(n-1)/n times bytes over seconds: what each member has to send, whatever the algorithm, over the time
of the slowest one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.ftar import Engine, FtarSettings, RailMember

__all__: list[str] = []

KEY = b"a key of the benchmark only"


def member(rank: int, members: int, sizes: list[int], repetitions: int, store: str) -> None:
    """Measure as one of the members; the first one prints a JSON line per size."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=members, timeout=timedelta(seconds=60)
    )
    endpoint = Endpoint(host="127.0.0.1", key=KEY, job="bench")
    connected = threading.Event()
    engine = Engine(
        identity=Identity(job="bench", replica=rank, attempt=0, rank=0, world_size=1, coordinator="", host="127.0.0.1"),
        key=KEY,
        endpoint=endpoint,
        settings=FtarSettings(),
        on_connected=lambda epoch: connected.set(),
        on_broken=lambda epoch, error: sys.exit(str(error)),
    )
    addresses: list[str] = [""] * members
    dist.all_gather_object(addresses, endpoint.address)
    engine.connect(1, [RailMember(replica=i, attempt=0, address=a) for i, a in enumerate(addresses)])
    engine.activate(1)
    assert connected.wait(20)
    for megabytes in sizes:
        seconds = measure(engine, megabytes << 18, repetitions)
        if rank == 0:
            print(json.dumps({"members": members, "megabytes": megabytes, **seconds}), flush=True)
    dist.barrier()
    engine.close(linger=5)
    endpoint.close()
    dist.destroy_process_group()


def measure(engine: Engine, numel: int, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of the slowest member, for each repetition."""
    source, out = torch.rand(numel), torch.empty(numel)

    def ftar() -> None:
        engine.all_reduce(step=1, bucket=0, source=source, out=out).wait(60)

    def gloo() -> None:
        dist.all_reduce(work)

    work = source.clone()
    ways: dict[str, Callable[[], None]] = {"ftar": ftar, "gloo": gloo}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(-2, repetitions):
        for name, way in ways.items():
            work.copy_(source)
            dist.barrier()
            began = time.perf_counter()
            way()
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if repetition >= 0:
                seconds[name].append(took.item())
    return seconds


def run(members: int, sizes: list[int], repetitions: int) -> list[dict[str, object]]:
    """Start the members and return what the first one printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--sizes", json.dumps(sizes), "--repetitions", str(repetitions)]
        command += ["--store", str(Path(folder) / "store"), "--members", str(members), "--rank"]
        children = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else None, text=True)
            for rank in range(members)
        ]
        try:
            output, _ = children[0].communicate(timeout=600)
            for child in children:
                if child.wait(timeout=30):
                    raise SystemExit(f"a member ended with exit code {child.returncode}")
        finally:
            for child in children:
                child.kill()
                child.wait()
    return [json.loads(line) for line in output.splitlines()]


def show(row: dict[str, object]) -> str:
    """Return one line: median and spread of both, and their ratio."""
    members, megabytes = row["members"], row["megabytes"]
    assert isinstance(members, int)
    assert isinstance(megabytes, int)
    gigabytes = 2 * (members - 1) / members * (megabytes << 20) / 1e9
    texts, medians = [], []
    for name in ("ftar", "gloo"):
        seconds = row[name]
        assert isinstance(seconds, list)
        medians.append(gigabytes / statistics.median(seconds))
        texts.append(
            f"{name} {medians[-1]:5.2f} GB/s ({gigabytes / max(seconds):.2f} … {gigabytes / min(seconds):.2f})"
        )
    return f"{megabytes:4d} MB, {members} members: {texts[0]}   {texts[1]}   ratio {medians[0] / medians[1]:.2f}"


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        member(given.rank, given.members[0], given.sizes, given.repetitions, given.store)
        return
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; median (slowest … fastest) of {given.repetitions}")
    for members in given.members:
        for row in run(members, given.megabytes, given.repetitions):
            print(show(row), flush=True)


if __name__ == "__main__":
    main()
