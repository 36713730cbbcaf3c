"""From the death of a training process to its replica training again: in new pods, and in the ones it had.

Runs are those of ``fthsdp run``: the operator's rules, the coordinator and the launcher are the real ones, pods are
processes. What a cluster needs beyond that to have new pods (to schedule them, to set up their sandboxes and networks,
to pull an image) comes on top of the first row.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tests.bench.figures import Figure, Of, at_most
from tests.bench.plan import Plan
from tests.bench.processes import DEADLINE, Child, environment

__all__ = ["restarts"]

COMPUTE = 0.15
"""Seconds of emulated compute in a step."""
LOSSES = 16
"""Losses that a replica computes, two in each step, before it kills itself again."""
STEPS = 100_000
"""More than any run takes: it is ended when the replica has come back for the last time."""
MODES: dict[str, Mapping[str, Any]] = {
    "in new pods": {},
    "in place, cold": {"inPlace": {"preload": []}},
    "in place, warm": {"inPlace": {}},
}
NAME = "death of a process to active again"


def restarts(plan: Plan) -> list[Figure]:
    """Kill the process of a replica again and again, and time each return."""
    seconds = {mode: _run(plan.repetitions, policy) for mode, policy in MODES.items()}
    for mode, values in seconds.items():
        plan.say(f"{mode}: {', '.join(f'{value:.2f}' for value in values)} s")
    pods, *others = MODES
    rows = [Figure(name=f"{NAME}, {pods}", values=seconds[pods])]
    for mode in others:
        best = mode == others[-1]
        rows.append(
            Figure(
                name=f"{NAME}, {mode}",
                values=seconds[mode],
                peer=pods,
                peer_values=seconds[pods],
                must=at_most(0.5, Of.RATIO) if best else at_most(1.1, Of.RATIO),
                note="an interpreter that has imported torch is forked" if best else "the command is started anew",
            )
        )
    return rows


def _run(deaths: int, policy: Mapping[str, Any]) -> tuple[float, ...]:
    """Run a job whose replica 1 dies so often; return the seconds of each return."""
    with tempfile.TemporaryDirectory(prefix="fthsdp-bench-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(yaml.safe_dump(_manifest(folder / "deaths", deaths, policy)))
        command = [sys.executable, "-m", "fthsdp_operator.cli", "run", str(folder / "job.yaml")]
        child = Child("fthsdp run", [*command, "--out", str(folder / "run")], log=folder / "log", env=environment())
        try:
            back = _returns(folder / "run" / "joins.jsonl", deaths, child)
        finally:
            child.end()  # and with it everything that it has started
        died = dict(line.split() for line in (folder / "deaths").read_text().splitlines())
    return tuple(back[int(attempt) + 1] - float(when) for attempt, when in died.items())


def _returns(file: Path, deaths: int, child: Child) -> dict[int, float]:
    """Wait until replica 1 has come back so often; return by attempt when it was active, in Unix time."""
    end = time.monotonic() + DEADLINE * deaths
    while time.monotonic() < end and child.alive:
        lines = file.read_text().splitlines() if file.exists() else []
        joins = [json.loads(line) for line in lines if line.endswith("}")]
        back = {join["attempt"]: join["active"] for join in joins if join["replica"] == 1 and join["attempt"]}
        if len(back) == deaths:
            return back
        time.sleep(0.2)
    raise child.failure(f"did not bring its replica back {deaths} times")


def _manifest(file: Path, deaths: int, policy: Mapping[str, Any]) -> dict[str, Any]:
    container = {
        "name": "trainer",
        "image": "none",
        "command": ["python", "-m", "tests.local.run.crashing", str(file), str(deaths), str(LOSSES), "0"],
        "args": ["--steps", str(STEPS), "--emulate-compute", str(COMPUTE)],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    # Whoever has trained for a second is stable: each death is a first one.
    failures = {"perReplica": {"limit": 1000}, "backoff": {"stableSeconds": 1}, **policy}
    spec = {"replicas": 2, "failurePolicy": failures, "template": {"spec": {"containers": [container]}}}
    return {"apiVersion": "fthsdp.dev/v1alpha1", "kind": "FTHSDPJob", "metadata": {"name": "j"}, "spec": spec}
