"""A run folder read back: report, course, picture, plain words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fthsdp.coordinator.archive import Archive
from fthsdp.errors import ConfigError
from fthsdp_operator.reports.history import Point, history_of_records
from fthsdp_operator.reports.picture import draw
from fthsdp_operator.reports.summary import summarise

__all__ = ["RunRecord", "publish", "read_record", "settle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run has written about itself."""

    report: dict[str, Any]
    points: tuple[Point, ...]


def read_record(folder: Path) -> RunRecord:
    """Read report.json and steps.jsonl; raises ConfigError."""
    report_file, steps_file = folder / "report.json", folder / "steps.jsonl"
    try:
        report = json.loads(report_file.read_text())
        points = tuple(history_of_records(_lines(steps_file), started=report["started"] or 0.0))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not the folder of a run: {Path(error.filename).name} is missing") from None
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: the record of the run cannot be read: {error}") from error
    return RunRecord(report=report, points=points)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # a killed coordinator may have left half a line at the end
            yield json.loads(line)


def settle(folder: Path, *, outcome: str) -> None:
    """Write into the report how the run ended: a coordinator that was stopped early only knows that it had not yet."""
    try:
        record = read_record(folder)
    except ConfigError:
        return
    Archive(folder).write_report(record.report | {"outcome": outcome})


def publish(record: RunRecord, folder: Path, *, title: str) -> list[str]:
    """Draw the picture into the folder and return the run in plain words."""
    picture = folder / "run.png"
    try:
        draw(record.report, record.points, picture, title=title)
    except ConfigError as error:
        return [*summarise(record.report, folder=folder, picture=None), f"No picture: {error}"]
    return summarise(record.report, folder=folder, picture=picture)
