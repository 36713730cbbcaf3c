"""The demo's job, from the outside: a replica dies, the others train on, it comes back, and the record proves it.

Compute is emulated, so that a starting process does not take the survivors' processors. What a death and a join cost
the others is measured by tests/bench.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.local
DEADLINE = 240.0
PATIENT_STEPS = 42
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama.yaml"


def run(folder: Path, *options: str, steps: int, emulate: float) -> tuple[dict[str, Any], str]:
    """Run the example with other sizes; return its report and what was printed."""
    job = yaml.safe_load(EXAMPLE.read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["args"] += ["--steps", str(steps), "--emulate-compute", str(emulate)]
    return launch(folder, job, *options)


def run_until_somebody_joined(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run the example with two replicas of one rank, until one has come back; return report and what was printed."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"] |= {"replicas": 2, "podsPerReplica": 1, "minReplicas": 1}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    joins = folder / "run" / "joins.jsonl"
    container["command"] = ["python", "-m", "tests.local.run.patient", str(joins), "10"]
    container["args"] += ["--steps", str(PATIENT_STEPS), "--emulate-compute", "0.02"]
    return launch(folder, job, *options)


def launch(folder: Path, job: dict[str, Any], *options: str) -> tuple[dict[str, Any], str]:
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "fthsdp_operator.cli", "run", "job.yaml", "--out", "run", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return report, done.stdout


def assert_nothing_went_wrong(report: dict[str, Any], *, steps: int) -> None:
    assert report["outcome"] == "complete"
    assert report["steps_final"] == steps
    assert (report["samples"]["duplicated"], report["samples"]["missing"]) == (0, 0)
    assert report["digests"]["compared"] > 0
    assert report["digests"]["mismatched"] == 0


def test_a_killed_replica_comes_back_and_the_record_proves_it(tmp_path: Path) -> None:
    report, printed = run(tmp_path, "--inject", "kill:replica=2@step=5", steps=40, emulate=0.2)
    assert_nothing_went_wrong(report, steps=40)
    assert report["digests"]["compared"] > 40
    (failure,) = report["failures"]
    assert (failure["replica"], failure["attempt"]) == (2, 0)
    (join,) = report["joins"]
    assert (join["replica"], join["attempt"]) == (2, 1)
    assert sorted(p.name for p in (tmp_path / "run" / "logs").glob("*-a1-*")) == [
        "tiny-llama-r2-a1-0.log",
        "tiny-llama-r2-a1-1.log",
    ]
    assert "Replica 2 (attempt 0) died" in printed
    assert "No sample was lost or repeated" in printed
    assert "All replicas are bit-identical" in printed
    assert (tmp_path / "run" / "run.png").stat().st_size > 10_000


def test_a_frozen_replica_is_replaced(tmp_path: Path) -> None:
    report, _ = run_until_somebody_joined(tmp_path, "--inject", "freeze:replica=1@step=5")
    assert_nothing_went_wrong(report, steps=PATIENT_STEPS)
    assert [(failure["replica"], failure["cause"]) for failure in report["failures"]] == [(1, "Silent")]
    assert [(join["replica"], join["attempt"]) for join in report["joins"]] == [(1, 1)]


def test_a_deleted_replica_is_replaced(tmp_path: Path) -> None:
    report, _ = run_until_somebody_joined(tmp_path, "--inject", "delete:replica=1@step=5")
    assert_nothing_went_wrong(report, steps=PATIENT_STEPS)
    assert [(left["replica"], left["attempt"]) for left in report["leaves"]] == [(1, 0)]
    assert report["failures"] == []
    assert [(join["replica"], join["attempt"]) for join in report["joins"]] == [(1, 1)]


def test_a_data_path_that_does_not_exist_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"] |= {"replicas": 1, "podsPerReplica": 1, "minReplicas": 1}
    job["spec"]["template"]["spec"]["containers"][0]["args"] += ["--data", "/nowhere/at/all"]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "fthsdp_operator.cli", "run", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "/nowhere/at/all" in line
    assert [p.name for p in tmp_path.iterdir()] == ["job.yaml"]
