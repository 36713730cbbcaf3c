"""When no restart helps, from the outside: a fault of the code ends the run, and a hopeless replica is left behind."""

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
"""Well below the 600 s for which a run that begins waits for replicas that may still come."""
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama.yaml"


def launch(folder: Path, command: list[str], *, steps: int, **spec: Any) -> subprocess.CompletedProcess[str]:
    """Run the example with another command in front of its arguments."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"] |= {"podsPerReplica": 1, **spec}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["command"] = command
    container["args"] += ["--steps", str(steps), "--emulate-compute", "0.05"]
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    run = [sys.executable, "-m", "fthsdp_operator.cli", "run", "job.yaml", "--out", "run"]
    return subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=DEADLINE)


def test_a_fault_of_the_code_in_the_middle_of_a_run_ends_it_at_once_and_says_so(tmp_path: Path) -> None:
    command = ["python", "-m", "tests.local.run.mistaken", "40"]
    done = launch(tmp_path, command, steps=60, replicas=2, minReplicas=1)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("fthsdp: ")]
    assert line.startswith(
        "fthsdp: job tiny-llama: replicas 0 and 1 of 2 failed within 60 s with exit code 1, which is a fault of the"
        " code that they run (failurePolicy.simultaneousFraction is 1): tiny-llama-r"
    )
    assert line.endswith("ValueError: no such layer in step 40")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["outcome"], report["joins"]) == ("failed", [])


def test_a_replica_that_cannot_run_is_abandoned_and_the_others_finish_without_waiting_for_it(tmp_path: Path) -> None:
    script = 'test "$FTHSDP_REPLICA" = 1 && exit 9; exec python -m fthsdp.recipes.tiny_llama "$@"'
    done = launch(tmp_path, ["sh", "-c", script, "sh"], steps=12, failurePolicy={"perReplica": {"limit": 1}})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ReplicaAbandoned: replica 1 failed again after 1 restart") == 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["outcome"], report["steps_final"]) == ("complete", 12)
    assert (report["samples"]["duplicated"], report["samples"]["missing"]) == (0, 0)
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert {tuple(step["contributors"]) for step in steps} == {(0, 2)}
