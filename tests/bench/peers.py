"""Where the peers that we are measured against live: in an environment of their own, outside of this project's.

It is made on first use under the user's cache folder, with the same torch as ours, and kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.bench.processes import BenchmarkFailed

__all__ = ["TORCHFT", "torchft_environment"]

TORCHFT = "0.2.0"


def torchft_environment() -> Path:
    """Return the ``bin`` folder of an environment with torchft; raises BenchmarkFailed when it cannot be made."""
    ours = f"{version('torch').partition('+')[0]}-py{sys.version_info.major}.{sys.version_info.minor}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "fthsdp" / "peers" / f"torchft-{TORCHFT}-torch-{ours}"
    ready = folder / ".ready"
    if not ready.exists():
        print(f"installing torchft {TORCHFT} into {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _install(folder)
        ready.touch()
    return folder / "bin"


def _install(folder: Path) -> None:
    python = str(folder / "bin" / "python")
    wanted = [f"torchft=={TORCHFT}", f"torch=={version('torch').partition('+')[0]}", f"numpy=={version('numpy')}"]
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is not None:
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
        _run([uv, "pip", "install", "--quiet", "--python", python, *wanted])
    else:
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([python, "-m", "pip", "install", "--quiet", *wanted])
    _run([python, "-c", "import torchft"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise BenchmarkFailed(f"torchft {TORCHFT} is not to be had here: {' '.join(command[:4])} …\n{said[-1500:]}")
