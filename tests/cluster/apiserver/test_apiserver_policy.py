"""The chart's admission policy on a real API server: what no pod could be made of is refused as the job is applied."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_crd import GOOD
from tests.cluster.kube.helm import render
from tests.cluster.kube.shell import until
from tests.unit.operator.templates import TEMPLATES

from fthsdp_operator.api import API_VERSION, KIND

pytestmark = pytest.mark.cluster

Manifest = dict[str, Any]
MOUNT = {"name": "data", "mountPath": "/data"}
TRAIN = {"name": "train", "image": "x"}
OLDER = "older-than-the-policy"
"""A namespace with jobs that were there before the policies, each with the name of the test that has it."""


@pytest.fixture(scope="module")
def policies(apiserver: ApiServer, helm: Path) -> Iterator[ApiServer]:
    """Give the API server with the policies in force."""
    apiserver.kubectl("create", "namespace", OLDER)
    for name in ("changed", "freed", "foreground", "mended"):
        older = job({"spec": {"containers": [{"name": "train"}]}})
        held = {"finalizers": ["example.com/held"]} if name == "freed" else {}
        older["metadata"] = {"name": name, "namespace": OLDER, **held}
        apiserver.kubectl("create", "-f", "-", stdin=json.dumps(older))
    made = render(helm, "admissionPolicy.enabled=true", namespace="default")
    mine = [it for it in made if it["kind"].startswith("ValidatingAdmissionPolicy")]
    assert len(mine) == 4
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": mine})
    apiserver.kubectl("apply", "--server-side", "--validate=strict", "-f", "-", stdin=manifest)
    broken = job({"spec": {"containers": [{"name": "train"}]}})

    def refuses() -> bool:
        try:
            return "has no image" in create(apiserver, broken, fails=True)
        except AssertionError:
            return False  # it is taken: the policy is not in force yet

    until(refuses, "the policies are in force", timeout=60)
    yield apiserver
    apiserver.kubectl("delete", "-f", "-", stdin=manifest)


def job(template: Manifest, **spec: Any) -> Manifest:
    return {**copy.deepcopy(GOOD), "spec": {**GOOD["spec"], "template": template, **spec}}


def create(server: ApiServer, manifest: Manifest, *, fails: bool = False) -> str:
    return server.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), fails=fails)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        ({"containers": [{"name": "train"}]}, "a container has no image"),
        ({"containers": [TRAIN], "initContainers": [{"name": "fetch"}]}, "a container has no image"),
        ({"containers": [TRAIN, TRAIN]}, "two containers have one name"),
        ({"containers": [TRAIN], "initContainers": [TRAIN]}, "two containers have one name"),
        ({"containers": [TRAIN], "volumes": [{"name": "a"}, {"name": "a"}]}, "two volumes have one name"),
        ({"containers": [{**TRAIN, "volumeMounts": [MOUNT]}]}, "a container mounts a volume that is not there"),
    ],
)
def test_a_template_of_which_no_pod_could_be_made_is_refused(policies: ApiServer, pod: Manifest, words: str) -> None:
    assert words in create(policies, job({"spec": pod}), fails=True)


def of_older(server: ApiServer, *arguments: str, fails: bool = False) -> str:
    return server.kubectl("-n", OLDER, *arguments, fails=fails)


def patch(server: ApiServer, name: str, change: Manifest, *, fails: bool = False) -> str:
    return of_older(server, "patch", "fthsdp", name, "--type=merge", "-p", json.dumps(change), fails=fails)


def test_a_job_that_is_older_than_the_policy_can_be_scaled_suspended_and_labelled(policies: ApiServer) -> None:
    of_older(policies, "scale", "fthsdp/changed", "--replicas=4")
    patch(policies, "changed", {"spec": {"suspend": True}})
    of_older(policies, "label", "fthsdp/changed", "team=a")


def test_a_job_that_is_older_than_the_policy_goes_when_its_finalizer_is_taken_away(policies: ApiServer) -> None:
    of_older(policies, "delete", "fthsdp/freed", "--wait=false")
    patch(policies, "freed", {"metadata": {"finalizers": None}})
    of_older(policies, "wait", "--for=delete", "fthsdp/freed", "--timeout=30s")


def test_a_job_that_is_older_than_the_policy_can_be_deleted_with_all_that_is_its_first(policies: ApiServer) -> None:
    uid = policies.items("fthsdp", OLDER)["foreground"]["metadata"]["uid"]
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "foreground", "uid": uid, "blockOwnerDeletion": True}
    mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine", "ownerReferences": [owner]}}
    policies.kubectl("create", "-n", OLDER, "-f", "-", stdin=json.dumps(mine))
    of_older(policies, "delete", "fthsdp/foreground", "--cascade=foreground", "--timeout=90s")


def test_the_template_of_an_older_job_may_only_become_a_right_one(policies: ApiServer) -> None:
    wrong = {"spec": {"template": {"metadata": {"labels": {"a": "b"}}}}}
    assert "a container has no image" in patch(policies, "mended", wrong, fails=True)
    patch(policies, "mended", {"spec": {"template": {"spec": {"containers": [TRAIN]}}}})
    wrong = {"spec": {"template": {"spec": {"containers": [{"name": "train"}]}}}}
    assert "a container has no image" in patch(policies, "mended", wrong, fails=True)


def test_all_templates_as_people_have_them_pass(policies: ApiServer) -> None:
    for template in TEMPLATES.values():
        create(policies, job(template))


def warned(server: ApiServer, manifest: Manifest) -> str:
    """Return the warnings that whoever applies this job sees; as a rule they keep nobody from it, here they do."""
    command = ("create", "--dry-run=server", "--warnings-as-errors", "-f", "-")
    return server.kubectl(*command, stdin=json.dumps(manifest), fails=True)


def test_what_is_most_likely_a_mistake_is_taken_with_a_warning(policies: ApiServer) -> None:
    gpus = TEMPLATES["GPUs and network cards"]
    words = "processesPerPod is 2, and the first container has 8 GPUs: leave processesPerPod out"
    assert words in warned(policies, job(gpus, processesPerPod=2))
    create(policies, job(gpus, processesPerPod=2))
    create(policies, job(gpus))
    lost = {"spec": {"containers": [TRAIN], "hostNetwork": True, "dnsPolicy": "Default"}}
    assert "leave dnsPolicy out for ClusterFirstWithHostNet" in warned(policies, job(lost))
