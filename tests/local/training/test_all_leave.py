"""Everybody is told to stop, as when a job is suspended: the last to leave write what they have, due or not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_sound, brief, running, wait_for

from fthsdp.checkpoint.folder import survey

pytestmark = pytest.mark.local
STEPS = 20


def job(folder: Path, *, every: int = 1000, least: int = 1, spares: int = 0, grace: str = "60") -> Job:
    """Return a run that writes no checkpoint of its own accord, unless it is told more often."""
    environment = {
        "FTHSDP_CHECKPOINT_PATH": str(folder / "checkpoints"),
        "FTHSDP_CHECKPOINT_EVERY": str(every),
        "FTHSDP_GRACE_SECONDS": grace,
    }
    arguments = brief(steps=STEPS, compute=0.02)
    return Job(
        folder,
        arguments=arguments,
        environment=environment,
        min_replicas=least,
        spares=spares,
        lingers_after=12,
        growth=1.5,
    )


def stop_all(job: Job) -> int:
    """Tell all to stop, wait until they have, and return the step of the newest checkpoint."""
    replicas = range(job.replicas + job.spares)
    for replica in replicas:
        job.signal(replica, signal.SIGTERM)
    codes = {job.exit_code(replica, rank=rank) for replica in replicas for rank in range(job.ranks)}
    assert codes == {0}, job.logs()
    return survey(job.folder / "checkpoints").whole[0].step


def go_on(job: Job) -> dict[str, object]:
    """Start all again, the coordinator too, and return the report of the end."""
    job.kill_coordinator()
    job.start_coordinator()
    for replica in range(job.replicas + job.spares):
        job.start_replica(replica, attempt=1)
    return job.finish()


@pytest.mark.parametrize(("least", "spares"), [(1, 0), (3, 0), (3, 1)])
def test_the_run_goes_on_from_the_step_at_which_the_last_have_left(tmp_path: Path, least: int, spares: int) -> None:
    with running(job(tmp_path, least=least, spares=spares)) as run:
        run.wait_for_step(5)
        left = stop_all(run)
        assert left >= 5
        assert left == max(max(run.passes(r, rank=w), default=0) for r in range(3) for w in range(2))
        report = go_on(run)
        assert_sound(report, steps=STEPS)
        assert [start["step"] for start in report["starts"]] == [0, left]
        passes = [run.passes(r, attempt=1, rank=w) for r in range(3 + spares) for w in range(2)]
        assert passes.count(list(range(left + 1, STEPS + 1))) == 6


def test_a_replica_that_dies_while_all_leave_costs_nothing(tmp_path: Path) -> None:
    with running(job(tmp_path)) as run:
        run.wait_for_step(5)
        for replica in (0, 1):
            run.signal(replica, signal.SIGTERM)
        run.kill(2)
        assert {run.exit_code(replica, rank=rank) for replica in (0, 1) for rank in range(2)} == {0}, run.logs()
        left = survey(tmp_path / "checkpoints").whole[0].step
        report = go_on(run)
        assert_sound(report, steps=STEPS)
        assert [start["step"] for start in report["starts"]] == [0, left]


def test_one_that_is_told_to_stop_alone_leaves_at_a_boundary_and_writes_nothing(tmp_path: Path) -> None:
    with running(job(tmp_path)) as run:
        run.wait_for_step(3)
        run.signal(1, signal.SIGTERM, rank=1)
        assert [run.exit_code(1, rank=rank) for rank in range(2)] == [0, 0]
        run.wait_for_step(7)
        assert not (tmp_path / "checkpoints").exists()
        report = run.finish()
        assert_sound(report, steps=STEPS)
        assert report["failures"] == []
        assert all(step["outcome"] == "normal" for step in run.steps())


def test_a_checkpoint_that_is_due_where_all_leave_is_written_once(tmp_path: Path) -> None:
    with running(job(tmp_path, every=1)) as run:
        run.wait_for_step(5)
        left = stop_all(run)
        assert run.logs().count(f"checkpoint of step {left}: training waited") == 1
        assert not survey(tmp_path / "checkpoints").broken
        assert_sound(go_on(run), steps=STEPS)


def test_who_cannot_leave_in_time_ends_and_the_newest_checkpoint_counts(tmp_path: Path) -> None:
    with running(job(tmp_path, every=4, grace="3")) as run:
        run.wait_for_step(9)
        wait_for("a checkpoint of step 8", lambda: any(it.step == 8 for it in survey(tmp_path / "checkpoints").whole))
        run.kill_coordinator()  # it is the one that lets go
        for replica in range(3):
            run.signal(replica, signal.SIGTERM)
        codes = {run.exit_code(replica, rank=rank) for replica in range(3) for rank in range(2)}
        assert 0 not in codes
        run.start_coordinator()
        for replica in range(3):
            run.start_replica(replica, attempt=1)
        report = run.finish()
        assert report["starts"][1]["step"] in (8, 12)
