"""How the benchmark of the operator reads what it saw."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.bench.operator.client import Api, Pods
from tests.bench.operator.large import p99
from tests.bench.operator.many import quantile


@pytest.mark.parametrize(
    ("values", "found"),
    [([0.3], 0.3), ([0.1, 9.0, 0.2], 9.0), ([float(n) for n in range(1, 201)], 198.0)],
    ids=["one", "few", "many"],
)
def test_p99_is_the_largest_of_few_and_leaves_out_a_hundredth_of_many(values: list[float], found: float) -> None:
    assert p99(values) == found


def test_a_quantile_counts_only_what_came_between_two_readings() -> None:
    registry = CollectorRegistry()
    waits = Histogram("waits", "", buckets=(0.1, 1.0, 10.0), registry=registry)

    def reading() -> Any:
        return next(iter(text_string_to_metric_families(generate_latest(registry).decode())))

    waits.observe(5.0)
    before = reading()
    assert quantile(before, reading(), 0.99) == 0.0
    for _ in range(99):
        waits.observe(0.05)
    assert quantile(before, reading(), 0.99) == 0.1
    for _ in range(2):
        waits.observe(0.5)
    assert quantile(before, reading(), 0.99) == 1.0
    for _ in range(9):
        waits.observe(60.0)
    assert quantile(before, reading(), 0.99) == float("inf")


def pod(uid: str, **more: Any) -> dict[str, Any]:
    return {"name": "worker-0", "uid": uid, "labels": {"group": "1"}, **more}


def test_a_pod_that_comes_back_under_its_name_is_another_one() -> None:
    pods = Pods(Api(address="", token=""), "default", "")
    pods._exists("ADDED", pod("a"), 1.0)
    pods._runs("ADDED", pod("a"), 2.0)
    pods._exists("MODIFIED", pod("a", deletionTimestamp="now"), 3.0)
    assert (pods.running, pods.leaving) == ({}, {"worker-0": 3.0})

    pods._runs("DELETED", pod("a"), 4.0)
    pods._runs("ADDED", pod("b"), 5.0)  # one watch is ahead of the other
    pods._exists("DELETED", pod("a"), 6.0)
    pods._exists("ADDED", pod("b"), 7.0)
    assert (pods.there, pods.made, pods.running, pods.leaving) == (
        {"worker-0"},
        {"worker-0": 7.0},
        {"worker-0": 5.0},
        {},
    )
