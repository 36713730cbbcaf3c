"""A whole job against the real coordinator: start, failure, join, leaving, end; and it is killed in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from fthsdp.coordinator.client import OperatorClient
from fthsdp.coordinator.messages import Announce, Cause, Exited, Phase, Role, Welcome

pytestmark = pytest.mark.local
Make = Callable[..., Any]


def all_in(process: Any, leader: Make, count: int = 3) -> list[Any]:
    leaders = [leader(process.address, replica) for replica in range(count)]
    for one in leaders:
        one.wait_for_epoch(1)
    return leaders


def tell_exit(process: Any, replica: int, attempt: int = 0, reason: str = "exit code 137") -> Any:
    async def tell() -> Any:
        client = OperatorClient(process.address, b"k" * 32, job="job")
        try:
            return await client.exited(Exited(replica=replica, attempt=attempt, reason=reason, detected=time.time()))
        finally:
            await client.close()

    return asyncio.run(tell())


def test_a_job_survives_a_death_takes_the_next_attempt_in_and_finishes(coordinator: Make, leader: Make) -> None:
    process = coordinator()
    leaders = all_in(process, leader)
    for one in leaders:
        one.steps(1, 2)
        one.change(step=2)
    leaders[2].client.close(timeout=5)
    status = tell_exit(process, 2)
    assert [r.replica for r in status.replicas] == [0, 1]
    for one in leaders[:2]:
        assert one.wait_for_epoch(2).active == (0, 1)
        one.steps(3, replicas=2)
    back = leader(process.address, 2, 1)
    assert back.wait_for_epoch(3).member(2).role is Role.SHADOW
    back.change(step=3)
    assert back.wait_for_epoch(4).active == (0, 1, 2)
    back.joined()
    back.change(finished=3)
    for one in (*leaders[:2], back):
        one.says_goodbye()
    assert process.wait() == 0
    assert [line["step"] for line in process.lines] == [1, 2, 3]
    report = process.report
    assert report["outcome"] == "complete"
    assert [(f["replica"], f["attempt"], f["cause"], f["reason"]) for f in report["failures"]] == [
        (2, 0, "Exited", "exit code 137")
    ]
    assert [(j["replica"], j["attempt"]) for j in report["joins"]] == [(2, 1)]
    assert report["digests"]["mismatched"] == 0


def test_a_killed_coordinator_goes_on_from_the_number_it_finds(coordinator: Make, leader: Make) -> None:
    process = coordinator()
    leaders = all_in(process, leader)
    process.kill()
    again = coordinator(port=process.port)
    again.wait_for_log("going on from epoch 1")
    for one in leaders:
        one.wait(lambda me: sum(isinstance(m, Welcome) for m in me.heard) == 2, "the second welcome")
    tell_exit(again, 1)
    assert leaders[0].wait_for_epoch(2).active == (0, 2)
    assert leaders[2].wait_for_epoch(2).active == (0, 2)
    assert not again.logged("replica [02] attempt 0 is out")


def test_a_coordinator_killed_with_a_replica_finds_out_who_is_missing(coordinator: Make, leader: Make) -> None:
    process = coordinator()
    leaders = all_in(process, leader)
    process.kill()
    leaders[1].client.close(timeout=0)
    coordinator("--return-timeout", "6", port=process.port).wait_for_log(
        r"replica 1 attempt 0 is out \(ConnectionLost\)"
    )
    assert leaders[0].wait_for_epoch(2).active == (0, 2)


def test_a_coordinator_killed_during_a_join_finishes_it(coordinator: Make, leader: Make) -> None:
    process = coordinator()
    leaders = all_in(process, leader)
    tell_exit(process, 2)
    for one in leaders[:2]:
        one.wait_for_epoch(2)
        one.obedient = False
    back = leader(process.address, 2, 1)
    for one in leaders[:2]:
        one.wait_for(Announce)
    process.kill()
    for one in leaders[:2]:
        one.obedient = True
    coordinator(port=process.port)
    assert back.wait_for_epoch(3).snapshots == (2,)
    assert leaders[0].wait_for_epoch(3).active == (0, 1)


def test_of_two_coordinators_on_one_store_the_one_that_finds_another_number_ends(
    coordinator: Make, leader: Make
) -> None:
    first = coordinator(replicas=1)
    second = coordinator(replicas=1)
    leader(first.address, 0).wait_for_epoch(1)
    late = leader(second.address, 0, 5)
    assert second.wait() == 1
    assert "another coordinator of this job is running" in second.log[-1]
    assert late.state.epoch == 0


def test_a_closed_leader_is_lost_after_the_grace_and_the_others_go_on(coordinator: Make, leader: Make) -> None:
    process = coordinator("--reconnect-grace", "0.3")
    leaders = all_in(process, leader)
    leaders[1].client.close(timeout=0)
    assert leaders[0].wait_for_epoch(2).active == (0, 2)
    process.wait_for_log(r"replica 1 attempt 0 is out \(ConnectionLost\): its connection closed")


def test_a_leader_that_leaves_is_let_go_without_a_failure(coordinator: Make, leader: Make) -> None:
    process = coordinator("--reconnect-grace", "0.2")
    leaders = all_in(process, leader)
    leaders[1].change(leaving="SIGTERM")
    assert leaders[0].wait_for_epoch(2).active == (0, 2)
    leaders[1].says_goodbye()
    process.wait_for_log("replica 1 attempt 0 left: SIGTERM")
    leaders[0].change(finished=0)
    for one in (leaders[0], leaders[2]):
        one.says_goodbye()
    assert process.wait() == 0
    assert process.report["failures"] == []
    assert [e["replica"] for e in process.report["leaves"]] == [1]


IMPATIENT = ("--stall-timeout", "4", "--silence-timeout", "2", "--answer-timeout", "1")


def test_a_replica_whose_rank_never_joins_a_step_is_found_and_the_operator_is_told_where_it_hangs(
    coordinator: Make, leader: Make
) -> None:
    process = coordinator(*IMPATIENT)
    leaders = all_in(process, leader)
    leaders[1].phase = Phase.BODY
    assert leaders[0].wait_for_epoch(2).active == (0, 2)
    evidence = (
        "replica 1 rank 0 never joined the collective of step 1: it has been in the body for 60 s,"
        " at File train.py, line 7, in <module> / load()"
    )
    assert evidence in leaders[1].refusal()
    (verdict,) = tell_exit(process, 1).verdicts
    assert (verdict.replica, verdict.attempt, verdict.cause, verdict.reason) == (1, 0, Cause.HUNG, evidence)
    process.stop()
    assert [(f["cause"], f["reason"]) for f in process.report["failures"]] == [("Hung", evidence)]
    assert process.report["stalls"][0]["step"] == 1


def test_a_stall_of_all_makes_new_rings_and_costs_nobody_its_place(coordinator: Make, leader: Make) -> None:
    process = coordinator(*IMPATIENT)
    leaders = all_in(process, leader)
    assert leaders[0].wait_for_epoch(2).active == (0, 1, 2)
    process.wait_for_log("step 1 does not end though everybody has joined it")
    assert not process.logged("is out")


def test_the_coordinator_ends_at_once_when_told_to(coordinator: Make, leader: Make) -> None:
    process = coordinator()
    all_in(process, leader)
    began = time.monotonic()
    assert process.stop() == 143
    assert time.monotonic() - began < 5


def test_records_sent_again_after_a_restart_count_once(coordinator: Make, leader: Make) -> None:
    process = coordinator()
    leaders = all_in(process, leader)
    process.kill()
    for one in leaders:
        one.steps(*range(1, 1001))
    leaders[0].joined()
    middle = coordinator(port=process.port)
    middle.wait_for_log("listening")
    leaders[0].client.close(timeout=30)
    middle.kill()
    last = coordinator(port=process.port)
    for one in leaders[1:]:
        one.client.close(timeout=30)
    last.stop()
    report = last.report
    assert report["steps_final"] == 1000
    assert report["samples"] == {"trained": 12_000, "duplicated": 0, "missing": 0, "pending": 0}
    assert report["digests"] == {"compared": 2000, "mismatched": 0}
    assert len(report["joins"]) == 1
    printed = [line["step"] for line in (*middle.lines, *last.lines)]
    assert printed == sorted(set(printed))


def test_the_operator_learns_how_the_job_stands(coordinator: Make, leader: Make) -> None:
    process = coordinator()
    leaders = all_in(process, leader)
    leaders[0].steps(1)
    leaders[0].client.close(timeout=30)

    async def ask() -> Any:
        client = OperatorClient(process.address, b"k" * 32, job="job")
        try:
            return await client.status()
        finally:
            await client.close()

    status = asyncio.run(ask())
    assert (status.epoch, status.paused, status.finished, status.step, status.loss) == (1, False, False, 1, 1.0)
    assert [(r.replica, r.attempt, r.role) for r in status.replicas][1:] == [(1, 0, Role.ACTIVE), (2, 0, Role.ACTIVE)]
