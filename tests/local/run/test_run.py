"""``fthsdp run`` from the outside: exit codes, one sentence for bad input, and nothing left behind.

The pods are small shell scripts, everything else is the real thing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.local.waiting import ends

pytestmark = pytest.mark.local
DEADLINE = 60.0


class Launcher:
    """Runs ``fthsdp run`` in a folder of its own; pods tell who they are through a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.births = folder / "births"
        self.births.touch()
        self._started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *options: str, **spec: Any) -> subprocess.Popen[str]:
        # Kubernetes makes $$ of $$$$, and the shell its process number of that.
        born = f'echo "$FTHSDP_REPLICA $FTHSDP_ATTEMPT $FTHSDP_POD_INDEX $$$$" >> {self.births}; '
        container = {"name": "trainer", "image": "none", "command": ["sh", "-c", born + script]}
        whole = {"replicas": 2, "podsPerReplica": 2, "template": {"spec": {"containers": [container]}}, **spec}
        manifest = {
            "apiVersion": "fthsdp.dev/v1alpha1", "kind": "FTHSDPJob", "metadata": {"name": "j"}, "spec": whole
        }  # fmt: skip
        (self.folder / "job.yaml").write_text(yaml.safe_dump(manifest))
        process = subprocess.Popen(
            [sys.executable, "-m", "fthsdp_operator.cli", "run", "job.yaml", *options],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, script: str, *options: str, **spec: Any) -> tuple[int, str, str]:
        process = self.start(script, *options, **spec)
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err

    def wait_for_births(self, count: int) -> list[tuple[int, int, int, int]]:
        """Wait until this many pods have started; return replica, attempt, pod and process number of each."""
        deadline = time.monotonic() + DEADLINE
        while len(lines := self.births.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, lines
            time.sleep(0.02)
        return sorted(tuple(map(int, line.split())) for line in lines)  # type: ignore[misc]

    def close(self) -> None:
        for process in self._started:
            with process:
                process.kill()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_job_whose_pods_exit_with_0_is_complete(launcher: Launcher) -> None:
    code, out, _ = launcher.run("exit 0")
    assert code == 0, out
    assert sorted(p.name for p in (launcher.folder / "runs/j/logs").iterdir()) == [
        "j-coordinator.log", "j-r0-a0-0.log", "j-r0-a0-1.log", "j-r1-a0-0.log", "j-r1-a0-1.log"
    ]  # fmt: skip
    assert not (launcher.folder / "runs/j/private").exists()


def test_a_configuration_error_of_the_pods_ends_the_run_with_their_sentence_and_leaves_nothing(
    launcher: Launcher,
) -> None:
    code, _, err = launcher.run("echo 'tiny: --data /nowhere does not exist' >&2; exit 2")
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("fthsdp: job j: ")
    assert line.endswith("tiny: --data /nowhere does not exist")
    assert not (launcher.folder / "runs").exists()
    assert all(gone(pid) for *_, pid in launcher.wait_for_births(0))


def test_a_job_that_uses_up_its_restarts_fails(launcher: Launcher) -> None:
    script = 'test "$FTHSDP_REPLICA" = 0 && exit 3; exit 4'
    code, _, err = launcher.run(script, failurePolicy={"perReplica": {"limit": 1}})
    assert code == 1
    assert "failed again after 1 restart within 3600 s" in err
    assert "; without it 0 replicas could train, and minReplicas is 1" in err
    assert max(attempt for _, attempt, _, _ in launcher.wait_for_births(1)) == 1


def test_a_script_that_cannot_run_anywhere_fails_the_job_before_any_budget_is_spent(launcher: Launcher) -> None:
    code, _, err = launcher.run("echo 'ValueError: no such layer' >&2; exit 3")
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith(
        "fthsdp: job j: replicas 0 and 1 of 2 failed before the first step with exit code 3, which is a fault of"
    )
    assert line.endswith("ValueError: no such layer")
    assert max(attempt for _, attempt, _, _ in launcher.wait_for_births(1)) < 5


def test_a_rule_can_end_the_job_with_the_first_failure(launcher: Launcher) -> None:
    rule = {"name": "bad-data", "onExitCodes": {"operator": "In", "values": [42]}, "action": "FailJob"}
    script = 'test "$FTHSDP_REPLICA" = 1 && exit 42; exec sleep 600'
    code, _, err = launcher.run(script, failurePolicy={"rules": [rule]})
    assert code == 1
    assert err.startswith("fthsdp: job j: rule bad-data of failurePolicy: j-r1-a0-")
    assert {attempt for _, attempt, _, _ in launcher.wait_for_births(1)} == {0}


def test_only_the_replica_with_the_dead_pod_starts_again(launcher: Launcher) -> None:
    process = launcher.start("exec sleep 600")
    before = launcher.wait_for_births(4)
    os.kill(before[2][3], signal.SIGKILL)
    after = launcher.wait_for_births(6)
    assert [birth[:3] for birth in after] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert ends(before[3][3], seconds=DEADLINE)
    assert not any(gone(pid) for replica, _, _, pid in before if replica == 0)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130


DEAF = "trap '' TERM; sleep 600; :"
"""A shell that does not listen, and is not alone: it is killed, after seconds."""


@pytest.mark.parametrize(
    ("number", "script"), [(signal.SIGINT, DEAF), (signal.SIGTERM, "exec sleep 600"), (signal.SIGHUP, "exec sleep 600")]
)
def test_an_interrupted_run_ends_within_seconds_and_leaves_no_process(
    launcher: Launcher, number: int, script: str
) -> None:
    process = launcher.start(script)
    pids = [pid for *_, pid in launcher.wait_for_births(4)]
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(DEADLINE) == 130
    assert time.monotonic() - began < 15
    assert all(gone(pid) for pid in pids)
    assert not (launcher.folder / "runs/j/private").exists()


def test_nothing_survives_a_killed_run(launcher: Launcher) -> None:
    process = launcher.start(DEAF)
    pids = [pid for *_, pid in launcher.wait_for_births(4)]
    process.kill()
    assert all(ends(pid, seconds=DEADLINE) for pid in pids)


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_goes_on(launcher: Launcher) -> None:
    process = launcher.start("exec sleep 600")
    launcher.wait_for_births(4)
    code, _, err = launcher.run("exit 0")
    assert code == 2
    assert "in use by another 'fthsdp run'" in err
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 130


def test_a_run_folder_that_cannot_be_written_ends_the_run_with_one_sentence(launcher: Launcher) -> None:
    launcher.run("exit 0", "--inject", "kill")  # writes the manifest
    run = f"ulimit -f 0; exec {sys.executable} -m fthsdp_operator.cli run job.yaml --out full"
    ended = subprocess.run(["sh", "-c", run], cwd=launcher.folder, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 1
    assert ended.stderr == f"fthsdp: the run folder {launcher.folder / 'full'}: File too large\n"
    assert launcher.births.read_text() == ""


@pytest.mark.parametrize(
    ("options", "spec", "complaint"),
    [
        (["--inject", "kill:replica=0,pod=2@step=1"], {}, "there is no pod 2; each replica of this job has pod"),
        ([], {"minReplicas": 3}, "minReplicas is above replicas"),
        (["--out", "."], {}, "holds files that no run of fthsdp made"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_and_nothing_is_left_behind(
    launcher: Launcher, options: list[str], spec: dict[str, Any], complaint: str
) -> None:
    code, out, err = launcher.run("exit 0", *options, **spec)
    assert code == 2
    assert complaint in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert sorted(p.name for p in launcher.folder.iterdir()) == ["births", "job.yaml"]
