"""What is promised of the operator at scale, in numbers: ``python -m tests.bench.operator [--size quick]``.

The real operator process, API server, etcd, scheduler and garbage collector; only the nodes are not there (kwok plays
their kubelets). Prints each figure beside what it must be and what we aim at, writes everything that was measured as
JSON, and exits 1 when a must is missed, 2 when nothing can be measured here. The machine should have nothing else to do
meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.figures import Figure, table
from tests.bench.operator.ground import bring_programs
from tests.bench.operator.large import large_job
from tests.bench.operator.many import many_jobs
from tests.bench.operator.peer import LWS_SOURCE, next_to_lws
from tests.bench.operator.sizes import SIZES, Size
from tests.bench.operator.told import survivors_are_told
from tests.bench.processes import ROOT, BenchmarkFailed, ended_by_signals
from tests.bench.results import write

__all__ = ["main"]

SCENARIOS: dict[str, Callable[[Size, Callable[[str], None], Path], list[Figure]]] = {
    "large": large_job,
    "told": survivors_are_told,
    "peer": next_to_lws,
    "many": many_jobs,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write, and say whether everything is as it must be."""
    given = _parser().parse_args(arguments)
    size, began = SIZES[given.size], time.monotonic()
    figures: list[Figure] = []
    failed: list[str] = []
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="fthsdp-bench-") as folder:
        try:
            bring_programs()
        except BenchmarkFailed as error:
            print(f"nothing can be measured: {error}", file=sys.stderr)
            return 2
        for name in given.only:
            _say(name)
            try:
                figures += SCENARIOS[name](size, _say, Path(folder))
            except BenchmarkFailed as error:
                failed.append(name)
                print(f"{name} could not be measured: {error}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    file = write(
        figures, name=f"operator-{size.name}", module="tests.bench.operator", seconds=seconds, folder=given.out
    )
    print(f"{table(figures)}\n\n{seconds / 60:.1f} minutes; written to {file}")
    missed = [figure.name for figure in figures if figure.missed]
    if missed or failed:
        print("missed: " + "; ".join([*missed, *(f"{name} (not measured)" for name in failed)]))
    return int(bool(missed or failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.operator",
        description=__doc__,
        epilog=f"The part 'peer' needs a checkout of LeaderWorkerSet: name its folder with {LWS_SOURCE}.",
    )
    parser.add_argument("--size", choices=SIZES, default="full", help="how much (default: %(default)s)")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="a tenth of it")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="some of the parts")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for the JSON")
    return parser


def _say(text: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
