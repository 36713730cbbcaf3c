"""docs/api.md is the page that the models give, and leaves nothing out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from tests.unit.operator.test_crd import root, schemas
from tests.unit.operator.world import manifest

from fthsdp_operator import reference
from fthsdp_operator.api import GROUP, REASONS, RuleAction, parse_job
from fthsdp_operator.api.reasons import ConditionType, EndReason, EventReason, FailReason, meanings
from fthsdp_operator.manifests import render

CHECKED_IN = Path(__file__).parents[3] / "docs" / "api.md"
EVERYTHING = {
    "spares": 1,
    "checkpoint": {"path": "/data", "everySteps": 5},
    "tls": {"secretName": "certificates"},
}


@pytest.fixture(scope="module")
def page() -> str:
    return reference.text()


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """Return the table below a heading: the cells of each row by what stands in its first one."""
    section = re.split(r"^##+ ", page.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in section.splitlines() if line.startswith("| ")]
    return {cells[0].strip("`"): cells for cells in lines[2:]}


def test_the_checked_in_page_is_up_to_date(page: str) -> None:
    assert CHECKED_IN.read_text(encoding="utf-8") == page, "run 'make generate'"


def test_it_can_be_written_and_printed(tmp_path: Path, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--write", str(tmp_path / "new" / "api.md")]) == 0
    assert reference.main([]) == 0
    assert (tmp_path / "new" / "api.md").read_text(encoding="utf-8") == capsys.readouterr().out == page


def test_every_field_of_spec_and_status_is_there_with_its_description(page: str) -> None:
    listed: dict[str, str] = {}
    for title in re.findall(r"^###? ((?:spec|status)\b.*)$", page, re.MULTILINE):
        level = "##" if title in ("spec", "status") else "###"
        listed |= {f".{title}.{name}": cells[-1] for name, cells in rows(page, f"{level} {title}").items()}
    expected = {
        path: schema["description"]
        for path, schema in schemas(root())
        if path.startswith((".spec.", ".status.")) and not path.endswith("[]")
    }
    alike = {path: path.replace("initContainers[]", "containers[]") for path in expected}  # the same object
    assert {path: listed[alike[path]] for path in expected} == expected
    assert listed.keys() == set(alike.values())


def test_nothing_on_it_lacks_a_meaning(page: str) -> None:
    assert [line for line in page.splitlines() if re.search(r"\|\s*\|$", line)] == []


def test_a_field_says_what_may_stand_in_it(page: str) -> None:
    spec, rule = rows(page, "## spec"), rows(page, "### spec.failurePolicy.rules[]")
    assert spec["replicas"][1:3] == ["integer, 1 … 1,024", "required"]
    assert spec["batchPolicy"][1:3] == ["[BatchPolicy](#batchpolicy)", '`"Shrink"`']
    assert spec["failurePolicy"][1] == "[object](#specfailurepolicy)"
    assert rule["onPodReasons"][1] == "set (1 … 64) of string, 1 … 128 characters"
    assert rule["action"][1] == "[RuleAction](#ruleaction)"
    assert rows(page, "## status")["startTime"][1] == "time"


def test_each_word_of_an_enum_has_its_meaning(page: str) -> None:
    assert rows(page, "### RuleAction").keys() == set(RuleAction)
    assert rows(page, "### RuleAction")["FailJob"][1] == "The job fails."


def test_every_rule_of_the_crd_is_on_the_page(page: str) -> None:
    sentences = {
        rule["message"] for _, schema in schemas(root()) for rule in schema.get("x-kubernetes-validations", ())
    }
    assert sentences == set(re.findall(r"^- (.*)$", page, re.MULTILINE))


def test_every_condition_has_its_reasons() -> None:
    assert REASONS.keys() == meanings(ConditionType).keys()
    assert [kind for kind, words in REASONS.items() if not meanings(words)] == []


def test_a_job_that_ends_says_in_its_event_what_its_condition_says() -> None:
    assert meanings(FailReason).items() <= meanings(EndReason).items() <= meanings(EventReason).items()
    assert len(get_args(EventReason)) == len(meanings(EventReason))


def test_every_variable_label_and_annotation_of_a_pod_is_there(page: str) -> None:
    job = parse_job(manifest(**EVERYTHING))
    pods = (render.training_pod(job, replica=0, attempt=0, index=0), render.coordinator_pod(job, image="x"))
    env = {it["name"] for pod in pods for it in pod["spec"]["containers"][0]["env"]}
    assert env <= rows(page, "## Environment of a training pod").keys()
    marks = {name for pod in pods for part in ("labels", "annotations") for name in pod["metadata"][part]}
    assert {name for name in marks if GROUP in name} == rows(page, "## Labels and annotations").keys()
