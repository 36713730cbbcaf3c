"""When a run folder may be replaced, and that secrets in it are private and short-lived."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from fthsdp.errors import ConfigError
from fthsdp_operator.local.folder import RunFolder


def test_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    first = RunFolder.claim(tmp_path / "run")
    (first.path / "report.json").write_text("{}")
    first.close()
    second = RunFolder.claim(tmp_path / "run")
    assert not (second.path / "report.json").exists()
    assert second.logs.is_dir()
    second.close()


def test_a_folder_with_other_content_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files that no run of fthsdp made"):
        RunFolder.claim(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file: name a folder"):
        RunFolder.claim(tmp_path / "file")


def test_a_place_where_nothing_can_be_made_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="--out /proc/nothing/here"):
        RunFolder.claim(Path("/proc/nothing/here"))


def test_a_folder_in_use_is_refused_and_stays_whole(tmp_path: Path) -> None:
    held = RunFolder.claim(tmp_path / "run")
    (held.path / "steps.jsonl").touch()
    with pytest.raises(ConfigError, match="in use by another 'fthsdp run'"):
        RunFolder.claim(tmp_path / "run")
    assert (held.path / "steps.jsonl").exists()
    held.close()


def test_a_child_that_a_killed_run_was_about_to_start_does_not_keep_the_folder(tmp_path: Path) -> None:
    RunFolder.claim(tmp_path / "run").close()
    with (tmp_path / "run" / ".fthsdp-run").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen(["sleep", "0.3"], pass_fds=[lock.fileno()])
    with child:
        RunFolder.claim(tmp_path / "run").close()


def test_links_in_an_earlier_run_are_removed_but_not_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").write_text("keep")
    folder = RunFolder.claim(tmp_path / "run")
    (folder.path / "link").symlink_to(tmp_path / "data")
    folder.close()
    RunFolder.claim(tmp_path / "run").close()
    assert (tmp_path / "data" / "text").read_text() == "keep"
    assert not (tmp_path / "run" / "link").exists()


def test_secrets_are_readable_by_this_user_only_and_gone_afterwards(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path / "run")
    folder.fill_volume("pod", {"key/": b"", "key/key": b"secret"})
    file = folder.volume("pod") / "key" / "key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.private.stat().st_mode & 0o777 == 0o700
    folder.close()
    assert not file.exists()


def test_a_removed_run_leaves_no_empty_folders_that_it_had_made(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path / "runs" / "deep" / "demo")
    folder.remove()
    folder.close()
    assert list(tmp_path.iterdir()) == []
