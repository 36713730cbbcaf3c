"""The folder in which a run's record is kept: steps.jsonl, joins.jsonl, events.jsonl and report.json.

A coordinator that starts on a folder with lines in it goes on from them: the report covers the whole run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fthsdp.coordinator.messages import JoinRecord, Records, StepRecord
from fthsdp.coordinator.record import RunEvent, RunRecord
from fthsdp.errors import ConfigError

__all__ = ["Archive"]

log = logging.getLogger(__name__)

_M = TypeVar("_M", bound=BaseModel)


class Archive:
    """Files in one folder, which must exist."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"record-dir {folder} is not a folder: create it first")
        self._folder = folder

    def restore(self, record: RunRecord) -> None:
        """Feed what is in the folder into a new record, where a run started again in the order of time."""
        steps = list(self._read("steps.jsonl", StepRecord))
        for event in self._read("events.jsonl", RunEvent):
            if event.kind == "started":
                record.add(Records(steps=tuple(s for s in steps if s.ended <= event.at)))
                steps = [s for s in steps if s.ended > event.at]
            record.note(event)
        joins = tuple(self._read("joins.jsonl", JoinRecord))
        record.add(Records(steps=tuple(steps), joins=joins))
        record.take_lines()

    def append(self, records: Records) -> None:
        """Write down what is new before it is confirmed; the disk's own cache is trusted."""
        self._append("steps.jsonl", records.steps)
        self._append("joins.jsonl", records.joins)

    def append_event(self, event: RunEvent) -> None:
        """Write down an event."""
        self._append("events.jsonl", [event])

    def write_report(self, report: dict[str, Any]) -> None:
        """Replace report.json; a reader sees the old one or the new one."""
        fresh = self._folder / "report.json.new"
        fresh.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        os.replace(fresh, self._folder / "report.json")

    def _append(self, name: str, lines: Iterable[BaseModel]) -> None:
        text = "".join(line.model_dump_json() + "\n" for line in lines)
        if text:
            with open(self._folder / name, "a", encoding="utf-8") as file:
                file.write(text)

    def _read(self, name: str, model: type[_M]) -> Iterator[_M]:
        path = self._folder / name
        if not path.exists():
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                yield model.model_validate_json(line)
            except ValidationError:
                # The last line of a coordinator that was killed while it wrote; its leader sends the record again.
                log.warning("%s line %d is not whole and is left out", path, number)
