"""The file that a run of the benchmarks leaves behind."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure
from tests.bench.peers import TORCHFT
from tests.bench.processes import ROOT

__all__ = ["write"]


def write(figures: Sequence[Figure], *, name: str, module: str, seconds: float, folder: Path) -> Path:
    """Write everything that was measured by a module, and on what; return the file, which has ``name`` in its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}.json"
    document = {
        "command": " ".join(["python", "-m", module, *sys.argv[1:]]),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "took_s": round(seconds, 1),
        "machine": machine(),
        "versions": versions(),
        "figures": [figure.as_json() for figure in figures],
    }
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return file


def machine() -> dict[str, Any]:
    """Describe what we run on, and how much else ran on it."""
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "processor": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": memory[0].partition(":")[2].strip() if memory else "",
        "system": f"{platform.system()} {platform.release()}",
        "load_of_the_last_15_minutes": round(os.getloadavg()[2], 2),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def versions() -> dict[str, str]:
    """Return the versions of all that was measured."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    found = {"commit": commit.stdout.strip(), "python": platform.python_version(), "torchft": TORCHFT}
    for package in ("fthsdp", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
