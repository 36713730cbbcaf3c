"""What the API server refuses at once, and what it says then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.cluster.kube.cluster import Cluster
from tests.cluster.kube.images import PROJECT
from tests.cluster.kube.shell import ClusterError

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
DEFINITION = str(PROJECT / "crds" / "fthsdpjobs.yaml")
JOB: Object = {
    "apiVersion": "fthsdp.dev/v1alpha1",
    "kind": "FTHSDPJob",
    "metadata": {"name": "job", "namespace": "default"},
    "spec": {
        "replicas": 3,
        "minReplicas": 2,
        "podsPerReplica": 2,
        "template": {"spec": {"containers": [{"name": "main", "image": "image"}]}},
    },
}


@pytest.fixture(scope="module")
def defined(cluster: Cluster) -> Iterator[Cluster]:
    cluster.kubectl("create", "--filename", DEFINITION)
    try:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", DEFINITION)
        yield cluster
    finally:
        cluster.kubectl("delete", "--filename", DEFINITION, "--timeout=60s")


def changed(change: Callable[[Object], Any]) -> Object:
    job = copy.deepcopy(JOB)
    change(job)
    return job


def container(job: Object) -> Object:
    first: Object = job["spec"]["template"]["spec"]["containers"][0]
    return first


REFUSED: dict[str, tuple[Callable[[Object], Any], str]] = {
    "fewer replicas than needed": (
        lambda job: job["spec"].update(minReplicas=4),
        "minReplicas is above replicas: lower minReplicas or raise replicas",
    ),
    "no replicas": (
        lambda job: job["spec"].update(replicas=0),
        "spec.replicas in body should be greater than or equal",
    ),
    "replicas missing": (lambda job: job["spec"].pop("replicas"), "spec.replicas: Required value"),
    "no template": (lambda job: job["spec"].pop("template"), "spec.template: Required value"),
    "no containers": (
        lambda job: job["spec"]["template"]["spec"].update(containers=[]),
        "spec.template.spec.containers in body should have at least 1 items",
    ),
    "unknown field": (lambda job: job["spec"].update(replica=3), 'unknown field "spec.replica"'),
    "pods that restart by themselves": (
        lambda job: job["spec"]["template"]["spec"].update(restartPolicy="Always"),
        "template.spec.restartPolicy has to be Never or left out",
    ),
    "our own environment": (
        lambda job: container(job).update(env=[{"name": "FTHSDP_REPLICA", "value": "1"}]),
        "are set by fthsdp itself: remove them from the template",
    ),
    "the environment of torchrun": (
        lambda job: container(job).update(env=[{"name": "MASTER_ADDR", "value": "here"}]),
        "are set by fthsdp itself: remove them from the template",
    ),
    "waits that shrink": (
        lambda job: job["spec"].update(failurePolicy={"backoff": {"initialSeconds": 60, "maxSeconds": 10}}),
        "backoff.maxSeconds is below backoff.initialSeconds: raise maxSeconds or lower initialSeconds",
    ),
    "a name too long": (lambda job: job["metadata"].update(name="j" * 41), "metadata.name has to be at most 40"),
    "a name with a dot": (lambda job: job["metadata"].update(name="my.job"), "metadata.name has to be at most 40"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_manifest_is_refused_with_what_would_be_right(defined: Cluster, case: str) -> None:
    change, sentence = REFUSED[case]
    assert sentence in defined.kubectl.refusal(changed(change))


def test_a_right_manifest_is_taken_and_completed(defined: Cluster) -> None:
    defined.kubectl.apply(JOB)
    try:
        spec = defined.kubectl.get("fthsdp", "job")["spec"]
        assert spec["network"] == {"masterPort": 29500}
        assert spec["failurePolicy"]["perReplica"] == {"limit": 5, "windowSeconds": 3600}
        with pytest.raises(ClusterError, match="podsPerReplica cannot be changed while the job exists"):
            defined.kubectl("patch", "fthsdp", "job", "--type=merge", '--patch={"spec": {"podsPerReplica": 3}}')
        defined.kubectl("scale", "fthsdp", "job", "--replicas=5")
        assert defined.kubectl.get("fthsdp", "job")["spec"]["replicas"] == 5
    finally:
        defined.kubectl("delete", "fthsdp", "job")
