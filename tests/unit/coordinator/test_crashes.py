"""What a launcher says of a crash is kept for the operator, and breaks the epoch as any exit does."""

from __future__ import annotations

import pytest
from tests.unit.coordinator.test_membership import Job

from fthsdp.coordinator.events import Removed
from fthsdp.coordinator.messages import Cause, Crash, Exited, Verdict


def crash(replica: int, attempt: int, *, pod: int = 0, code: int = 1) -> Exited:
    found = Crash(pod=pod, exit_code=code, words="it breaks")
    return Exited(replica=replica, attempt=attempt, reason="a process ended", detected=1000.0, crash=found)


def verdicts(job: Job) -> list[tuple[int, int, Cause, Crash | None]]:
    return [(it.replica, it.attempt, it.cause, it.crash) for it in job.core.verdicts]


def test_who_crashed_is_taken_out_at_once_and_the_operator_hears_how() -> None:
    job = Job().started(step=5)
    said = crash(1, 0, pod=3, code=137)
    job.do(said)
    assert [(it.replica, it.cause) for it in job.of(Removed)] == [(1, Cause.EXITED)]
    assert verdicts(job) == [(1, 0, Cause.EXITED, said.crash)]


def test_an_exit_of_which_the_operator_tells_is_no_verdict() -> None:
    job = Job().started(step=5)
    job.do(Exited(replica=1, attempt=0, reason="its pod is gone", detected=1000.0))
    assert verdicts(job) == []


def test_the_first_crash_of_an_attempt_is_kept_since_others_follow_from_it() -> None:
    job = Job().started(step=5)
    first = crash(1, 0, pod=3)
    job.do(first)
    job.do(crash(1, 0, pod=0, code=75))
    assert verdicts(job) == [(1, 0, Cause.EXITED, first.crash)]


def test_how_it_crashed_says_more_than_that_its_connection_closed() -> None:
    job = Job().started(step=5)
    job.dies(1)
    job.pass_time(1.5)
    said = crash(1, 0)
    job.do(said)
    assert verdicts(job) == [(1, 0, Cause.EXITED, said.crash)]


def test_why_it_ended_itself_says_more_than_its_exit_code() -> None:
    job = Job().started(step=5)
    job.say(1, failed="StateDiverged: its digest is another one")
    job.do(crash(1, 0, code=75))
    assert [(it.replica, it.cause) for it in job.core.verdicts] == [(1, Cause.STATE_DIVERGED)]


def test_a_crash_before_the_first_hello_is_kept_too() -> None:
    job = Job()
    said = crash(2, 0)
    job.do(said)
    assert verdicts(job) == [(2, 0, Cause.EXITED, said.crash)]


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_crash_of_an_attempt_that_is_history_changes_nothing(attempt: int) -> None:
    job = Job().started(step=5)
    job.do(crash(1, 1))
    before = job.core.verdicts
    job.hello(1, attempt=2)
    job.do(crash(1, attempt))
    assert job.core.verdicts == before
    assert not job.of(Removed)


def test_a_later_crash_takes_the_place_of_an_earlier_one() -> None:
    job = Job().started(step=5)
    job.do(crash(1, 0))
    job.do(crash(1, 1, code=9))
    (verdict,) = job.core.verdicts
    assert isinstance(verdict, Verdict)
    assert (verdict.attempt, verdict.crash) == (1, crash(1, 1, code=9).crash)
