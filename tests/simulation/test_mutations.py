"""Each rule of the protocol is needed: without it the simulation finds a run in which something breaks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest
from tests.simulation import mutations
from tests.simulation.scenarios import Case, Covered, explore, leaving_case, random_case, skirmish_case

ENOUGH = 1_500_000
"""Simulated steps without a counterexample after which the search is given up."""


def dense_cases() -> Iterator[Case]:
    """Yield cases without end, most of them where faults are dense: what takes longest to find is found there."""
    for n in count():
        yield from map(skirmish_case, range(4 * n, 4 * n + 4))
        yield from (random_case(n), leaving_case(n))


def search(mutation: mutations.Mutation) -> Covered:
    """Look for a run that breaks."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        return explore(islice(dense_cases(), 20_000), events=ENOUGH)


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_protocol_without_this_rule_is_found_out(
    mutation: mutations.Mutation, capsys: pytest.CaptureFixture[str]
) -> None:
    covered = search(mutation)
    assert covered.failures, f"nothing was found in {covered}"
    with capsys.disabled():
        why = covered.failures[0].rpartition("Violation: ")[2].partition("\n")[0]
        print(f"\n  after {covered.runs:,} schedules: {why[:100]}")
