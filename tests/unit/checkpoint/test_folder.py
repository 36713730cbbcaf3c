"""Which checkpoints in a folder count, and what a new one makes useless."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from fthsdp.checkpoint.folder import (
    MARKER,
    Broken,
    commit,
    crc32,
    discard,
    newest,
    part_name,
    prune,
    survey,
    verify,
)
from fthsdp.errors import ConfigError


def make_part(root: Path, step: int, *, nonce: str = "00", content: bytes = b"weights") -> Path:
    part = root / part_name(step, replica=1, attempt=2, nonce=nonce)
    part.mkdir(parents=True)
    (part / "data").write_bytes(content)
    (part / "more").write_bytes(b"")
    return part


def make(root: Path, step: int, *, digest: str = "d", content: bytes = b"weights") -> Path:
    part = make_part(root, step, nonce="aa", content=content)
    files = {name: [(part / name).stat().st_size, crc32(part / name)] for name in ("data", "more")}
    return commit(part, {"step": step, "digest": digest, "files": files})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_folder_that_does_not_exist_holds_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the checkpoint folder .*file cannot be read: Not a directory"):
        newest(tmp_path / "file")


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    for step in (9, 123456789, 100):
        make(tmp_path, step)
    found = newest(tmp_path)
    assert found is not None
    assert (found.step, found.path.name, found.meta["digest"]) == (123456789, "step-123456789", "d")


def test_what_is_committed_is_undamaged(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (stored,) = survey(tmp_path).whole
    verify(stored, stored.meta["files"])


def lose_a_file(path: Path) -> None:
    (path / "data").unlink()


def cut_a_file(path: Path) -> None:
    (path / "data").write_bytes(b"weight")


def cut_the_marker(path: Path) -> None:
    text = (path / MARKER).read_text()
    (path / MARKER).write_text(text[: len(text) // 2])


def change_the_marker(path: Path) -> None:
    (path / MARKER).write_text((path / MARKER).read_text().replace('"digest": "d"', '"digest": "e"'))


def empty_the_marker(path: Path) -> None:
    (path / MARKER).write_text("[]")


def lie_about_the_step(path: Path) -> None:
    path.rename(path.with_name("step-00000021"))


@pytest.mark.parametrize(
    ("harm", "name", "reason"),
    [
        (lose_a_file, "step-00000020", "data: No such file"),
        (cut_a_file, "step-00000020", "data has 6 bytes instead of 7"),
        (cut_the_marker, "step-00000020", "fthsdp.json cannot be read"),
        (change_the_marker, "step-00000020", "fthsdp.json was changed or damaged"),
        (empty_the_marker, "step-00000020", "fthsdp.json cannot be read"),
        (lie_about_the_step, "step-00000021", "its fthsdp.json is of step 20"),
    ],
)
def test_one_that_is_not_whole_is_skipped_by_name(harm, name, reason, tmp_path: Path, caplog) -> None:
    make(tmp_path, 10)
    harm(make(tmp_path, 20))
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 10
    (message,) = caplog.messages
    assert name in message
    assert reason in message


def rewrite(path: Path, **changes: object) -> None:
    """Commit it again with another marker."""
    marker = json.loads((path / MARKER).read_bytes())
    (path / MARKER).unlink()
    part = path.rename(path.with_name(part_name(20, replica=0, attempt=0, nonce="bb")))
    commit(part, marker["meta"] | changes)


def test_a_marker_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"1234567")
    path = make(tmp_path, 20)
    rewrite(path, files={"../secret": [7, 0]})
    assert "../secret" not in str(survey(tmp_path).whole)
    assert list(survey(tmp_path).broken) == [path.name]


def test_another_version_s_format_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 20)
    monkeypatch.setattr("fthsdp.checkpoint.folder.FORMAT", 2)
    assert survey(tmp_path).broken == {"step-00000020": "it has format 1, this version reads 2"}


def test_what_was_never_committed_is_skipped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 10)
    part = make_part(tmp_path, 20)
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / "README").write_text("ours")
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 10
    assert [part.name in message for message in caplog.messages] == [False, True]
    assert "step-00000030 has no fthsdp.json" in caplog.messages[0]


def test_damage_is_found_in_the_file_that_has_it(tmp_path: Path) -> None:
    path = make(tmp_path, 20)
    (path / "data").write_bytes(b"wEights")
    (stored,) = survey(tmp_path).whole
    verify(stored, ["more"])
    with pytest.raises(Broken, match="data was changed or damaged"):
        verify(stored, ["data"])


# --- commit


def test_two_writers_of_one_step_leave_one_checkpoint(tmp_path: Path) -> None:
    first = make(tmp_path, 20)
    inode = first.stat().st_ino
    assert make(tmp_path, 20) == first
    assert first.stat().st_ino == inode
    assert names(tmp_path) == ["step-00000020"]


@pytest.mark.parametrize("content", [b"wEights", b"weight"])
def test_a_damaged_one_of_the_same_step_is_replaced(content: bytes, tmp_path: Path) -> None:
    path = make(tmp_path, 20)
    (path / "data").write_bytes(content)
    make(tmp_path, 20)
    (stored,) = survey(tmp_path).whole
    verify(stored, stored.meta["files"])
    assert names(tmp_path) == ["step-00000020"]


def test_another_state_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    make(tmp_path, 20)
    make(tmp_path, 20, digest="other")
    assert [stored.meta["digest"] for stored in survey(tmp_path).whole] == ["other"]


def test_a_folder_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-00000020").mkdir()
    with pytest.raises(Broken, match=r"step-00000020 is there already and is no checkpoint of fthsdp: move it away"):
        make(tmp_path, 20)


# --- cleaning


@pytest.mark.parametrize(
    ("keep", "stay"),
    [(1, [30, 40]), (2, [20, 30, 40]), (3, [10, 20, 30, 40]), (9, [10, 20, 30, 40])],
)
def test_the_newest_up_to_the_new_one_stay_and_later_ones_are_not_touched(keep, stay, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    prune(tmp_path, 30, keep=keep)
    assert [stored.step for stored in survey(tmp_path).whole] == stay[::-1]


def test_a_new_one_clears_away_what_was_left_behind_before_it(tmp_path: Path) -> None:
    make_part(tmp_path, 10)
    make_part(tmp_path, 20)
    later = make_part(tmp_path, 30)
    cut_a_file(make(tmp_path, 15))
    half_deleted = tmp_path / "step-00000005-0123abcd.old"
    half_deleted.mkdir()
    foreign = tmp_path / "step-00000001"
    foreign.mkdir()
    newest_one = make(tmp_path, 20)
    prune(tmp_path, 20, keep=2)
    assert names(tmp_path) == sorted([foreign.name, newest_one.name, later.name])


def test_a_writer_whose_part_was_cleared_away_cannot_commit(tmp_path: Path) -> None:
    part = make_part(tmp_path, 10)
    make(tmp_path, 20)
    prune(tmp_path, 20, keep=1)
    with pytest.raises(FileNotFoundError):
        commit(part, {"step": 10, "digest": "d", "files": {}})
    assert names(tmp_path) == ["step-00000020"]


def test_nothing_is_said_of_a_folder_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make(tmp_path, 10)
        prune(tmp_path, 10, keep=2)
        newest(tmp_path)
    assert caplog.messages == []


def test_what_is_discarded_is_gone(tmp_path: Path) -> None:
    discard(make(tmp_path, 10))
    assert names(tmp_path) == []
