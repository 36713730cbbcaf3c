"""The benchmark of the operator runs, and leaves nothing behind. With a handful of pods: its figures mean nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.bench.operator import ground
from tests.bench.processes import ROOT, environment
from tests.cluster.apiserver import server

pytestmark = pytest.mark.cluster

COMMAND = [sys.executable, "-m", "tests.bench.operator", "--size", "smoke"]
DEADLINE = 240.0


@pytest.fixture(scope="module")
def programs() -> None:
    """Skip with the reason where what it needs is not there, and would take longer to build than a test may."""
    if reason := server.why_not_here():
        pytest.skip(reason)
    try:
        ground.bring_programs()
    except ground.BenchmarkFailed as reason:
        pytest.skip(str(reason))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Everything that it writes lies in a folder of this test's own; no checkout of the peer."""
    (tmp_path / "tmp").mkdir()
    given = environment(TMPDIR=str(tmp_path / "tmp"))
    given.pop("FTHSDP_LWS_SOURCE", None)
    return given


@pytest.mark.usefixtures("programs")
def test_all_of_it_is_measured_with_a_handful_of_pods(env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path / "out")], cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    assert "could not be measured" not in done.stderr, done.stderr
    assert (tmp_path / "out").is_dir(), done.stderr
    (file,) = (tmp_path / "out").iterdir()
    figures = {figure["name"]: figure for figure in json.loads(file.read_text())["figures"]}
    unmeasured = [name for name, figure in figures.items() if figure["ours"] is None]
    assert unmeasured == ["next to LeaderWorkerSet"]
    assert "set FTHSDP_LWS_SOURCE" in figures[unmeasured[0]]["note"]
    assert len(figures) == 14
    missed = [name for name, figure in figures.items() if figure["must"] and not figure["must"]["met"]]
    assert done.returncode == int(bool(missed))
    assert ("missed: " in done.stdout) is bool(missed)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_nothing_is_left_when_it_is_interrupted(env: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    command = [*COMMAND, "--only", "large", "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "pods created" in line:
                break
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(timeout=DEADLINE) != 0
    assert not list((tmp_path / "tmp").iterdir())
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path) in _command(pid)]


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_it_says_in_one_sentence_which_programs_are_missing(env: dict[str, str], tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    done = subprocess.run(COMMAND, cwd=ROOT, env={**env, "FTHSDP_KUBE_BIN": str(empty)}, capture_output=True, text=True)
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("nothing can be measured: no kube-apiserver, ")
    assert sentence.endswith(
        f"kwok in {empty}, which FTHSDP_KUBE_BIN names: put them there, or unset it to have them built"
    )
