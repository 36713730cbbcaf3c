"""How the operator writes its log: lines for people, or a JSON object a line for whoever collects them.

Which job a line speaks of comes from where it is written (``about``), so that what a library says while a job is
reconciled has it as well. A replica and its attempt are named by the line itself (``extra``).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum

__all__ = ["JsonFormatter", "Level", "LogFormat", "about", "configure"]

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
FIELDS = ("namespace", "job", "replica", "attempt")

_job: ContextVar[dict[str, str]] = ContextVar("job")


class LogFormat(StrEnum):
    """What a line looks like."""

    TEXT = "text"
    JSON = "json"


class Level(StrEnum):
    """What is written: this and everything above."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@contextmanager
def about(*, namespace: str, job: str) -> Iterator[None]:
    """Have all that is logged inside say which job it speaks of."""
    token = _job.set({"namespace": namespace, "job": job})
    try:
        yield
    finally:
        _job.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339), level, logger, message; what is known of job, replica and exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        known = _job.get({}) | {name: getattr(record, name, None) for name in FIELDS if hasattr(record, name)}
        line |= {name: value for name, value in known.items() if value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: Level, form: LogFormat) -> None:
    """Write all logs of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("kopf.objects", "aiohttp.access"):  # one says of each event that it was handled, one of each probe
        logging.getLogger(chatty).setLevel(logging.NOTSET if level is Level.DEBUG else logging.WARNING)
