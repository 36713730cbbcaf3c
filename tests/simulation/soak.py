"""Go on with the exploration for as long as told: ``python -m tests.simulation.soak --seconds 3600``.

Random jobs, skirmishes and pairs of faults in turn, from another number each time unless one is given. The first run
that breaks something is printed, with its number, and ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import count

from tests.simulation.exhaustive import pairs
from tests.simulation.scenarios import Case, Covered, explore, leaving_case, random_case, skirmish_case, small_case


def cases(number: int) -> Iterator[Case]:
    """Yield cases without end."""
    spread = (small_case(seed, faults) for seed in count(number) for faults in pairs(seed))
    for n in count(number):
        yield from (random_case(n), skirmish_case(n), leaving_case(n), next(spread))


def main(arguments: list[str] | None = None) -> int:
    """Run until the time is over or something breaks."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--number", type=int, default=int(time.time()), help="of the first case")
    options = parser.parse_args(arguments)
    end, covered, stream = time.monotonic() + options.seconds, Covered(), cases(options.number)
    while time.monotonic() < end and not covered.failures:
        covered.add(explore(stream, events=1_000_000))
        print(f"from {options.number}: {covered}", flush=True)
    for failure in covered.failures:
        print(failure)
    return 1 if covered.failures else 0


if __name__ == "__main__":
    sys.exit(main())
