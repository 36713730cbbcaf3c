"""A job with a spare, from the outside: a replica that trains dies, and no step after that one has fewer replicas."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.local.waiting import wait_for

pytestmark = pytest.mark.local
DEADLINE = 240.0
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama.yaml"

STEPS = 40
SCRIPT = (
    'echo "$FTHSDP_REPLICA $FTHSDP_ATTEMPT $$$$" >> {births}; exec python -m tests.local.run.patient {killed} 5 "$@"'
)
"""Kubernetes makes $$ of $$$$, and the shell its process number of that, which exec keeps."""


def manifest(births: Path, killed: Path) -> str:
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"] |= {"replicas": 2, "minReplicas": 2, "spares": 1, "podsPerReplica": 1}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["args"] += ["--steps", str(STEPS), "--emulate-compute", "0.02"]
    container["command"] = ["sh", "-c", SCRIPT.format(births=births, killed=killed), "sh"]
    return yaml.safe_dump(job)


def test_a_spare_takes_the_place_of_a_replica_in_the_step_in_which_it_dies(tmp_path: Path) -> None:
    births, killed, printed = tmp_path / "births", tmp_path / "killed", tmp_path / "printed"
    (tmp_path / "job.yaml").write_text(manifest(births, killed))
    command = [sys.executable, "-m", "fthsdp_operator.cli", "run", "job.yaml", "--out", "run"]
    with printed.open("w") as out, subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out) as process:
        try:
            said = re.compile(r"SpareReady: replica (\d)")
            spare = int(wait_for("a spare", lambda: said.search(printed.read_text()), seconds=DEADLINE)[1])
            victim = min({0, 1, 2} - {spare})
            lines = [line.split() for line in births.read_text().splitlines()]
            os.kill(next(int(pid) for replica, _, pid in lines if int(replica) == victim), signal.SIGKILL)
            killed.touch()
            assert process.wait(DEADLINE) == 0, printed.read_text()
        finally:
            process.kill()
    report: dict[str, Any] = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["outcome"], report["steps_final"]) == ("complete", STEPS)
    assert (report["samples"]["duplicated"], report["samples"]["missing"]) == (0, 0)
    assert report["digests"]["mismatched"] == 0
    (failure,) = report["failures"]
    assert (failure["replica"], failure["stepped_in"]) == (victim, [spare])
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    contributors = {step["step"]: step["contributors"] for step in steps}
    narrow = [number for number, who in contributors.items() if len(who) < 2]
    assert len(narrow) <= 1  # the step in flight, when it was finished without the dead one's part
    last = max(number for number, who in contributors.items() if victim in who)
    assert all(who == sorted({0, 1, 2} - {victim}) for number, who in contributors.items() if number > last + 1)
    assert "Paused" not in printed.read_text()
