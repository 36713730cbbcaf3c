"""What is taken from a pod, whatever else may stand in it."""

from __future__ import annotations

from typing import Any

import pytest

from fthsdp_operator.observe import Exit, view


def pod(status: dict[str, Any] | None = None, labels: dict[str, str] | None = None) -> dict[str, Any]:
    ours = {"role": "trainer", "replica": "1", "attempt": "2", "pod-index": "0", **(labels or {})}
    names = {f"fthsdp.dev/{name}": value for name, value in ours.items()}
    return {"metadata": {"name": "x", "uid": "u", "labels": names}, "status": status or {}}


def container(name: str, code: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, **more}}}


def test_a_pod_that_has_not_started() -> None:
    seen = view(pod())
    assert seen is not None
    assert (seen.replica, seen.attempt, seen.index, seen.phase, seen.exit) == (1, 2, 0, "Pending", None)
    assert seen.alive


@pytest.mark.parametrize("labels", [{"replica": "one"}, {"role": "guest"}, {"attempt": ""}])
def test_a_pod_with_labels_of_nonsense_is_no_pod_of_a_job(labels: dict[str, str]) -> None:
    assert view(pod(labels=labels)) is None


def test_a_pod_without_labels_is_no_pod_of_a_job() -> None:
    assert view({"metadata": {"name": "x"}}) is None


def test_when_its_deletion_was_asked_for() -> None:
    made = pod()
    made["metadata"] |= {"deletionTimestamp": "2027-01-15T08:00:30Z", "deletionGracePeriodSeconds": 30}
    seen = view(made)
    assert seen is not None
    assert (seen.deleted, seen.gone_by) == (1_800_000_000.0, 1_800_000_030.0)
    assert not seen.alive


@pytest.mark.parametrize(
    ("status", "name", "code"),
    [
        ({"containerStatuses": [container("side", 0), container("train", 1)]}, "train", 1),
        ({"containerStatuses": [container("train", 0), {"name": "side", "state": {"running": {}}}]}, "train", 0),
        ({"initContainerStatuses": [container("first", 3)], "containerStatuses": []}, "first", 3),
        ({"initContainerStatuses": [container("first", 0)], "containerStatuses": [container("a", 2)]}, "a", 2),
    ],
)
def test_the_container_that_failed_counts(status: dict[str, Any], name: str, code: int) -> None:
    seen = view(pod(status))
    assert seen is not None
    assert seen.exit == Exit(container=name, code=code, reason="", message="", time=None)


def test_an_init_container_that_succeeded_says_nothing() -> None:
    seen = view(pod({"initContainerStatuses": [container("first", 0)]}))
    assert seen is not None
    assert seen.exit is None
