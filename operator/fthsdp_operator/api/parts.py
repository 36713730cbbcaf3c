"""What all parts of the object have in common, and times as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

__all__ = ["Part", "SpecPart", "StatusPart", "Time", "format_time"]


def _parse_time(value: object) -> object:
    if isinstance(value, str):
        return datetime.fromisoformat(value).timestamp()
    return value


def format_time(value: float) -> str:
    """Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Time = Annotated[
    float,
    BeforeValidator(_parse_time),
    PlainSerializer(format_time),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""Unix time in seconds here, RFC 3339 on the wire."""


class Part(BaseModel):
    """A part of the object: camelCase outside, descriptions from docstrings."""

    model_config = ConfigDict(
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


class SpecPart(Part):
    """What users write: unknown names are mistakes."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StatusPart(Part):
    """What the operator writes: names that a newer operator wrote are passed over."""

    model_config = ConfigDict(extra="ignore")
