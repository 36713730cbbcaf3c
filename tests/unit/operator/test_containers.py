"""The training container decides about its pod, whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.templates import with_proxy
from tests.unit.operator.world import manifest

from fthsdp_operator.api import parse_job
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import PodView, view

Manifest = dict[str, Any]
RUNNING: Manifest = {"running": {"startedAt": "2027-01-15T08:00:00Z"}}
WAITING: Manifest = {"waiting": {"reason": "CrashLoopBackOff"}}


def ended(code: int, **more: Any) -> Manifest:
    return {"terminated": {"exitCode": code, **more}}


def seen(phase: str, *, init: Manifest | None = None, spec: Manifest | None = None, **states: Manifest) -> PodView:
    """A training pod that a webhook has given a proxy; each container in a state of its own."""
    made = with_proxy(render.training_pod(parse_job(manifest()), replica=0, attempt=0, index=0))
    made["spec"] |= spec or {}
    containers = [{"name": name.replace("_", "-"), "state": state} for name, state in states.items()]
    before = [{"name": name, "state": state} for name, state in (init or {}).items()]
    made["status"] = {"phase": phase, "containerStatuses": containers, "initContainerStatuses": before}
    known = view(made)
    assert known is not None
    return known


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (1, "Failed"), (137, "Failed")])
def test_a_pod_ends_with_its_training_container_though_a_proxy_runs_on(code: int, phase: str) -> None:
    pod = seen("Running", istio_proxy=RUNNING, train=ended(code))
    assert (pod.phase, pod.ended, pod.over, pod.alive) == (phase, True, False, False)
    assert pod.exit is not None
    assert (pod.exit.container, pod.exit.code) == ("train", code)


def test_a_container_of_which_nothing_is_said_counts_as_one_that_runs() -> None:
    made = with_proxy(render.training_pod(parse_job(manifest()), replica=0, attempt=0, index=0))
    made["status"] = {"phase": "Running", "containerStatuses": [{"name": "train", "state": ended(0)}]}
    pod = view(made)
    assert pod is not None
    assert (pod.phase, pod.over) == ("Succeeded", False)


def test_a_pod_whose_containers_have_all_ended_is_over() -> None:
    pod = seen("Succeeded", istio_proxy=ended(0), train=ended(0))
    assert (pod.phase, pod.over) == ("Succeeded", True)


@pytest.mark.parametrize("beside", [ended(1), ended(137, reason="OOMKilled"), WAITING])
def test_what_becomes_of_a_container_beside_it_says_nothing_while_training_goes_on(beside: Manifest) -> None:
    pod = seen("Running", istio_proxy=beside, train=RUNNING)
    assert (pod.phase, pod.ended) == ("Running", False)


def test_a_failed_proxy_makes_no_failure_of_training_that_went_well() -> None:
    pod = seen("Failed", istio_proxy=ended(1), train=ended(0))
    assert (pod.phase, pod.over) == ("Succeeded", True)
    assert pod.exit is not None
    assert pod.exit.code == 0


def test_the_exit_of_the_training_container_is_the_one_that_counts() -> None:
    pod = seen("Failed", istio_proxy=ended(3), train=ended(7))
    assert pod.exit is not None
    assert (pod.exit.container, pod.exit.code) == ("train", 7)
    assert {one.code for one in pod.exits} == {3, 7}  # rules may speak of each


def test_a_pod_whose_init_container_failed_has_failed() -> None:
    pod = seen("Failed", init={"fetch": ended(4)}, train=WAITING)
    assert pod.phase == "Failed"
    assert pod.exit is not None
    assert (pod.exit.container, pod.exit.code) == ("fetch", 4)


def test_a_native_sidecar_that_was_stopped_at_the_end_says_nothing() -> None:
    pod = seen("Succeeded", init={"proxy": ended(143)}, train=ended(0))
    assert pod.phase == "Succeeded"
    assert pod.exit is not None
    assert pod.exit.code == 0


def test_an_evicted_pod_has_failed_though_its_training_left_with_0() -> None:
    made = render.training_pod(parse_job(manifest()), replica=0, attempt=0, index=0)
    left = [{"name": "train", "state": ended(0)}]
    made["status"] = {"phase": "Failed", "reason": "Evicted", "containerStatuses": left}
    pod = view(made)
    assert pod is not None
    assert (pod.phase, pod.reason) == ("Failed", "Evicted")


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (1, "Failed")])
def test_a_pod_whose_containers_have_all_ended_is_over_before_its_phase_says_so(code: int, phase: str) -> None:
    pod = seen("Running", train=ended(code), istio_proxy=ended(0))
    assert (pod.phase, pod.over) == (phase, True)
    pod = seen("Running", train=ended(code), istio_proxy=RUNNING)
    assert (pod.phase, pod.over) == (phase, False)


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (1, "Failed")])
@pytest.mark.parametrize("now", [RUNNING, WAITING])
def test_a_training_container_that_was_started_again_has_ended(code: int, phase: str, now: Manifest) -> None:
    """Somebody's webhook has changed the pod's restart policy: as the same attempt, nobody lets it in."""
    made = render.training_pod(parse_job(manifest()), replica=0, attempt=0, index=0)
    made["spec"]["restartPolicy"] = "Always"
    again = [{"name": "train", "state": now, "lastState": ended(code), "restartCount": 1}]
    made["status"] = {"phase": "Running", "containerStatuses": again}
    pod = view(made)
    assert pod is not None
    assert (pod.phase, pod.over) == (phase, False)


@pytest.mark.parametrize(
    ("policy", "state", "phase"),
    [
        ("OnFailure", {"state": ended(1)}, "Running"),
        ("OnFailure", {"state": RUNNING, "lastState": ended(1)}, "Running"),
        ("OnFailure", {"state": ended(0)}, "Succeeded"),
        ("Never", {"state": ended(1)}, "Failed"),
    ],
)
def test_a_coordinator_comes_back_after_a_crash(policy: str, state: Manifest, phase: str) -> None:
    made = with_proxy(render.coordinator_pod(parse_job(manifest()), image="x"))
    made["spec"]["restartPolicy"] = policy
    made["status"] = {"phase": "Running", "containerStatuses": [{"name": "coordinator", **state}]}
    pod = view(made)
    assert pod is not None
    assert pod.phase == phase


def test_a_pod_that_does_not_say_which_container_counts_is_judged_by_its_first() -> None:
    made = render.training_pod(parse_job(manifest()), replica=0, attempt=0, index=0)
    made["metadata"]["annotations"] = {}
    made["status"] = {"phase": "Running", "containerStatuses": [{"name": "train", "state": ended(5)}]}
    pod = view(made)
    assert pod is not None
    assert pod.phase == "Failed"
