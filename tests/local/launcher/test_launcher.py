"""The launcher with real processes: what is passed on, what is restarted, and what never outlives what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.local.launcher.conftest import DEADLINE, Container, below, ended, template_of
from tests.local.waiting import ends, wait_for

pytestmark = pytest.mark.local


@pytest.mark.parametrize("code", ["0", "2"])
def test_what_no_restart_can_help_is_passed_on_at_once(either: Container, code: str) -> None:
    assert ended(either.child(code))[0] == int(code)
    assert len(either.born(1)) == 1


def test_a_command_that_does_not_exist_is_named(container: Container) -> None:
    code, errors = ended(container.run("no-such-command"))
    assert (code, errors) == (127, "fthsdp: the command no-such-command: No such file or directory\n")


def test_bad_input_is_one_sentence(container: Container) -> None:
    code, errors = ended(container.run())
    assert (code, errors) == (2, "fthsdp: python -m fthsdp.launcher -- COMMAND …: the command is missing\n")


def test_a_crashed_command_is_started_again_for_each_new_attempt(either: Container) -> None:
    launcher = either.child("crash", "crash", "crash", "0")
    for attempt in (1, 2, 3):
        either.born(attempt)
        either.says(attempt)
    code, errors = ended(launcher)
    assert code == 0
    born = either.born(4)
    assert [(it["attempt"], it["port"]) for it in born] == [(0, "29500"), (1, "29501"), (2, "29500"), (3, "29501")]
    assert {it["parent"] for it in born} == {launcher.pid}
    assert {it["warm"] for it in born} == {bool(either.preload)}
    assert errors.count("it breaks") == 3
    how = "attempt 2 starts in place, from an interpreter that had started"
    assert (how in errors) is bool(either.preload)


def test_a_new_attempt_takes_the_place_of_a_command_that_runs_or_is_frozen_and_of_what_it_left(
    either: Container,
) -> None:
    either.child("nursery", "nursery", "wait")
    either.born(1)
    either.says(1)
    os.kill(either.born(2)[1]["pid"], signal.SIGSTOP)
    either.says(2)
    *old, new = either.born(3)
    assert new["attempt"] == 2
    assert not any(Path(f"/proc/{it[who]}").exists() for it in old for who in ("pid", "orphan"))


def test_what_a_crashed_command_leaves_goes_with_it(container: Container) -> None:
    launcher = container.child("nursery")
    (old,) = container.born(1)
    os.kill(old["pid"], signal.SIGKILL)
    assert ends(old["orphan"], seconds=DEADLINE)
    assert launcher.poll() is None


def test_nothing_outlives_a_launcher_that_is_killed(either: Container) -> None:
    launcher = either.child("deaf")
    (child,) = either.born(1)
    waiting = [template_of(launcher.pid)] if either.preload else []
    launcher.kill()
    assert all(ends(pid, seconds=DEADLINE) for pid in (child["pid"], *waiting))


def test_what_is_no_newer_number_changes_nothing(container: Container) -> None:
    launcher = container.child("wait", "0")
    container.born(1)
    for text in ("0", "1 2", "-1"):
        container.says(text)
        time.sleep(0.2)  # two looks at the file
    container.attempts.unlink()
    time.sleep(0.2)
    assert len(container.born(1)) == 1
    container.says(1)
    assert ended(launcher)[0] == 0


def test_a_crash_of_which_nobody_hears_ends_the_container_as_it_would_have_ended(either: Container) -> None:
    began = time.monotonic()
    code, errors = ended(either.child("crash", unusual={"patience": 0.5}))
    assert (code, errors) == (7, "it breaks\n")
    assert time.monotonic() - began > 0.5


def test_a_crash_that_can_be_told_to_nobody_ends_the_container_at_once(container: Container) -> None:
    container.key.write_bytes(b"short")
    code, errors = ended(container.child("crash"))
    assert code == 7
    assert "the crash is told to nobody" in errors


# --- told to stop ---------------------------------------------------------------------------------------------------


def test_a_command_that_runs_is_told_to_stop_and_its_exit_code_is_the_containers(either: Container) -> None:
    launcher = either.child("wait")
    either.born(1)
    launcher.terminate()
    assert ended(launcher)[0] == 9


def test_no_attempt_starts_once_we_were_told_to_stop(container: Container) -> None:
    launcher = container.child("deaf")
    (child,) = container.born(1)
    launcher.terminate()
    wait_for("the signal", lambda: _pending_or_ignored(child["pid"]) or None, seconds=DEADLINE)
    container.says(1)
    time.sleep(0.3)
    os.kill(child["pid"], signal.SIGKILL)
    assert ended(launcher)[0] == 137
    assert len(container.born(1)) == 1


def _pending_or_ignored(pid: int) -> bool:
    """The command is there and takes no notice of SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def test_told_to_stop_after_a_crash_it_ends_at_once_as_the_command_did(either: Container) -> None:
    launcher = either.child("crash")
    (child,) = either.born(1)
    assert ends(child["pid"], seconds=DEADLINE)
    launcher.terminate()
    assert ended(launcher)[0] == 7


def test_a_command_that_is_being_started_hears_that_it_is_to_stop(container: Container) -> None:
    launcher = container.child("wait", unusual={"fork_takes": 0.5})
    wait_for("the fork", lambda: below(launcher.pid) or None, seconds=DEADLINE)
    launcher.terminate()
    assert ended(launcher)[0] == 143
    assert container.births.read_text() == ""


def test_a_command_ignores_no_signal_that_it_would_not_ignore_without_a_launcher(container: Container) -> None:
    command = ("grep", "SigIgn", "/proc/self/status")
    without = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE).stdout
    out, _ = container.run(*command).communicate(timeout=DEADLINE)
    ignored, may_be = (int(words.split()[1], 16) for words in (out, without))
    assert ignored & ~may_be == 0


def test_told_to_stop_before_anything_runs_it_ends_with_143(container: Container, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"import pathlib, time; pathlib.Path({str(tmp_path / 'here')!r}).touch()\n"
                                      "while True: time.sleep(1)")  # fmt: skip
    (tmp_path / "main.py").write_text("")
    container.preload = "slow"
    launcher = container.run(sys.executable, str(tmp_path / "main.py"))
    wait_for("the import", lambda: (tmp_path / "here").exists() or None, seconds=DEADLINE)
    launcher.terminate()
    assert ended(launcher)[0] == 143
