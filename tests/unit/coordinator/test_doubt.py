"""A coordinator that could not hear the others takes nobody out for it, and finds out whom it could have heard."""

from __future__ import annotations

import pytest
from tests.unit.coordinator.test_membership import Job, installed

from fthsdp.coordinator.events import Effect, Fenced, Removed, StoreAnswered, Tick
from fthsdp.coordinator.messages import Cause, Exited

WAY_BACK = 4.0
"""Seconds that a leader may need to find out that the network is back, and to connect."""


def removed(effects: list[Effect]) -> list[tuple[int, Cause]]:
    return [(e.replica, e.cause) for e in effects if isinstance(e, Removed)]


def cut_off(job: Job, seconds: float, *beside: int) -> list[Effect]:
    """Let the coordinator hear nobody for so long, nor its store, but replicas on the same machine."""
    job.cut_off = True
    effects = job.pass_time(seconds, *beside)
    job.cut_off = False
    return effects


def come_back(job: Job) -> list[Effect]:
    """One leader is back at once, the others a while later, and the job goes on."""
    job.hello(0)
    effects = job.pass_time(WAY_BACK, 0)
    job.hello(1)
    job.hello(2)
    return effects + job.pass_time(10, 0, 1, 2)


@pytest.mark.parametrize("beside", [(), (0,)], ids=["alone", "with a replica on its machine"])
@pytest.mark.parametrize("seconds", [2, 4, 9, 40, 600])
def test_a_coordinator_that_was_cut_off_blames_nobody(seconds: float, beside: tuple[int, ...]) -> None:
    job = Job().started(step=5)
    away = [replica for replica in range(3) if replica not in beside]
    effects = cut_off(job, seconds, *beside)
    effects += job.pass_time(min(WAY_BACK, seconds / 2), *beside)
    for replica in away:
        job.hello(replica)
        effects += job.effects
    effects += job.pass_time(20, 0, 1, 2)
    assert not [e for e in effects if isinstance(e, Removed | Fenced)]


def test_nor_does_it_when_old_connections_are_reset_before_their_leaders_are_back() -> None:
    job = Job().started(step=5)
    effects = cut_off(job, 40)
    effects += job.pass_time(1)
    for replica in range(3):
        effects += job.cut(replica)
    effects += job.pass_time(1)
    job.hello(2)
    effects += job.pass_time(2, 2)
    job.hello(0)
    job.hello(1)
    effects += job.pass_time(20, 0, 1, 2)
    assert not removed(effects)


def test_the_ring_of_a_replica_on_its_machine_breaks_and_nobody_is_lost() -> None:
    job = Job().started(step=5)
    job.cut_off = True
    effects = job.pass_time(5, 0)
    effects += job.say(0, broken=1, suspects=(1, 2), reason="silent")
    effects += job.pass_time(60, 0)
    effects += job.cut(1)  # the kernel has given it up
    effects += job.pass_time(5, 0)
    job.cut_off = False
    effects += job.pass_time(1, 0)
    effects += job.cut(2)  # reset by its host
    effects += job.pass_time(2, 0)
    for replica in (1, 2):
        job.hello(replica, epoch=1, step=5, serves=True, broken=1, suspects=(0,), reason="silent")
        effects += job.effects
    assert not removed(effects)
    job.all_say(fence=1)
    assert installed(job, 0).active == (0, 1, 2)


def test_a_fence_that_nobody_could_hear_of_is_waited_for() -> None:
    job = Job().started(step=5)
    job.dies(2)
    effects = cut_off(job, 60)
    effects += job.pass_time(WAY_BACK)
    for replica in (0, 1):
        job.hello(replica)
        effects += job.effects
    job.all_say(0, 1, fence=1)
    assert not removed(effects)
    assert installed(job, 0).active == (0, 1)


@pytest.mark.parametrize(("seconds", "patience"), [(4, 5), (40, 30)])
def test_who_froze_meanwhile_is_found_out_after_the_store_has_answered(seconds: float, patience: float) -> None:
    job = Job().started(step=5)
    effects = cut_off(job, seconds, 0)
    effects += job.say(2)
    effects += job.pass_time(patience - 0.5, 0, 2)
    assert not removed(effects)
    assert removed(job.pass_time(1, 0, 2)) == [(1, Cause.SILENT)]


def test_what_is_known_does_not_wait_for_the_store() -> None:
    job = Job().started(step=5)
    job.cut_off = True
    assert not removed(job.pass_time(20, 0, 2))
    killed = Exited(replica=1, attempt=0, reason="killed", detected=job.now)
    assert removed(job.do(killed)) == [(1, Cause.EXITED)]
    assert removed(job.say(2, failed="out of step with the others")) == [(2, Cause.FAILED)]


@pytest.mark.parametrize("replicas", [1, 3])
def test_that_nobody_at_all_is_heard_is_believed_after_the_return_timeout(replicas: int) -> None:
    job = Job(replicas=replicas).started(step=5)
    assert not removed(job.pass_time(34.5))
    assert removed(job.pass_time(1)) == [(replica, Cause.SILENT) for replica in range(replicas)]


def test_leaders_that_cannot_reach_a_coordinator_whose_store_answers_have_the_return_timeout() -> None:
    job = Job().started(step=5)
    effects = job.pass_time(30)
    assert effects == []
    assert not removed(come_back(job))


def test_when_all_connections_close_at_once_all_have_time_to_come_back() -> None:
    """As when its machine slept, and its clock with it."""
    job = Job().started(step=5)
    effects = [effect for replica in range(3) for effect in job.cut(replica)]
    assert not removed(effects + come_back(job))


def test_whose_connection_closed_while_the_coordinator_stood_still_has_time_to_come_back() -> None:
    job = Job().started(step=5)
    job.now += 3600
    effects = job.do(Tick())
    effects += job.say(0, broken=1, suspects=(1, 2), reason="silent")
    effects += job.cut(1)
    effects += job.cut(2)
    effects += job.pass_time(WAY_BACK, 0)
    job.hello(1)
    job.hello(2)
    effects += job.pass_time(5, 0, 1, 2)
    assert not removed(effects)


def test_a_restarted_coordinator_that_is_cut_off_waits_on_for_the_members_it_knows() -> None:
    job = Job().started(step=5).restarted()
    effects = cut_off(job, 90)
    effects += job.pass_time(WAY_BACK)
    for replica in range(3):
        job.hello(replica)
        effects += job.effects
    effects += job.pass_time(10, 0, 1, 2)
    assert not removed(effects)


def test_leaders_that_all_leave_are_not_waited_for() -> None:
    job = Job(replicas=2).started(step=5)
    job.all_say(leaving="SIGTERM")
    job.all_say(connected=2)
    job.cut(0)
    job.cut(1)
    job.pass_time(1.5)
    assert job.core.replicas() == ()


def test_the_store_is_asked_in_the_middle_of_a_silence_and_at_its_end_and_never_while_all_talk() -> None:
    job = Job().started(step=5)
    job.cut_off = True  # the test answers in its place
    asked: list[float] = []
    for tenth in range(1, 51):
        job.now = 1000 + tenth / 10
        job.all_say(0, 2)
        if job.asked:
            asked.append(job.now)
            job.asked = False
            job.do(StoreAnswered())
    assert asked == [1002.5, 1005.0]
    assert removed(job.effects) == [(1, Cause.SILENT)]


@pytest.mark.parametrize("pace", [0.1, 0.3, 0.5, 1.0, 2.0, 4.0])
def test_who_froze_is_found_out_by_a_store_that_is_always_slow(pace: float) -> None:
    job = Job().started(step=5)
    job.cut_off = True  # the test answers in its place
    asked_at: float | None = None
    for tenth in range(1, 400):
        job.now = 1000 + tenth / 10
        job.all_say(0, 2)
        lost = removed(job.effects)
        if lost:
            break
        if job.asked:
            job.asked, asked_at = False, job.now
        elif asked_at is not None and job.now >= asked_at + pace - 0.001:
            asked_at = None
            lost = removed(job.do(StoreAnswered()))
            if lost:
                break
    assert lost == [(1, Cause.SILENT)]
    assert job.now - 1000 <= 5 + 5 + 3 * pace + 0.2  # one patience, for the first answer that was late
