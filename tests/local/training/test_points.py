"""A rank is killed at an exact point of a step, or of its catch-up: each point on its own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_computed_once, assert_sound, brief, running, wait_for
from tests.local.training.points import BEFORE_TRAINING, Kill

pytestmark = pytest.mark.local

STEPS = 12
STEP = 4
"""In which somebody dies."""


@pytest.mark.parametrize(
    ("point", "counts"),
    [
        ("forward", {False}),
        ("backward", {False}),
        ("reduce-scatter", {False}),
        ("all-gather", {False}),
        # Once the victim is done with a step, so may be a survivor: then it counts as it was.
        ("vote", {False, True}),
        ("update", {False, True}),
    ],
)
def test_survivors_finish_a_step_in_which_a_rank_is_killed_and_compute_nothing_again(
    tmp_path: Path, point: str, counts: set[bool]
) -> None:
    """First the leader of a replica, some steps later another rank of another replica."""
    first = Kill(point=point, step=STEP, rank=0, marker=tmp_path / "first")
    second = Kill(point=point, step=STEP + 4, rank=1, marker=tmp_path / "second")
    trouble = {(2, 0): first, (1, 0): second}
    with running(Job(tmp_path, replicas=4, arguments=brief(steps=STEPS, compute=0.02), trouble=trouble)) as job:
        report = job.finish()
        assert first.marker.exists()
        assert second.marker.exists()
        assert [job.exit_code(2, rank=0), job.exit_code(1, rank=1)] == [-signal.SIGKILL] * 2
        assert 0 not in (job.exit_code(2, rank=1), job.exit_code(1, rank=0))
        assert_sound(report, steps=STEPS)
        assert_computed_once(job, (0, 3), steps=STEPS)
        assert [(f["replica"], f["attempt"]) for f in report["failures"]] == [(2, 0), (1, 0)]
        assert {2 in contributors for contributors in contributors_of(job, first.step)} <= counts
        assert {1 in contributors for contributors in contributors_of(job, second.step)} <= counts
        assert contributors_of(job, second.step + 2) == {(0, 3)}


def contributors_of(job: Job, step: int) -> set[tuple[int, ...]]:
    """What all who recorded a step say about who contributed to it."""
    return {tuple(record["contributors"]) for record in job.steps() if record["step"] == step}


@pytest.mark.parametrize(("point", "rank"), [("download", 1), ("replay", 0)])
def test_a_joiner_that_is_killed_while_it_catches_up_disturbs_nobody_and_comes_again(
    tmp_path: Path, point: str, rank: int
) -> None:
    kill = Kill(point=point, step=BEFORE_TRAINING, rank=rank, marker=tmp_path / "reached")
    arguments = brief(steps=36, compute=0.02)
    with running(Job(tmp_path, arguments=arguments, trouble={(2, 1): kill}, lingers_after=5)) as job:
        job.wait_for_step(2)
        job.kill(2)
        job.start_replica(2, attempt=1)
        wait_for(f"the {point} of replica 2", kill.marker.exists)
        job.replace(2, attempt=1)
        report = job.finish()
        assert_sound(report, steps=36)
        assert_computed_once(job, (0, 1), steps=36)
        assert [(f["replica"], f["attempt"]) for f in report["failures"]] == [(2, 0), (2, 1)]
        assert [(j["replica"], j["attempt"]) for j in report["joins"]] == [(2, 2)]
        assert not job.passes(2, attempt=2)[0] <= 2


def test_who_is_no_neighbour_of_the_dead_learns_of_it_long_before_any_timeout(tmp_path: Path) -> None:
    kill = Kill(point="reduce-scatter", step=STEP, rank=0, marker=tmp_path / "reached")
    arguments = brief(steps=STEPS, compute=0.02)
    with running(Job(tmp_path, replicas=5, ranks=1, arguments=arguments, trouble={(2, 0): kill})) as job:
        report = job.finish()
        assert kill.marker.exists()
        assert_sound(report, steps=STEPS)
        assert_computed_once(job, (0, 1, 3, 4), steps=STEPS)
        assert [f["replica"] for f in report["failures"]] == [2]
        broken = {s["replica"]: s for s in job.steps() if s["step"] == STEP}
        assert {r: s["outcome"] for r, s in broken.items()} == dict.fromkeys((0, 1, 3, 4), "retried")
        # A ring that is only silent is given up after 5 s.
        assert max(broken[r]["ended"] - broken[r]["began"] for r in (0, 4)) < 3.0


def test_two_replicas_that_are_killed_in_one_step_cost_the_others_no_pass(tmp_path: Path) -> None:
    kills = {
        (replica, 0): Kill(point=point, step=STEP, rank=rank, marker=tmp_path / f"reached-{replica}")
        for replica, point, rank in [(1, "reduce-scatter", 0), (2, "reduce-scatter", 1)]
    }
    arguments = brief(steps=STEPS, compute=0.02)
    with running(Job(tmp_path, replicas=4, arguments=arguments, trouble=kills)) as job:
        report = job.finish()
        assert all(kill.marker.exists() for kill in kills.values())
        assert_sound(report, steps=STEPS)
        assert_computed_once(job, (0, 3), steps=STEPS)
        assert sorted((f["replica"], f["attempt"]) for f in report["failures"]) == sorted(kills)
        assert contributors_of(job, STEP) == {(0, 3)}
