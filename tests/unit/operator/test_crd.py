"""The CRD that is checked in is the one that the models give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fthsdp_operator import crd

CHECKED_IN = Path(__file__).parents[3] / "crds" / "fthsdpjobs.yaml"


def schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from schemas(field, f"{path}.{name}")
    if "items" in schema:
        yield from schemas(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from schemas(schema["additionalProperties"], f"{path}[]")


def root() -> dict[str, Any]:
    schema: dict[str, Any] = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def test_the_checked_in_crd_is_up_to_date() -> None:
    assert CHECKED_IN.read_text(encoding="utf-8") == crd.text(), "run 'make generate'"


def test_it_can_be_written_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main(["--write", str(tmp_path / "new" / "crd.yaml")]) == 0
    assert crd.main([]) == 0
    assert (tmp_path / "new" / "crd.yaml").read_text(encoding="utf-8") == capsys.readouterr().out == crd.text()


def test_every_field_is_explained() -> None:
    silent = [path for path, schema in schemas(root()) if not schema.get("description") and not path.endswith("[]")]
    assert silent == [".metadata"]


def test_the_schema_is_structural() -> None:
    for path, schema in schemas(root()):
        assert "type" in schema, path
        assert not schema.keys() & {"$ref", "anyOf", "allOf", "oneOf", "const", "title"}, path
        assert not schema.keys() >= {"properties", "additionalProperties"}, path


def test_only_the_spec_has_defaults() -> None:
    assert not [path for path, schema in schemas(root()["properties"]["status"]) if "default" in schema]


def test_the_columns_are_those_that_people_look_for() -> None:
    columns = crd.crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    narrow = [column["name"] for column in columns if "priority" not in column]
    assert narrow == ["Ready", "Min", "Step", "Restarts", "State", "Last-Failure", "Age"]
    assert [column["name"] for column in columns if column.get("priority") == 1] == [
        "Spares",
        "Up-to-date",
        "Abandoned",
        "Samples/s",
        "Tokens/s",
        "Effective",
    ]
