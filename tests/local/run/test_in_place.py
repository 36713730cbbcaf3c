"""A replica whose process crashes comes back in its pods the first time, and in new ones when that did not help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.local
DEADLINE = 240.0
STEPS = 60


def manifest(deaths: Path) -> str:
    command = ["python", "-m", "tests.local.run.crashing", str(deaths), "2", "12", "20"]
    arguments = ["--steps", str(STEPS), "--emulate-compute", "0.1"]
    container = {"name": "trainer", "image": "none", "command": command, "args": arguments}
    container["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    spec = {
        "replicas": 2,
        "podsPerReplica": 2,
        "failurePolicy": {"inPlace": {}, "backoff": {"initialSeconds": 0}},
        "template": {"spec": {"containers": [container]}},
    }
    return yaml.safe_dump(
        {"apiVersion": "fthsdp.dev/v1alpha1", "kind": "FTHSDPJob", "metadata": {"name": "j"}, "spec": spec}
    )


def test_a_crash_is_mended_in_the_pods_and_the_next_one_by_new_pods(tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    (tmp_path / "job.yaml").write_text(manifest(deaths))
    command = [sys.executable, "-m", "fthsdp_operator.cli", "run", "job.yaml", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in deaths.read_text().splitlines()] == ["0", "1"]
    first, second = (line for line in done.stdout.splitlines() if "ReplicaFailed: r1" in line)
    assert first.endswith("r1 j-r1-a0-1 Error exit 137: it breaks here; attempt 1 starts now in its pods")
    assert second.endswith("r1 j-r1-a0-1 Error exit 137: it breaks here; attempt 2 starts now")
    logs = tmp_path / "run" / "logs"
    assert sorted(log.name for log in logs.glob("j-r1-*")) == [f"j-r1-a{a}-{p}.log" for a in (0, 2) for p in (0, 1)]
    for pod in (0, 1):
        told = (logs / f"j-r1-a0-{pod}.log").read_text()
        assert "attempt 1 starts in place, from an interpreter that had started" in told
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["outcome"], report["steps_final"]) == ("complete", STEPS)
    assert (report["samples"]["duplicated"], report["samples"]["missing"]) == (0, 0)
    assert report["digests"]["mismatched"] == 0
    assert [(join["replica"], join["attempt"]) for join in report["joins"]] == [(1, 1), (1, 2)]
