"""Every value of the chart is explained, checked and on the page, and what Artifact Hub is told is true."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fthsdp_operator.api import parse_job

PROJECT = Path(__file__).parents[3]
CHART = PROJECT / "charts" / "fthsdp-operator"
PAGE = PROJECT / "docs" / "operations.md"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
FREE = ("annotations", "labels", "podSecurityContext", "securityContext", "resources", "nodeSelector", "affinity")
"""What people fill with names of their own, or with parts of Kubernetes."""


def leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in FREE:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def properties(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in schema.get("properties", {}).items():
        yield f"{path}{name}", part
        yield from properties(part, f"{path}{name}.")


def test_the_schema_knows_every_value_and_no_other() -> None:
    known = {path for path, part in properties(SCHEMA) if "properties" not in part or path in FREE}
    nested = {path for path in known if any(path.startswith(f"{free}.") for free in FREE)}
    assert known - nested - {"global"} == {path for path, _ in leaves(VALUES)}


def test_the_schema_explains_everything_and_takes_nothing_else() -> None:
    assert [path for path, part in properties(SCHEMA) if not part.get("description")] == []
    objects = [(path, part) for path, part in properties(SCHEMA) if "properties" in part]
    assert [path for path, part in objects if part.get("additionalProperties") is not False] == []
    assert SCHEMA["additionalProperties"] is False


def shown(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def test_the_page_has_every_value_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == {path: shown(value) for path, value in leaves(VALUES)}


@pytest.fixture(scope="module")
def annotations() -> dict[str, str]:
    found: dict[str, str] = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    return found


def test_artifact_hub_shows_the_example_that_people_copy(annotations: dict[str, str]) -> None:
    (example,) = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    assert example == yaml.safe_load((PROJECT / "examples" / "tiny-llama.yaml").read_text())
    assert parse_job(example).name == "tiny-llama"


def test_artifact_hub_names_the_definition_that_is_installed(annotations: dict[str, str]) -> None:
    (named,) = yaml.safe_load(annotations["artifacthub.io/crds"])
    definition = yaml.safe_load((PROJECT / "crds" / "fthsdpjobs.yaml").read_text())
    assert (named["kind"], named["name"]) == (definition["spec"]["names"]["kind"], definition["metadata"]["name"])
    assert [named["version"]] == [version["name"] for version in definition["spec"]["versions"]]


def test_artifact_hub_scans_the_image_that_is_run(annotations: dict[str, str]) -> None:
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    (image,) = yaml.safe_load(annotations["artifacthub.io/images"])
    assert image["image"] == f"{VALUES['image']['repository']}:{version}"


def test_artifact_hub_gets_words_that_it_knows(annotations: dict[str, str]) -> None:
    assert annotations["artifacthub.io/operatorCapabilities"] in (
        "Basic Install",
        "Seamless Upgrades",
        "Full Lifecycle",
        "Deep Insights",
        "Auto Pilot",
    )
    kinds = {change["kind"] for change in yaml.safe_load(annotations["artifacthub.io/changes"])}
    assert kinds <= {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert annotations["artifacthub.io/license"] == "Apache-2.0"
