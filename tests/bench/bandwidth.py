"""FTAR's bus bandwidth beside gloo's and beside what bare loopback sockets carry."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.bench.figures import Figure, at_least
from tests.bench.plan import Plan
from tests.bench.processes import BenchmarkFailed, run_to_its_end

__all__ = ["bus_bandwidth"]


def bus_bandwidth(plan: Plan) -> list[Figure]:
    """Run the benchmark of FTAR alone and return its rows: ratios of all-reduces done right after one another."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "tests.bench.ftar_bandwidth", "--json", str(file)]
        command += ["--repetitions", str(plan.bandwidth)]
        code, output = run_to_its_end(command)
        if not file.exists():
            raise BenchmarkFailed(f"ftar_bandwidth.py ended with exit code {code}\n{output}")
        rows = json.loads(file.read_text())["rows"]
    return [
        Figure(
            name=f"bus bandwidth, {row['what']}, {row['megabytes']} MB, n = {row['members']}",
            unit="x",
            values=tuple(row["samples"]),
            must=at_least(row["must"]),
            aim=at_least(row["aim"]),
        )
        for row in rows
    ]
