"""What a death and a rejoin cost the survivors, with compute emulated as an accelerator would leave it.

    python tests/bench/recovery.py [--repetitions 3] [--json FILE]

Runs the example job with a replica killed on the way, several times, and prints medians and ranges beside what they
must be. Exits 1 when a median misses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.yaml"
MUST = {"stall_s": 1.0, "survivor_slowdown": 0.10}
"""Largest medians."""


def run(folder: Path, *, steps: int, emulate: float) -> dict[str, Any]:
    """Run the example once and return its report."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"]["template"]["spec"]["containers"][0]["args"] += [
        "--steps", str(steps), "--emulate-compute", str(emulate)
    ]  # fmt: skip
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "fthsdp_operator.cli", "run", "job.yaml", "--out", "run"]
    command += ["--inject", "kill:replica=2@step=20"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return report


def measure(repetitions: int) -> dict[str, list[float]]:
    """Return every repetition's figures."""
    found: dict[str, list[float]] = {name: [] for name in ("step_s", "stall_s", "latency_s", "survivor_slowdown")}
    for number in range(repetitions):
        with tempfile.TemporaryDirectory() as folder:
            report = run(Path(folder), steps=80, emulate=0.3)
        (failure,), (join,) = report["failures"], report["joins"]
        found["step_s"].append(report["step_seconds"]["p50"])
        found["stall_s"].append(failure["stall_s"])
        found["latency_s"].append(join["latency_s"])
        found["survivor_slowdown"].append(join["survivor_slowdown"])
        print(f"run {number + 1}:", {name: round(values[-1], 3) for name, values in found.items()}, flush=True)
    return found


def main() -> int:
    """Measure, print, and say whether everything is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = measure(options.repetitions)
    missed = False
    for name, values in found.items():
        median, must = statistics.median(values), MUST.get(name)
        missed |= must is not None and median > must
        limit = "" if must is None else f"   must be at most {must:g}"
        print(f"{name:20} {median:8.3f}   ({min(values):.3f} to {max(values):.3f}){limit}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
