"""Each rule of the operator is needed: without it the simulation finds a run in which something breaks."""

from __future__ import annotations

from itertools import count, islice

import pytest
from tests.simulation.operator import bugs
from tests.simulation.operator.cases import cover, in_place_case, random_case, rolling_case

KINDS = {in_place_case: bugs.ABOUT_MACHINES, rolling_case: bugs.ABOUT_ROLLS}
"""Where to look for mistakes that are rare among all jobs."""
ENOUGH = 400
"""Jobs after which the search is given up."""


@pytest.mark.parametrize("bug", bugs.BUGS, ids=lambda bug: bug.__name__)
def test_an_operator_with_this_bug_is_found_out(bug: bugs.Bug, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        kind = next((kind for kind, about in KINDS.items() if bug in about), random_case)
        covered = cover(islice(map(kind, count()), ENOUGH))
    assert covered.failed is not None, f"nothing was found in {covered}"
    why = covered.failure.removeprefix(f"{covered.failed}\n").partition("\n")[0]
    with capsys.disabled():
        print(f"\n  after {covered.runs:,} jobs: {why[:150]}")
