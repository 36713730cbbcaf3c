"""The record's folder: what one coordinator wrote, the next one goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fthsdp.coordinator.archive import Archive
from fthsdp.coordinator.messages import Cause, JoinRecord, Records, Role, StepRecord
from fthsdp.coordinator.record import RunEvent, RunRecord
from fthsdp.errors import ConfigError


def step(number: int, ended: float) -> StepRecord:
    return StepRecord(
        replica=0, attempt=0, step=number, epoch=1, role=Role.ACTIVE, began=ended - 1, ended=ended,
        samples=((number * 4, number * 4 + 4),), contributors=(0,), total_samples=4, loss=1.0, digest="d",
        outcome="normal",
    )  # fmt: skip


JOIN = JoinRecord(replica=1, attempt=1, started=1, active=2, first_step=1, bytes=3, replayed_steps=4)
REMOVED = RunEvent(kind="removed", at=2.0, replica=1, attempt=0, cause=Cause.EXITED, reason="killed")


def restored(folder: Path) -> RunRecord:
    record = RunRecord(replicas=2)
    Archive(folder).restore(record)
    return record


def test_the_report_of_a_restarted_coordinator_covers_the_whole_run(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.append_event(REMOVED)
    archive.append(Records(steps=(step(1, 1.0), step(2, 2.0)), joins=(JOIN,)))
    record = restored(tmp_path)
    assert record.report()["steps_final"] == 2
    assert [f["replica"] for f in record.report()["failures"]] == [1]
    assert len(record.report()["joins"]) == 1
    record.add(Records(steps=(step(2, 2.0), step(3, 3.0))))
    assert [line["step"] for line in record.take_lines()] == [3]


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    Archive(tmp_path).append(Records(steps=(step(1, 1.0),)))
    with open(tmp_path / "steps.jsonl", "a", encoding="utf-8") as file:
        file.write('{"replica": 0, "att')
    assert restored(tmp_path).report()["steps_final"] == 1


def test_steps_from_before_the_run_started_again_do_not_count(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.append(Records(steps=(step(1, 1.0), step(2, 2.0))))
    archive.append_event(RunEvent(kind="lost-everything", at=2.5))
    archive.append_event(RunEvent(kind="started", at=3.0, step=0))
    archive.append(Records(steps=(step(1, 4.0).model_copy(update={"attempt": 1}),)))
    assert restored(tmp_path).report()["steps_final"] == 1


def test_steps_up_to_the_checkpoint_from_which_the_run_started_again_count(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.append_event(RunEvent(kind="started", at=0.0, step=0))
    archive.append(Records(steps=(step(1, 1.0), step(2, 2.0), step(3, 2.1))))
    archive.append_event(RunEvent(kind="lost-everything", at=2.5))
    archive.append_event(RunEvent(kind="started", at=3.0, step=2))
    archive.append(Records(steps=(step(3, 4.0).model_copy(update={"attempt": 1}),)))
    record = restored(tmp_path)
    assert record.report()["steps_final"] == 3
    assert record.take_lines() == []
    record.add(Records(steps=(step(4, 5.0),)))
    assert [line["step"] for line in record.take_lines()] == [4]


def test_the_report_is_replaced_whole(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.write_report({"outcome": "running"})
    archive.write_report({"outcome": "complete"})
    assert json.loads((tmp_path / "report.json").read_text()) == {"outcome": "complete"}
    assert not (tmp_path / "report.json.new").exists()


def test_a_folder_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record-dir .*nowhere is not a folder: create it first"):
        Archive(tmp_path / "nowhere")
