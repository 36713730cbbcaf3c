"""What the chart installs, looked at without a cluster."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kube.binaries import find_helm
from tests.cluster.kube.images import PROJECT

from fthsdp_operator import render
from fthsdp_operator.api import parse_job

CHART = PROJECT / "charts" / "fthsdp-operator"
Object = dict[str, Any]
Render = Callable[..., list[Object]]


@pytest.fixture(scope="module")
def helm() -> Path:
    found = find_helm()
    if found is None:
        pytest.skip("no helm: neither installed nor built with the cluster's programs")
    return found


@pytest.fixture(scope="module")
def template(helm: Path) -> Render:
    def rendered(*settings: str) -> list[Object]:
        options = [word for setting in settings for word in ("--set", setting)]
        command: list[str | Path] = [helm, "template", "fthsdp", CHART, "--namespace", "fthsdp-system", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return rendered


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def granted(rules: list[Object]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_lint_finds_nothing(helm: Path) -> None:
    done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_operator_may_do_nothing_beyond_this(template: Render) -> None:
    (role,) = of_kind(template(), "ClusterRole")
    assert granted(role["rules"]) == {
        *(("fthsdp.dev", "fthsdpjobs", verb) for verb in ("get", "list", "watch")),
        ("fthsdp.dev", "fthsdpjobs/status", "patch"),
        ("fthsdp.dev", "fthsdpjobs/finalizers", "update"),
        *(("", "pods", verb) for verb in ("get", "list", "watch", "create", "delete")),
        *(("", kind, verb) for kind in ("secrets", "services", "serviceaccounts") for verb in ("get", "create")),
        *(("", "configmaps", verb) for verb in ("get", "create", "update")),
        *(("", "events", verb) for verb in ("get", "create", "patch")),
        *(
            ("rbac.authorization.k8s.io", kind, verb)
            for kind in ("roles", "rolebindings")
            for verb in ("get", "create")
        ),
    }


def test_the_operator_holds_the_rights_that_it_gives_to_coordinators(template: Render) -> None:
    (role,) = of_kind(template(), "ClusterRole")
    container = {"name": "main", "image": "image"}
    job = {
        "apiVersion": "fthsdp.dev/v1alpha1",
        "kind": "FTHSDPJob",
        "metadata": {"name": "job"},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [container]}}},
    }
    (given,) = of_kind(list(render.support(parse_job(job), key="key")), "Role")
    assert granted(given["rules"]) <= granted(role["rules"])


def test_with_namespaces_named_the_operator_has_rights_only_there(template: Render) -> None:
    objects = template("watchNamespaces={research,production}")
    assert of_kind(objects, "ClusterRole") == of_kind(objects, "ClusterRoleBinding") == []
    for kind in ("Role", "RoleBinding"):
        places = [found["metadata"]["namespace"] for found in of_kind(objects, kind)]
        assert places == ["research", "production", "fthsdp-system"]  # the last one for the Lease
    (deployment,) = of_kind(objects, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["--namespace=research", "--namespace=production"]


def test_roles_can_be_left_to_somebody_else(template: Render) -> None:
    objects = template("rbac.create=false", "serviceAccount.create=false", "serviceAccount.name=given")
    assert {found["kind"] for found in objects} == {"CustomResourceDefinition", "Deployment", "Lease"}
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "given"


@pytest.mark.parametrize(("settings", "annotations"), [((), "keep"), (("crds.keep=false",), None)])
def test_the_definition_stays_after_an_uninstall_only_if_asked(
    template: Render, settings: tuple[str, ...], annotations: str | None
) -> None:
    (definition,) = of_kind(template(*settings), "CustomResourceDefinition")
    assert definition["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == annotations


def test_the_definition_can_be_left_out(template: Render) -> None:
    assert of_kind(template("crds.install=false"), "CustomResourceDefinition") == []


def test_the_definition_is_the_one_in_crds(template: Render) -> None:
    text = (PROJECT / "crds" / "fthsdpjobs.yaml").read_text()
    assert (CHART / "files" / "fthsdpjobs.yaml").read_text() == text, "run 'make generate'"
    (definition,) = of_kind(template(), "CustomResourceDefinition")
    assert definition["spec"] == yaml.safe_load(text)["spec"]


def test_an_operator_acts_only_while_it_holds_a_lease_that_it_may_touch(template: Render) -> None:
    objects = template("replicaCount=2")
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"] == {"type": "RollingUpdate"}
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][2:] == [
        "--leader-elect",
        "--lease-namespace=fthsdp-system",
        "--lease-name=fthsdp-operator",
    ]
    (role,) = of_kind(objects, "Role")
    (binding,) = of_kind(objects, "RoleBinding")
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "fthsdp-system"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    assert role["rules"] == [{**lease, "resourceNames": ["fthsdp-operator"], "verbs": ["get", "update"]}]
    (made,) = of_kind(objects, "Lease")
    assert made.keys() == {"apiVersion", "kind", "metadata"}  # an upgrade leaves alone what the operator writes
    assert (made["metadata"]["namespace"], made["metadata"]["name"]) == ("fthsdp-system", "fthsdp-operator")


def test_without_a_lease_one_operator_runs_at_a_time(template: Render) -> None:
    objects = template("leaderElection.enabled=false")
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate", "rollingUpdate": None}
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["operator", "--health-port=8080"]
    assert of_kind(objects, "Role") == of_kind(objects, "RoleBinding") == of_kind(objects, "Lease") == []


def test_several_operators_without_a_lease_are_refused(helm: Path) -> None:
    options = ["--set", "replicaCount=2", "--set", "leaderElection.enabled=false"]
    done = subprocess.run([helm, "template", "fthsdp", CHART, *options], capture_output=True, text=True)
    assert done.returncode != 0
    assert "replicaCount is above 1 without leaderElection.enabled" in done.stderr


def test_the_pod_meets_the_restricted_profile_on_a_read_only_root(template: Render) -> None:
    (deployment,) = of_kind(template(), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"].keys() == {"memory"}


def test_coordinators_run_in_the_operators_image(template: Render) -> None:
    (deployment,) = of_kind(template("image.repository=mirror/fthsdp", "image.tag=v7"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "mirror/fthsdp:v7"
    assert container["env"] == [{"name": "FTHSDP_COORDINATOR_IMAGE", "value": "mirror/fthsdp:v7"}]


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("imagee.tag=1", "additional properties 'imagee' not allowed"),
        ("image.pullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("watchNamespaces=research", "want array"),
        ("watchNamespaces={No Such}", "does not match pattern"),
        ("crds.keep=perhaps", "want boolean"),
        ("replicaCount=-1", "minimum"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Path, setting: str, complaint: str) -> None:
    command: list[str | Path] = [helm, "template", "fthsdp", CHART, "--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert setting.partition("=")[0].partition(".")[0] in done.stderr


def test_the_chart_has_the_projects_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
