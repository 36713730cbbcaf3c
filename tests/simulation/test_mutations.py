"""Each rule of the protocol is needed: without it the simulation finds a run in which something breaks."""

from __future__ import annotations

from itertools import chain, count, islice

import pytest
from tests.simulation import mutations
from tests.simulation.scenarios import Covered, explore, leaving_case, random_case, skirmish_case

ENOUGH = 1_500_000
"""Simulated steps without a counterexample after which the search is given up."""


def search(mutation: mutations.Mutation) -> Covered:
    """Look for a run that breaks, in places where faults are dense."""
    turns = zip(map(skirmish_case, count()), map(random_case, count()), map(leaving_case, count()), strict=False)
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        return explore(islice(chain.from_iterable(turns), 20_000), events=ENOUGH)


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_protocol_without_this_rule_is_found_out(
    mutation: mutations.Mutation, capsys: pytest.CaptureFixture[str]
) -> None:
    covered = search(mutation)
    assert covered.failures, f"nothing was found in {covered}"
    with capsys.disabled():
        why = covered.failures[0].rpartition("Violation: ")[2].partition("\n")[0]
        print(f"\n  after {covered.runs:,} schedules: {why[:100]}")
