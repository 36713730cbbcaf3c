"""Go on for as long as told: ``python -m tests.simulation.operator --seconds 600``, or ``--seeds 1000``.

The first job that breaks something is cut down to the faults that it takes, and printed; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count, islice, takewhile

from tests.simulation.operator.cases import cover, random_case, simplest


def main(arguments: list[str] | None = None) -> int:
    """Run until all are run, the time is over, or something breaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.operator", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, help="number of jobs; as many as there is time for where unset")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--number", type=int, default=int(time.time()), help="of the first job")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    numbers = takewhile(lambda _: time.monotonic() < end, islice(count(options.number), options.seeds))
    covered = cover(map(random_case, numbers))
    print(f"from {options.number}: {covered}", flush=True)
    if covered.failed is None:
        return 0
    print("\ncut down to what it takes:\n" + (cover([simplest(covered.failed)]).failure or covered.failure))
    return 1


if __name__ == "__main__":
    sys.exit(main())
