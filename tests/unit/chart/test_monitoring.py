"""Alerts and dashboard ask only for metrics that the operator has, by labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import Metric

from fthsdp_operator.api import JobState, ReplicaState
from fthsdp_operator.process.measure import ROLLS
from fthsdp_operator.process.metrics import Metrics

PROJECT = Path(__file__).parents[3]
FILES = PROJECT / "charts" / "fthsdp-operator" / "files"
PAGE = PROJECT / "docs" / "operations.md"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(alert["alert"], alert["expr"]) for alert in ALERTS] + [
    (panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]
]
STATES = {"fthsdp_job_state": set(JobState), "fthsdp_job_replicas": set(ReplicaState), "fthsdp_job_roll": set(ROLLS)}


def families() -> list[Metric]:
    return list(Metrics().registry.collect())


SERIES = {family.name + suffix for family in families() for suffix in SUFFIXES[family.type]}


def walk(node: Any) -> Iterator[Any]:
    """Yield a node of an expression and all below it."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        below = getattr(node, name, None)
        if isinstance(below, promql_parser.Expr):
            yield from walk(below)
    for below in getattr(node, "args", None) or ():
        yield from walk(below)


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    text = re.sub(r"\$__rate_interval", "5m", expression)
    return [node for node in walk(promql_parser.parse(text)) if isinstance(node, promql_parser.VectorSelector)]


def names(expression: str) -> set[str]:
    return {str(selector.name) for selector in selectors(expression)}


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_an_expression_is_promql_about_metrics_that_exist(where: str, expression: str) -> None:
    assert names(expression)
    assert names(expression) <= SERIES


def test_the_walk_through_an_expression_misses_no_name() -> None:
    for where, expression in EXPRESSIONS:
        assert names(expression) == set(re.findall(r"fthsdp_\w+", expression)), where


def test_a_metric_that_nobody_has_is_found_out() -> None:
    assert not names("sum by (job) (rate(fthsdp_nonsense_total[5m])) / 2 > 1") <= SERIES


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_states_that_are_asked_for_exist(where: str, expression: str) -> None:
    for selector in selectors(expression):
        asked = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "state"]
        assert {state for value in asked for state in value.split("|")} <= STATES.get(str(selector.name), set())


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    asked = set().union(*(names(expression) for _, expression in EXPRESSIONS))
    unseen = {family.name for family in families() if not any(family.name in name for name in asked)}
    assert unseen == set()


def test_the_dashboards_variables_ask_for_what_exists() -> None:
    asked = [item["query"]["query"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"]
    assert set(re.findall(r"fthsdp_\w+", " ".join(asked))) <= SERIES
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_an_alert_says_what_is_so_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["annotations"]["summary"]
    assert "What to do: " in alert["annotations"]["description"]


def test_the_page_has_every_alert_and_every_metric() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)(?:\{[^}]*\})?` \|", text, re.MULTILINE))
    metrics = {
        family.name + SUFFIXES[family.type][0] if family.type == "counter" else family.name for family in families()
    }
    assert rows & metrics == metrics
    assert {row for row in rows if row.startswith("FTHSDP")} == {alert["alert"] for alert in ALERTS}
    assert {row for row in rows if row.startswith("fthsdp_")} == metrics
