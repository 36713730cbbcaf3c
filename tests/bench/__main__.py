"""Everything that is promised in numbers, next to what others reach: ``python -m tests.bench [--quick]``.

Prints each figure beside what it must be and what we aim at, writes everything that was measured as JSON, and exits 1
when a must is missed. Compute is emulated by sleeping wherever stalls and joins are measured. The machine should have
nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.bandwidth import bus_bandwidth
from tests.bench.churn import steady_failures
from tests.bench.digest import digests
from tests.bench.faults import inside_the_collective, kills_and_a_freeze
from tests.bench.figures import Figure, table
from tests.bench.gil import shared_gil
from tests.bench.in_place import restarts
from tests.bench.joins import downloads
from tests.bench.plan import FULL, QUICK, Plan
from tests.bench.processes import ROOT, BenchmarkFailed, ended_by_signals
from tests.bench.results import write
from tests.bench.scale import large_job
from tests.bench.spares import one_spare
from tests.bench.step_time import healthy_steps

SCENARIOS: dict[str, Callable[[Plan], list[Figure]]] = {
    "bandwidth": bus_bandwidth,
    "gil": shared_gil,
    "step": healthy_steps,
    "kills": kills_and_a_freeze,
    "collective": inside_the_collective,
    "downloads": downloads,
    "inplace": restarts,
    "spare": one_spare,
    "churn": steady_failures,
    "scale": large_job,
    "digest": digests,
}


def main() -> int:
    """Measure, print, write, and say whether everything is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same rows, fewer repetitions")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="some of the benchmarks")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for the JSON")
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    began = time.monotonic()
    figures: list[Figure] = []
    failed: list[str] = []
    with ended_by_signals():
        for name in given.only:
            plan.say(name)
            try:
                figures += SCENARIOS[name](plan)
            except BenchmarkFailed as error:
                failed.append(name)
                print(f"{name} could not be measured: {error}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print(table(figures))
    file = write(figures, name=plan.name, module="tests.bench", seconds=seconds, folder=given.out)
    print(f"\n{seconds / 60:.1f} minutes; written to {file}")
    missed = [figure.name for figure in figures if figure.missed]
    if missed or failed:
        print("missed: " + "; ".join([*missed, *(f"{name} (not measured)" for name in failed)]))
    return int(bool(missed or failed))


if __name__ == "__main__":
    sys.exit(main())
