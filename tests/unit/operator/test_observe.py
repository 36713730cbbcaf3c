"""What is taken from a pod or a node, whatever else may stand in it."""

from __future__ import annotations

from typing import Any

import pytest

from fthsdp_operator.observed.observe import Exit, Hold, NodeView, node_view, view


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


def node(*, ready: str | None = "True", **spec: Any) -> dict[str, Any]:
    conditions = [{"type": "DiskPressure", "status": "False", "lastTransitionTime": "2027-01-15T07:00:00Z"}]
    if ready is not None:
        conditions.append({"type": "Ready", "status": ready, "lastTransitionTime": "2027-01-15T08:00:00Z"})
    return {"metadata": {"name": "node-7"}, "spec": spec, "status": {"conditions": conditions}}


def test_a_node_that_is_well() -> None:
    conditions = frozenset({("DiskPressure", "False"), ("Ready", "True")})
    assert node_view(node()) == NodeView(name="node-7", ready="True", conditions=conditions)


def test_a_node_that_is_not_says_since_when() -> None:
    seen = node_view(node(ready="Unknown"))
    assert (seen.ready, seen.not_ready_since) == ("Unknown", 1_800_000_000.0)


def test_a_node_that_says_nothing_of_itself_yet() -> None:
    new = {"metadata": {"name": "node-7"}}
    assert node_view(new) == NodeView(name="node-7", ready="Unknown", not_ready_since=None)
    assert node_view(node(ready=None)).ready == "Unknown"


def test_what_keeps_pods_from_a_node() -> None:
    taints = [
        {"key": "nvidia.com/gpu", "value": "broken", "effect": "NoSchedule"},
        {"key": "lost", "effect": "NoExecute"},
    ]
    seen = node_view(node(unschedulable=True, taints=taints))
    assert seen.unschedulable
    assert seen.taints == {("nvidia.com/gpu", "broken", "NoSchedule"), ("lost", "", "NoExecute")}


def test_a_heartbeat_of_a_node_changes_nothing() -> None:
    before, after = node(), node()
    for condition in after["status"]["conditions"]:
        condition["lastHeartbeatTime"] = "2027-01-15T09:00:00Z"
    assert node_view(before) == node_view(after)


def waits(field: str, **reasons: str) -> dict[str, Any]:
    """A status in which containers wait, by name; those without a reason run."""
    states = {name: {"waiting": {"reason": why, "message": "so"}} if why else {} for name, why in reasons.items()}
    return {field: [{"name": name, "image": "x", "state": state} for name, state in states.items()]}


def unplaced(reason: str = "Unschedulable") -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": "no room"}]}


@pytest.mark.parametrize(
    ("status", "hold"),
    [
        ({}, None),
        ({"conditions": [{"type": "PodScheduled", "status": "True"}]}, None),
        (unplaced(), Hold("Unschedulable", "no room")),
        (unplaced("SchedulerError"), Hold("Unschedulable", "no room")),
        (
            unplaced("SchedulingGated") | waits("containerStatuses", a="ErrImagePull"),
            Hold("SchedulingGated", "no room"),
        ),
        (waits("containerStatuses", a="ContainerCreating"), None),
        (waits("containerStatuses", a="PodInitializing", b=""), None),
        (
            waits("containerStatuses", a="ContainerCreating", b="ErrImagePull"),
            Hold("ErrImagePull", "container b: ErrImagePull: so"),
        ),
        (
            waits("initContainerStatuses", i="CrashLoopBackOff") | waits("containerStatuses", a="PodInitializing"),
            Hold("CrashLoopBackOff", "container i: CrashLoopBackOff: so"),
        ),
    ],
)
def test_what_keeps_a_pod_from_starting(status: dict[str, Any], hold: Hold | None) -> None:
    seen = view(pod(status))
    assert seen is not None
    assert seen.hold == hold


def test_when_a_pod_was_created() -> None:
    made = pod()
    made["metadata"]["creationTimestamp"] = "2027-01-15T08:00:00Z"
    seen, unknown = view(made), view(pod())
    assert seen is not None
    assert unknown is not None
    assert (seen.created, unknown.created) == (1_800_000_000.0, None)


def owned_pod(name: str, labels: dict[str, str], owner: dict[str, Any] | None) -> dict[str, Any]:
    """A pod with the labels of job ``llama``; ``owner``: what is special about its owner, None: it has none."""
    made = pod(labels={"job": "llama", "job-uid": "job-1", **labels})
    owners = [] if owner is None else [{"kind": "FTHSDPJob", "uid": "job-1", "controller": True, **owner}]
    made["metadata"] |= {"name": name, "ownerReferences": owners}
    return made


@pytest.mark.parametrize(
    ("name", "labels", "owner", "job_uid"),
    [
        ("llama-r1-a2-0", {}, {}, "job-1"),
        ("llama-r1-a0-0", {}, {}, "job-1"),  # restarted in place since
        ("llama-coordinator", {"role": "coordinator"}, {}, "job-1"),
        ("llama-r1-a2-0", {}, None, ""),
        ("llama-r1-a2-0", {}, {"uid": "job-0"}, ""),
        ("llama-r1-a2-0", {}, {"controller": False}, ""),
        ("llama-r1-a2-0", {}, {"kind": "Job"}, ""),
        ("llama-r1-a3-0", {}, {}, ""),
        ("llama-r1-a02-0", {}, {}, ""),
        ("llama-r1-a²-0", {}, {}, ""),
        ("llama-r1-a2-1", {}, {}, ""),
        ("llama-r1-a2-0-debug", {}, {}, ""),
        ("debug", {"role": "coordinator"}, {}, ""),
    ],
)
def test_a_pod_is_a_jobs_own_by_its_owner_and_its_name(
    name: str, labels: dict[str, str], owner: dict[str, Any] | None, job_uid: str
) -> None:
    seen = view(owned_pod(name, labels, owner))
    assert seen is not None
    assert seen.job_uid == job_uid
