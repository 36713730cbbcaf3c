"""Bus bandwidth of FTAR, of gloo's all-reduce and of bare loopback sockets: same processes, same tensors, in turns.

    python -m tests.bench.ftar_bandwidth [--megabytes 32 256] [--members 2 3 4] [--repetitions 9] [--json FILE]
        [--tls FOLDER]

Bus bandwidth is 2(n-1)/n times bytes over seconds: what each member has to send, whatever the algorithm, over the time
of the slowest one. The bare sockets carry exactly those bytes round a ring, from one tensor into another one, without
adding anything or waiting for what comes from the left: no all-reduce over such sockets can be faster.

Ratios are medians over the repetitions, of two times taken right after one another, so that a machine with other work
disturbs both. The processor time per gigabyte is less disturbed still; it includes waiting threads of the process.
With --tls, FTAR takes its turns under TLS too, with tls.crt, tls.key and ca.crt of that folder.
Exits 1 when a median misses what it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tests.bench.engines import connected_engine, in_a_ring

from fthsdp.ftar import Engine, FtarSettings
from fthsdp.tls import Tls
from fthsdp.wire import parse_address

__all__: list[str] = []

LIMITS = {"gloo": (1.0, 1.3), "sockets": (0.75, 0.9), "tls": (0.0, 0.0)}
"""What FTAR must reach and aims at, as a part of the other's bandwidth. What encryption costs is only told."""
_SLICE = 1 << 20
"""Bytes that the bare sockets are given at a time."""


# --- a member, in a process of its own ------------------------------------------------------------------------------


class BareRing:
    """A connection to either neighbour and nothing else."""

    def __init__(self, rank: int, members: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            addresses: list[str] = [""] * members
            dist.all_gather_object(addresses, f"127.0.0.1:{listener.getsockname()[1]}")
            self._right = socket.create_connection(parse_address(addresses[(rank + 1) % members]))
            self._left, _ = listener.accept()
        for sock in (self._left, self._right):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._members = members

    def carry(self, source: memoryview, out: memoryview) -> None:
        """Send to the right what an all-reduce has to send, and receive as much from the left."""
        volume = 2 * (self._members - 1) * len(source) // self._members
        sender = threading.Thread(target=self._send, args=(source, volume))
        sender.start()
        while volume:
            start = volume % len(out)
            volume -= self._left.recv_into(out[start : start + min(_SLICE, volume)])
        sender.join()

    def _send(self, source: memoryview, volume: int) -> None:
        while volume:
            start = volume % len(source)
            volume -= self._right.send(source[start : start + min(_SLICE, volume)])

    def close(self) -> None:
        """Close both."""
        self._left.close()
        self._right.close()


def member(rank: int, members: int, sizes: list[int], repetitions: int, store: str, tls: Path | None) -> None:
    """Measure as one of the members; the first one prints a JSON line per size."""
    with in_a_ring(rank, members, store) as engine, ExitStack() as stack:
        engines = {"ftar": engine}
        if tls is not None:
            engines["tls"] = stack.enter_context(connected_engine(rank, members, Tls(tls)))
        bare = BareRing(rank, members)
        for megabytes in sizes:
            measured = measure(engines, bare, megabytes << 18, repetitions)
            if rank == 0:
                print(json.dumps({"members": members, "megabytes": megabytes, **measured}), flush=True)
        dist.barrier()
        bare.close()


def measure(
    engines: dict[str, Engine], bare: BareRing, numel: int, repetitions: int
) -> dict[str, dict[str, list[float]]]:
    """Return seconds of the slowest member and processor seconds of all, for each way and repetition."""
    source, out = torch.rand(numel), torch.empty(numel)
    work = source.clone()
    source_bytes, out_bytes = source.numpy().data.cast("B"), out.numpy().data.cast("B")

    def reduce(engine: Engine) -> None:
        engine.all_reduce(step=1, bucket=0, source=source, out=out).wait(120)

    ways: dict[str, Callable[[], object]] = {
        **{name: partial(reduce, engine) for name, engine in engines.items()},
        "gloo": lambda: dist.all_reduce(work),
        "sockets": lambda: bare.carry(source_bytes, out_bytes),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(-2, repetitions):
        for name, way in ways.items():
            work.copy_(source)
            dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            way()
            wall, busy = time.perf_counter() - began, time.process_time() - busy
            slowest, total = torch.tensor(wall), torch.tensor(busy)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            if repetition >= 0:
                seconds[name].append(slowest.item())
                processor[name].append(total.item())
    return {"seconds": seconds, "processor_seconds": processor}


# --- the parent: rows, limits, output -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """FTAR next to one other way, for one size and number of members."""

    what: str
    unit: str
    members: int
    megabytes: int
    median: float
    least: float
    most: float
    must: float
    aim: float
    ftar_gigabytes_per_second: float
    other_gigabytes_per_second: float
    ftar_processor_seconds_per_gigabyte: float
    other_processor_seconds_per_gigabyte: float
    samples: list[float]

    @property
    def missed(self) -> bool:
        """Whether it is below what it must be."""
        return self.median < self.must

    def __str__(self) -> str:
        mark = "" if not self.aim else "MISSED" if self.missed else "ok" if self.median < self.aim else "aim reached"
        return (
            f"{self.what:14} {self.megabytes:4d} MB, {self.members} members: {self.median:5.2f}"
            f" ({self.least:.2f} … {self.most:.2f})   must {self.must:.2f} aim {self.aim:.2f}   {mark:11}"
            f"   {self.ftar_gigabytes_per_second:.2f} and {self.other_gigabytes_per_second:.2f} GB/s,"
            f" {self.ftar_processor_seconds_per_gigabyte:.2f} and {self.other_processor_seconds_per_gigabyte:.2f}"
            " processor s per GB"
        )


def compare(
    members: int, megabytes: int, other: str, seconds: dict[str, list[float]], busy: dict[str, list[float]]
) -> Row:
    """Make a row of what one run measured."""
    gigabytes = 2 * (members - 1) / members * (megabytes << 20) / 1e9
    samples = [theirs / ours for ours, theirs in zip(seconds["ftar"], seconds[other], strict=True)]
    must, aim = LIMITS[other]
    return Row(
        what=f"FTAR / {other}",
        unit="ratio of bus bandwidths",
        members=members,
        megabytes=megabytes,
        median=statistics.median(samples),
        least=min(samples),
        most=max(samples),
        must=must,
        aim=aim,
        ftar_gigabytes_per_second=gigabytes / statistics.median(seconds["ftar"]),
        other_gigabytes_per_second=gigabytes / statistics.median(seconds[other]),
        ftar_processor_seconds_per_gigabyte=statistics.median(busy["ftar"]) / gigabytes / members,
        other_processor_seconds_per_gigabyte=statistics.median(busy[other]) / gigabytes / members,
        samples=samples,
    )


def run(members: int, sizes: list[int], repetitions: int, tls: Path | None = None) -> list[Row]:
    """Start the members and return their rows."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.ftar_bandwidth", "--store", str(Path(folder) / "store")]
        command += ["--members", str(members), "--megabytes", *map(str, sizes), "--repetitions", str(repetitions)]
        command += [*(("--tls", str(tls)) if tls else ()), "--rank"]
        children = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else None, text=True)
            for rank in range(members)
        ]
        try:
            output, _ = children[0].communicate(timeout=900)
            for child in children:
                if child.wait(timeout=30):
                    raise SystemExit(f"a member ended with exit code {child.returncode}")
        finally:
            for child in children:
                child.kill()
                child.wait()
    rows = []
    for line in output.splitlines():
        found = json.loads(line)
        for other in (name for name in LIMITS if name in found["seconds"]):
            rows.append(compare(members, found["megabytes"], other, found["seconds"], found["processor_seconds"]))
    return rows


def main() -> int:
    """Measure, print, and say whether everything is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tls", type=Path, metavar="FOLDER")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        member(given.rank, given.members[0], given.megabytes, given.repetitions, given.store, given.tls)
        return 0
    machine = {"python": platform.python_version(), "torch": str(torch.__version__), "cores": os.cpu_count()}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    rows = []
    for members in given.members:
        for row in run(members, given.megabytes, given.repetitions, given.tls):
            rows.append(row)
            print(row, flush=True)
    if given.json is not None:
        document = {"machine": machine, "settings": asdict(FtarSettings()), "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
