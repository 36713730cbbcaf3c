"""The report of a run in plain words. Pure: report in, lines out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["summarise"]

Report = dict[str, Any]


def summarise(report: Report, *, folder: Path, picture: Path | None) -> list[str]:
    """Say what happened: what died, how long the others stalled, samples, digests, and where the files are."""
    lines = [_headline(report)]
    lines += [_failure(f) for f in report["failures"]] or ["Nothing died."]
    lines += [_join(j) for j in report["joins"]]
    lines += [_samples(report["samples"]), _digests(report["digests"])]
    lines += [f"Report:  {folder / 'report.json'}"]
    return lines if picture is None else [*lines, f"Picture: {picture}"]


def _headline(report: Report) -> str:
    seconds = report["step_seconds"]
    steps = _count(report["steps_final"], "step")
    pace = "" if seconds["p50"] is None else f", half of them within {_seconds(seconds['p50'])}"
    share = report["effective_training_time"]
    useful = "" if share is None else f"; {share:.1%} of the replicas' time was training"
    spares = f" and {_count(report['spares'], 'spare')}" if report["spares"] else ""
    width = f"{_count(report['replicas'], 'replica')}{spares}"
    return f"{str(report['outcome']).capitalize()}: {steps} on {width}{pace}{useful}."


_STEP_OUTCOMES = {
    "retried": "; the step in flight was finished without it, from the gradients that were there",
    "rolled-forward": "; the step in flight was finished with its contribution",
    "untouched": "; no step was in flight",
}


def _failure(failure: Report) -> str:
    stall, when = failure["stall_s"], failure["detected_s"]
    died = "before the run began" if when is None else f"{_seconds(when)} into the run"
    if stall is None:
        stalled = "how long the others stalled is not known"
    else:
        stalled = f"the others stalled {_seconds(stall)}" if stall >= 0.001 else "the others did not stall measurably"
    step = _STEP_OUTCOMES.get(failure["step_outcome"], "")
    return (
        f"Replica {failure['replica']} (attempt {failure['attempt']}) died {died}"
        f" ({failure['cause']}: {failure['reason']}); {stalled}{step}{_stepped_in(failure['stepped_in'])}."
    )


def _stepped_in(replicas: Sequence[int]) -> str:
    if not replicas:
        return ""
    names = " and ".join(str(replica) for replica in replicas)
    return f"; replica {names} took over" if len(replicas) == 1 else f"; replicas {names} took over"


def _join(join: Report) -> str:
    slowdown = join["survivor_slowdown"]
    others = "" if slowdown is None else f"; meanwhile the others' steps took {_change(slowdown)} time"
    return (
        f"Replica {join['replica']} (attempt {join['attempt']}) joined {_seconds(join['latency_s'])} after its start:"
        f" {_bytes(join['bytes'])} downloaded, {_count(join['replayed_steps'], 'step')} replayed{others}."
    )


def _change(share: float) -> str:
    return f"{abs(share):.0%} {'less' if share < 0 else 'more'}"


def _samples(samples: Report) -> str:
    wrong = [f"{samples[kind]:,} {word}" for kind, word in (("duplicated", "repeated"), ("missing", "lost"))
             if samples[kind]]  # fmt: skip
    if wrong:
        return f"SAMPLES WENT WRONG: {' and '.join(wrong)}, of {samples['trained']:,} trained."
    return f"No sample was lost or repeated: {samples['trained']:,} trained, each exactly once."


def _digests(digests: Report) -> str:
    if digests["mismatched"]:
        return f"THE REPLICAS DIFFER: {digests['mismatched']:,} of {digests['compared']:,} digests do not match."
    if not digests["compared"]:
        return "No digests could be compared: at no step were two replicas active."
    return f"All replicas are bit-identical: {digests['compared']:,} digests compared, none differs."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 1 else f"{seconds:.1f} s"


def _bytes(number: int) -> str:
    size, unit = float(number), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
