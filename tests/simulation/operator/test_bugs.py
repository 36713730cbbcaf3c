"""Each rule of the operator is needed: without it the simulation finds a run in which something breaks."""

from __future__ import annotations

from itertools import chain, count, islice

import pytest
from tests.simulation.operator import bugs
from tests.simulation.operator.cases import cover, in_place_case, random_case, rolling_case

KINDS = {in_place_case: bugs.ABOUT_MACHINES, rolling_case: bugs.ABOUT_ROLLS}
"""Where to look for mistakes that are rare among all jobs."""
MET_BY = {
    bugs.goes_on_after_a_conflict: 54,
    bugs.counts_a_restart_twice: 16,
    bugs.forgets_restarts: 20,
    bugs.creates_deleted_pods_again: 20,
    bugs.leaves_failed_replicas_alone: 21,
    bugs.takes_what_is_late_for_deleted: 54,
    bugs.recreates_one_after_the_other: 52,
    bugs.does_not_wait_for_those_who_leave: 227,
    bugs.believes_nodes_more_than_the_coordinator: 361,
    bugs.avoids_nodes_for_ever: 62,
    bugs.removes_by_force_at_once: 188,
    bugs.waits_for_hanging_starts_for_ever: 153,
}
"""The first job that met a mistake, where many did not: it is tried before the search, which takes minutes."""
ENOUGH = 400
"""Jobs after which the search is given up."""


@pytest.mark.parametrize("bug", bugs.BUGS, ids=lambda bug: bug.__name__)
def test_an_operator_with_this_bug_is_found_out(bug: bugs.Bug, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        kind = next((kind for kind, about in KINDS.items() if bug in about), random_case)
        first = [MET_BY[bug]] if bug in MET_BY else []
        covered = cover(islice(map(kind, chain(first, count())), ENOUGH))
    assert covered.failed is not None, f"nothing was found in {covered}"
    why = covered.failure.removeprefix(f"{covered.failed}\n").partition("\n")[0]
    with capsys.disabled():
        print(f"\n  after {covered.runs:,} jobs: {why[:150]}")


def test_those_jobs_meet_nothing_else() -> None:
    covered = cover(map(random_case, MET_BY.values()))
    assert covered.failed is None, covered.failure
