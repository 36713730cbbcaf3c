"""The plain words at the end of a run."""

from pathlib import Path
from typing import Any

from fthsdp_operator.reports.summary import summarise


def report(**changes: Any) -> dict[str, Any]:
    whole = {
        "outcome": "complete",
        "replicas": 3,
        "spares": 0,
        "steps_final": 60,
        "effective_training_time": 0.912,
        "step_seconds": {"p50": 0.51, "p99": 1.2},
        "failures": [],
        "joins": [],
        "samples": {"trained": 1440, "duplicated": 0, "missing": 0},
        "digests": {"compared": 140, "mismatched": 0},
    }
    return whole | changes


def words(of: dict[str, Any]) -> str:
    return "\n".join(summarise(of, folder=Path("runs/demo"), picture=None))


FAILURE = {
    "replica": 2, "attempt": 0, "cause": "Exited", "reason": "r2-0 exit 137", "detected_s": 10.24,
    "decided_s": 10.26, "stall_s": 0.12,
    "step_outcome": "retried",
    "stepped_in": [],
}  # fmt: skip
JOIN = {
    "replica": 2, "attempt": 1, "latency_s": 9.8, "bytes": 11_534_336, "replayed_steps": 14, "survivor_slowdown": 0.03
}  # fmt: skip


def test_it_says_what_died_how_long_the_others_stalled_and_who_came_back() -> None:
    text = words(report(failures=[FAILURE], joins=[JOIN]))
    assert "Complete: 60 steps on 3 replicas" in text
    assert "Replica 2 (attempt 0) died 10.2 s into the run (Exited: r2-0 exit 137); the others stalled 120 ms" in text
    assert "the step in flight was finished without it" in text
    assert "Replica 2 (attempt 1) joined 9.8 s after its start: 11.5 MB downloaded, 14 steps replayed" in text
    assert "meanwhile the others' steps took 3% more time." in text
    quicker = words(report(joins=[JOIN | {"survivor_slowdown": -0.17}]))
    assert "meanwhile the others' steps took 17% less time." in quicker


def test_it_names_the_spares_and_who_took_over() -> None:
    text = words(report(spares=2, failures=[FAILURE | {"stepped_in": [3]}, FAILURE | {"stepped_in": [3, 4]}]))
    assert "Complete: 60 steps on 3 replicas and 2 spares" in text
    assert "; replica 3 took over." in text
    assert "; replicas 3 and 4 took over." in text
    assert "took over" not in words(report(failures=[FAILURE]))
    assert "spare" not in words(report())


def test_it_says_that_samples_and_digests_are_right_or_shouts_that_they_are_not() -> None:
    assert "No sample was lost or repeated: 1,440 trained" in words(report())
    assert "All replicas are bit-identical: 140 digests compared" in words(report())
    wrong = report(samples={"trained": 9, "duplicated": 1, "missing": 2}, digests={"compared": 4, "mismatched": 1})
    text = words(wrong)
    assert "SAMPLES WENT WRONG: 1 repeated and 2 lost" in text
    assert "THE REPLICAS DIFFER: 1 of 4" in text


def test_it_does_not_claim_what_was_not_measured() -> None:
    unknown = report(
        failures=[FAILURE | {"stall_s": None}],
        joins=[JOIN | {"survivor_slowdown": None}],
        digests={"compared": 0, "mismatched": 0},
        step_seconds={"p50": None, "p99": None},
        effective_training_time=None,
    )
    text = words(unknown)
    assert "not known" in text
    assert "bit-identical" not in text
    assert "None" not in text


def test_it_says_in_words_that_nobody_stalled() -> None:
    assert "the others did not stall measurably" in words(report(failures=[FAILURE | {"stall_s": 0.0}]))


def test_it_says_where_report_and_picture_are() -> None:
    text = "\n".join(summarise(report(), folder=Path("runs/demo"), picture=Path("runs/demo/run.png")))
    assert "runs/demo/report.json" in text
    assert "runs/demo/run.png" in text
    assert "Picture" not in words(report())
