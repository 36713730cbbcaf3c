"""The report of a run, against figures computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fthsdp.coordinator.events import Decided, Effect, Finished, Left, Removed, Stalled, Started
from fthsdp.coordinator.messages import Cause, EpochRecord, JoinRecord, Member, Outcome, Records, Role, StepRecord
from fthsdp.coordinator.record import RunEvent, RunRecord, event_of
from fthsdp.data.lanes import POSITIONS

START = 1000.0
"""Unix time at which the first epoch begins."""


def step(replica: int, number: int, began: float, ended: float, **changes: Any) -> StepRecord:
    """A step of replica ``replica`` in a run of three that deals four samples to each; times since the start."""
    first = (number - 1) * 12
    fields: dict[str, Any] = {
        "replica": replica, "attempt": 0, "step": number, "epoch": 1, "role": Role.ACTIVE, "began": START + began,
        "ended": START + ended, "samples": ((first + 4 * replica, first + 4 * replica + 4),),
        "contributors": (0, 1, 2), "total_samples": 12, "loss": 1 / number, "digest": f"d{number}",
        "outcome": "normal", "trained": ((first, first + 12),),
    }  # fmt: skip
    return StepRecord(**(fields | changes))


def decided(number: int, at_step: int, *stepped_in: int) -> Decided:
    member = Member(replica=0, attempt=0, role=Role.ACTIVE, addresses=("h:1",))
    record = EpochRecord(number=number, members=(member,), outcome=Outcome(step=at_step))
    return Decided(record=record, stepped_in=stepped_in)


def removed(replica: int, at: float, *, member: bool = True) -> Removed:
    return Removed(replica=replica, attempt=0, cause=Cause.EXITED, reason="killed", member=member, detected=START + at)


class Run:
    """A record that is fed in the order in which things happen."""

    def __init__(self) -> None:
        self.record = RunRecord(replicas=3)
        self.happens(decided(1, 0), 0.0)

    def happens(self, effect: Effect, at: float) -> None:
        event = event_of(effect, START + at)
        assert event is not None
        self.record.note(event)

    def steps(self, *steps: StepRecord) -> None:
        for one in steps:
            self.record.add(Records(steps=(one,)))

    def quiet(self, first: int, last: int, *replicas: int, seconds: float = 1.0, began: float = 0.0) -> None:
        """Steps of equal length, one after the other."""
        for number in range(first, last + 1):
            at = began + (number - first) * seconds
            self.steps(*(step(r, number, at, at + seconds) for r in replicas))

    @property
    def report(self) -> dict[str, Any]:
        return self.record.report()


def test_an_undisturbed_run() -> None:
    run = Run()
    run.quiet(1, 4, 0, 1, 2)
    run.happens(Finished(step=4), 4.1)
    assert run.report == {
        "outcome": "complete",
        "replicas": 3,
        "spares": 0,
        "started": 1000.0,
        "starts": [],
        "steps_final": 4,
        "effective_training_time": 1.0,
        "step_seconds": {"p50": 1.0, "p99": 1.0},
        "failures": [],
        "joins": [],
        "leaves": [],
        "stalls": [],
        "samples": {"trained": 48, "duplicated": 0, "missing": 0, "pending": 0},
        "digests": {"compared": 8, "mismatched": 0},
        "outcomes": {"compared": 4, "mismatched": 0},
        "totals": {"failures": 0, "joins": 0, "leaves": 0, "starts": 0, "stalls": 0},
    }


def test_an_empty_run_has_a_report_without_invented_figures() -> None:
    report = RunRecord(replicas=3).report()
    assert report["outcome"] == "running"
    assert report["effective_training_time"] is None
    assert report["step_seconds"] == {"p50": None, "p99": None}
    assert report["samples"] == {"trained": 0, "duplicated": 0, "missing": 0, "pending": 0}


def failed_run(outcome: str = "retried") -> Run:
    """Replica 2 dies at 4.5 s in step 5; survivors 0 and 1 need 1.4 s and 1.6 s for it instead of 1 s."""
    run = Run()
    run.quiet(1, 4, 0, 1, 2)
    run.happens(removed(2, 4.5), 4.5)
    run.happens(decided(2, 4), 4.7)
    fields: dict[str, Any] = {"epoch": 2, "outcome": outcome, "contributors": (0, 1), "total_samples": 8}
    trained = ((48, 56),)
    run.steps(step(0, 5, 4.0, 5.4, **fields, trained=trained, returned=((56, 60),)))
    run.steps(step(1, 5, 4.0, 5.6, **fields, trained=trained, returned=((56, 60),)))
    return run


def test_a_failure_says_when_it_was_seen_when_decided_and_how_long_the_survivors_stalled() -> None:
    (failure,) = failed_run().report["failures"]
    assert failure == {
        "replica": 2,
        "attempt": 0,
        "cause": "Exited",
        "reason": "killed",
        "member": True,
        "detected_s": 4.5,
        "decided_s": 4.7,
        "stall_s": 0.5,  # median of 0.4 and 0.6
        "step_outcome": "retried",
        "stepped_in": [],
    }


def test_a_step_that_anybody_rolled_forward_was_rolled_forward() -> None:
    run = failed_run()
    run.steps(step(0, 6, 5.4, 6.4), step(1, 6, 5.6, 6.6))
    assert run.report["failures"][0]["step_outcome"] == "retried"
    assert failed_run("rolled-forward").report["failures"][0]["step_outcome"] == "rolled-forward"


def test_a_failure_between_two_steps_stalls_nobody() -> None:
    run = Run()
    run.quiet(1, 4, 0, 1, 2)
    run.happens(removed(2, 4.01), 4.01)
    run.happens(decided(2, 4), 4.02)
    run.quiet(5, 6, 0, 1, began=4.05)
    assert run.report["failures"][0]["stall_s"] is None
    assert run.report["failures"][0]["step_outcome"] == "untouched"


def test_a_newcomer_that_dies_before_it_was_a_member_disturbs_no_step() -> None:
    run = Run()
    run.quiet(1, 4, 0, 1, 2)
    run.happens(removed(2, 2.5, member=False), 2.5)
    (failure,) = run.report["failures"]
    assert (failure["member"], failure["stall_s"], failure["decided_s"]) == (False, None, None)


def test_two_failures_at_one_decision_share_its_time() -> None:
    run = Run()
    run.quiet(1, 4, 0, 1, 2)
    run.happens(removed(1, 4.2), 4.2)
    run.happens(removed(2, 4.3), 4.3)
    run.happens(decided(2, 4), 4.5)
    assert [f["decided_s"] for f in run.report["failures"]] == [4.5, 4.5]


def test_a_failure_names_the_spare_that_stepped_in() -> None:
    run = Run()
    run.quiet(1, 4, 0, 1, 2)
    run.happens(removed(1, 4.2), 4.2)
    run.happens(decided(2, 4, 3), 4.5)
    assert run.report["failures"][0]["stepped_in"] == [3]


def test_a_join_is_timed_and_compared_with_quiet_steps() -> None:
    run = Run()
    run.quiet(1, 4, 0, 1, seconds=1.0)
    run.quiet(5, 8, 0, 1, seconds=1.1, began=4.5)
    run.record.add(
        Records(
            joins=(
                JoinRecord(
                    replica=2, attempt=1, started=START + 4.2, active=START + 9.0, first_step=9, bytes=640,
                    replayed_steps=3,
                ),
            )
        )
    )  # fmt: skip
    assert run.report["joins"] == [
        {
            "replica": 2,
            "attempt": 1,
            "latency_s": 4.8,
            "active_s": 9.0,
            "first_step": 9,
            "bytes": 640,
            "replayed_steps": 3,
            "survivor_slowdown": 0.1,
        }
    ]


def test_too_few_steps_make_no_slowdown() -> None:
    run = Run()
    run.quiet(1, 4, 0)
    join = JoinRecord(
        replica=2, attempt=1, started=START + 2.5, active=START + 4.2, first_step=5, bytes=1, replayed_steps=0
    )
    run.record.add(Records(joins=(join,)))
    assert run.report["joins"][0]["survivor_slowdown"] is None


def test_samples_that_wait_to_be_dealt_again_are_pending_and_then_trained() -> None:
    run = failed_run()
    # The highest trained sample is 55, so nothing below it is missing yet.
    assert run.report["samples"] == {"trained": 56, "duplicated": 0, "missing": 0, "pending": 0}
    fields: dict[str, Any] = {"contributors": (0, 1), "total_samples": 8, "epoch": 2}
    run.steps(step(0, 6, 5.4, 6.4, **fields, trained=((60, 68),), returned=((56, 60),)))
    assert run.report["samples"] == {"trained": 64, "duplicated": 0, "missing": 0, "pending": 4}
    run.steps(step(0, 7, 6.4, 7.4, **fields, trained=((56, 60), (68, 72))))
    assert run.report["samples"] == {"trained": 72, "duplicated": 0, "missing": 0, "pending": 0}


def test_lost_and_repeated_samples_are_found() -> None:
    run = Run()
    run.steps(step(0, 1, 0, 1, trained=((0, 12),)))
    run.steps(step(0, 2, 1, 2, trained=((10, 14), (16, 24))))
    assert run.report["samples"] == {"trained": 22, "duplicated": 2, "missing": 2, "pending": 0}


def shadow(number: int) -> StepRecord:
    """A step as a replica recorded it that was catching up."""
    return step(2, number, number - 1, number, role=Role.SHADOW, samples=(), trained=())


def test_samples_of_a_step_of_which_only_a_shadow_lives_to_tell_are_taken_for_trained() -> None:
    run = Run()
    run.steps(step(0, 1, 0, 1), shadow(2), step(0, 3, 2, 3))
    assert run.report["samples"] == {"trained": 36, "duplicated": 0, "missing": 0, "pending": 0}


def test_a_step_counts_once_whether_its_samples_are_told_before_or_after_a_shadow_s_record() -> None:
    run = Run()
    run.steps(shadow(1), step(0, 1, 0, 1), step(0, 2, 1, 2), shadow(2))
    assert run.report["samples"] == {"trained": 24, "duplicated": 0, "missing": 0, "pending": 0}


def test_digests_and_outcomes_that_differ_are_counted() -> None:
    run = Run()
    run.steps(step(0, 1, 0, 1), step(1, 1, 0, 1, digest="other"), step(2, 1, 0, 1, digest=""))
    run.steps(step(0, 2, 1, 2), step(1, 2, 1, 2, contributors=(0, 1)))
    assert run.report["digests"] == {"compared": 2, "mismatched": 1}
    assert run.report["outcomes"] == {"compared": 2, "mismatched": 1}


def test_records_that_arrive_twice_count_once() -> None:
    run = Run()
    records = Records(
        steps=(step(0, 1, 0, 1), step(0, 2, 1, 2)),
        joins=(JoinRecord(replica=0, attempt=0, started=1, active=2, first_step=1, bytes=3, replayed_steps=4),),
    )
    assert run.record.add(records) == records
    assert run.record.add(records) == Records()
    assert run.report["digests"]["compared"] == 0
    assert len(run.report["joins"]) == 1


def test_lines_come_once_per_step_and_in_order_whoever_is_first() -> None:
    run = Run()
    run.steps(step(1, 1, 0, 1), step(2, 3, 2, 3))
    assert [line["step"] for line in run.record.take_lines()] == [1]
    run.steps(step(0, 1, 0, 1), step(0, 2, 1, 2))
    lines = run.record.take_lines()
    assert [line["step"] for line in lines] == [2, 3]
    assert lines[0] == {
        "step": 2,
        "loss": 0.5,
        "active": 3,
        "contributors": [0, 1, 2],
        "seconds": 1.0,
        "samples": 12,
        "epoch": 1,
        "outcome": "normal",
    }
    assert run.record.take_lines() == []


def test_a_coordinator_without_a_past_begins_to_print_where_the_records_begin() -> None:
    run = Run()
    run.steps(step(0, 41, 0, 1), step(0, 42, 1, 2))
    assert [line["step"] for line in run.record.take_lines()] == [41, 42]


def test_steps_of_a_shadow_have_a_digest_but_no_duration() -> None:
    run = Run()
    run.quiet(1, 3, 0)
    run.steps(step(2, 3, 50, 50.001, attempt=1, role=Role.SHADOW))
    assert run.report["step_seconds"] == {"p50": 1.0, "p99": 1.0}
    assert run.report["digests"]["compared"] == 1


def started(at_step: int, *replaced: int) -> Started:
    return Started(epoch=4, step=at_step, replicas=(0, 1, 2), replaced=replaced)


def test_a_run_that_starts_again_from_its_beginning_forgets_its_steps_but_not_its_failures() -> None:
    run = failed_run()
    run.happens(Decided(record=None), 6.0)
    run.happens(started(0), 7.0)
    assert (run.record.step, run.record.loss) == (0, None)
    run.steps(*(step(r, n, 6.0 + n, 7.0 + n, attempt=1) for n in (1, 2) for r in range(3)))
    assert run.report["steps_final"] == 2
    assert run.report["samples"] == {"trained": 24, "duplicated": 0, "missing": 0, "pending": 0}
    assert len(run.report["failures"]) == 1
    assert run.report["failures"][0]["stall_s"] == 0.5


def test_a_run_that_starts_again_from_a_checkpoint_keeps_the_steps_up_to_it() -> None:
    run = failed_run()
    assert [line["step"] for line in run.record.take_lines()] == [1, 2, 3, 4, 5]
    run.happens(Decided(record=None), 6.0)
    run.happens(started(3, 1), 7.0)
    assert run.record.step == 3
    assert run.report["samples"]["trained"] == 36
    run.steps(*(step(r, 4, 10.0, 11.0, attempt=1) for r in range(3)))
    assert run.report["steps_final"] == 4
    assert run.report["samples"] == {"trained": 48, "duplicated": 0, "missing": 0, "pending": 0}
    assert [line["step"] for line in run.record.take_lines()] == [4]
    assert run.report["starts"] == [{"epoch": 4, "step": 3, "replicas": [0, 1, 2], "replaced": [1], "started_s": 7.0}]
    # Steps 1 to 3 count, and 4 of the second time: 12 laps of 1 s in 11 s of 3 replicas.
    assert run.report["effective_training_time"] == pytest.approx(12 / (3 * 11), abs=1e-4)


def test_a_start_that_is_told_twice_is_one() -> None:
    run = failed_run()
    run.happens(started(3), 7.0)
    run.steps(*(step(r, 4, 10.0, 11.0, attempt=1) for r in range(3)))
    run.happens(started(3), 12.0)
    assert run.report["steps_final"] == 4
    assert len(run.report["starts"]) == 1


def test_a_run_that_starts_from_a_checkpoint_of_another_run_takes_the_samples_before_it_for_trained() -> None:
    run = Run()
    run.happens(started(40), 0.0)
    waiting, last = ((4, 8), (100, 104)), ((480, 488), (92, 96))
    run.steps(step(0, 41, 0, 1, trained=last, returned=waiting, total_samples=12))
    assert run.report["samples"] == {"trained": 12, "duplicated": 0, "missing": 0, "pending": 8}
    run.steps(step(0, 42, 1, 2, trained=(*waiting, (489, 493)), total_samples=12))
    assert run.report["samples"] == {"trained": 24, "duplicated": 0, "missing": 1, "pending": 0}
    assert [line["step"] for line in run.record.take_lines()] == [41, 42]


def lane(number: int, start: int, stop: int) -> tuple[int, int]:
    return number * POSITIONS + start, number * POSITIONS + stop


def lane_step(number: int, *trained: tuple[int, int], returned: tuple[tuple[int, int], ...] = ()) -> StepRecord:
    return step(0, number, number, number + 1.0, samples=(), trained=trained, returned=returned)


def test_samples_of_a_stream_are_counted_lane_by_lane() -> None:
    run = Run()
    run.steps(
        lane_step(1, lane(0, 0, 4), lane(2, 0, 4), returned=(lane(1, 0, 4),)),
        lane_step(2, lane(1, 0, 2), lane(3, 0, 4), returned=(lane(1, 2, 4),)),
        lane_step(3, lane(0, 5, 6), lane(1, 4, 5), returned=(lane(1, 2, 4),)),
    )
    assert run.report["samples"] == {"trained": 16, "duplicated": 0, "missing": 1, "pending": 2}


def test_lanes_go_on_where_a_checkpoint_of_another_run_left_them() -> None:
    run = Run()
    run.steps(
        lane_step(101, lane(0, 50, 54), returned=(lane(2, 7, 9),)),
        lane_step(102, lane(1, 60, 64), returned=(lane(2, 7, 9),)),
        lane_step(103, lane(2, 7, 9), lane(2, 30, 34)),
    )
    assert run.report["samples"] == {"trained": 14, "duplicated": 0, "missing": 0, "pending": 0}


def test_effective_training_time_counts_what_dead_and_stalled_replicas_did_not_do() -> None:
    run = failed_run()
    # 4 steps of 3 replicas and one of 2, each at 1 s, in 5.6 s of 3 replicas.
    assert run.report["effective_training_time"] == pytest.approx(14 / (3 * 5.6), abs=1e-4)


def test_samples_per_second_are_those_of_the_newest_steps() -> None:
    run = Run()
    assert run.record.samples_per_second(START) is None
    run.quiet(1, 30, 0, 1, 2)
    run.quiet(31, 60, 0, 1, 2, seconds=2.0, began=30.0)
    assert run.record.samples_per_second(START + 91) == 6.0


def test_nothing_is_trained_while_no_step_ends() -> None:
    run = Run()
    run.quiet(1, 30, 0, 1, 2)
    assert run.record.samples_per_second(START + 34) == 12.0
    assert run.record.samples_per_second(START + 36) == 0.0


def test_leaving_is_no_failure() -> None:
    run = Run()
    run.happens(Left(replica=1, attempt=0, reason="SIGTERM"), 3.0)
    run.happens(Left(replica=1, attempt=0, reason="SIGTERM"), 4.0)
    assert run.report["failures"] == []
    assert run.report["leaves"] == [{"replica": 1, "attempt": 0, "reason": "SIGTERM", "left_s": 3.0}]


def test_a_stall_is_on_record() -> None:
    run = Run()
    run.happens(Stalled(step=6, reason="replica 0: 2 in body of step 6"), 300.0)
    assert run.report["stalls"] == [{"step": 6, "reason": "replica 0: 2 in body of step 6", "noticed_s": 300.0}]


def test_events_survive_as_json() -> None:
    event = event_of(removed(2, 4.5), START)
    assert event is not None
    assert RunEvent.model_validate_json(event.model_dump_json()) == event
