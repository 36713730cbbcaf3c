"""What the chart installs, looked at without a cluster."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kube.helm import CHART
from tests.cluster.kube.helm import render as render_chart
from tests.cluster.kube.images import PROJECT

from fthsdp_operator import cli
from fthsdp_operator.api import JOB_LABEL, parse_job
from fthsdp_operator.manifests import render

Object = dict[str, Any]
Render = Callable[..., list[Object]]
JOB = parse_job(
    {
        "apiVersion": "fthsdp.dev/v1alpha1",
        "kind": "FTHSDPJob",
        "metadata": {"name": "job"},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "main", "image": "image"}]}}},
    }
)


@pytest.fixture(scope="module")
def template(helm: Path) -> Render:
    return partial(render_chart, helm, namespace="fthsdp-system")


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (it for it in of_kind(objects, kind) if it["metadata"]["name"] == name)
    return found


def operator_pod(objects: list[Object]) -> Object:
    (deployment,) = of_kind(objects, "Deployment")
    pod: Object = deployment["spec"]["template"]
    return pod


def operator(objects: list[Object]) -> Object:
    (container,) = operator_pod(objects)["spec"]["containers"]
    return dict(container)


def selects(selector: Object, labels: Object) -> bool:
    return selector.items() <= labels.items()


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
    role = named(template(), "ClusterRole", "fthsdp-operator")
    assert granted(role["rules"]) == {
        *(("fthsdp.dev", "fthsdpjobs", verb) for verb in ("get", "list", "watch", "delete")),
        ("fthsdp.dev", "fthsdpjobs/status", "patch"),
        ("fthsdp.dev", "fthsdpjobs/finalizers", "update"),
        *(("", "pods", verb) for verb in ("get", "list", "watch", "create", "patch", "delete")),
        *(("", kind, verb) for kind in ("secrets", "services", "serviceaccounts") for verb in ("get", "create")),
        *(("", "configmaps", verb) for verb in ("get", "create", "update")),
        *(("", "events", verb) for verb in ("get", "create", "patch")),
        *(("", "nodes", verb) for verb in ("list", "watch")),
        *(("policy", "poddisruptionbudgets", verb) for verb in ("get", "create", "delete")),
        *(
            ("rbac.authorization.k8s.io", kind, verb)
            for kind in ("roles", "rolebindings")
            for verb in ("get", "create")
        ),
    }


def test_the_page_about_running_it_explains_each_right(template: Render) -> None:
    section = (
        (PROJECT / "docs" / "operations.md").read_text().partition("\n## What may it do?\n")[2].partition("\n## ")[0]
    )
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.*) \|$", section, re.MULTILINE)]
    explained = {(row[0].partition("`")[2].partition("`")[0], verb) for row in rows for verb in row[1].split(", ")}
    roles = [*of_kind(template(), "Role"), named(template(), "ClusterRole", "fthsdp-operator")]
    assert explained == {(what, verb) for role in roles for _, what, verb in granted(role["rules"])}
    assert all(len(row) == 4 and all(row) for row in rows)


def test_the_operator_holds_the_rights_that_it_gives_to_coordinators(template: Render) -> None:
    role = named(template(), "ClusterRole", "fthsdp-operator")
    (given,) = of_kind(list(render.support(JOB, key="key")), "Role")
    assert granted(given["rules"]) <= granted(role["rules"])


def test_with_namespaces_named_the_operator_has_rights_only_there(template: Render) -> None:
    objects = template("watchNamespaces={research,production}")
    people = {"fthsdp-operator-view", "fthsdp-operator-edit"}
    assert {found["metadata"]["name"] for found in of_kind(objects, "ClusterRole")} == people
    assert of_kind(objects, "ClusterRoleBinding") == []
    for kind in ("Role", "RoleBinding"):
        places = [found["metadata"]["namespace"] for found in of_kind(objects, kind)]
        assert places == ["research", "production", "fthsdp-system"]  # the last one for the Lease
    named_ones = [word for word in operator(objects)["args"] if word.startswith("--namespace")]
    assert named_ones == ["--namespace=research", "--namespace=production"]


def test_roles_can_be_left_to_somebody_else(template: Render) -> None:
    objects = template("rbac.create=false", "serviceAccount.create=false", "serviceAccount.name=given")
    assert {found["kind"] for found in objects} == {"CustomResourceDefinition", "Deployment", "Lease", "Service", "Pod"}
    assert operator_pod(objects)["spec"]["serviceAccountName"] == "given"


def test_who_may_view_or_edit_in_a_namespace_may_do_so_with_its_jobs(template: Render) -> None:
    objects = template()
    view, edit = (named(objects, "ClusterRole", f"fthsdp-operator-{what}") for what in ("view", "edit"))
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    added = {
        role["metadata"]["name"]: {key.removeprefix(prefix) for key in role["metadata"]["labels"] if prefix in key}
        for role in (view, edit)
    }
    assert added == {"fthsdp-operator-view": {"view", "edit", "admin"}, "fthsdp-operator-edit": {"edit", "admin"}}
    assert {verb for _, _, verb in granted(view["rules"])} == {"get", "list", "watch"}
    changes = {"create", "update", "patch", "delete", "deletecollection"}
    assert {verb for _, what, verb in granted(edit["rules"]) if what == "fthsdpjobs"} == changes
    assert {what for _, what, _ in granted(edit["rules"])} == {"fthsdpjobs", "fthsdpjobs/scale"}
    kept = of_kind(template("rbac.aggregate=false"), "ClusterRole")
    assert [role["metadata"]["name"] for role in kept] == ["fthsdp-operator"]


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
    assert deployment["spec"]["strategy"]["type"] == "RollingUpdate"
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == [
        "--leader-elect",
        "--lease-namespace=fthsdp-system",
        "--lease-name=fthsdp-operator",
    ]
    (role,) = of_kind(objects, "Role")
    (binding,) = of_kind(objects, "RoleBinding")
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "fthsdp-system"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    one = {**lease, "resourceNames": ["fthsdp-operator"], "verbs": ["get", "update"]}
    assert role["rules"] == [one, {**lease, "verbs": ["create"]}]
    (made,) = of_kind(objects, "Lease")
    assert made.keys() == {"apiVersion", "kind", "metadata"}  # an upgrade leaves alone what the operator writes
    assert (made["metadata"]["namespace"], made["metadata"]["name"]) == ("fthsdp-system", "fthsdp-operator")


def test_without_a_lease_one_operator_runs_at_a_time(template: Render) -> None:
    objects = template("leaderElection.enabled=false")
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert "--leader-elect" not in operator(objects)["args"]
    assert of_kind(objects, "Role") == of_kind(objects, "RoleBinding") == of_kind(objects, "Lease") == []


def test_several_operators_without_a_lease_are_refused(helm: Path) -> None:
    options = ["--set", "replicaCount=2", "--set", "leaderElection.enabled=false"]
    done = subprocess.run([helm, "template", "fthsdp", CHART, *options], capture_output=True, text=True)
    assert done.returncode != 0
    assert "replicaCount is above 1 without leaderElection.enabled" in done.stderr


@pytest.mark.parametrize("where", ["the operator", "the test"])
def test_a_pod_meets_the_restricted_profile_on_a_read_only_root(template: Render, where: str) -> None:
    objects = template()
    pod = operator_pod(objects)["spec"] if where == "the operator" else of_kind(objects, "Pod")[0]["spec"]
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
    container = operator(template("image.repository=mirror/fthsdp", "image.tag=v7"))
    assert container["image"] == "mirror/fthsdp:v7"
    assert container["env"] == [{"name": "FTHSDP_COORDINATOR_IMAGE", "value": "mirror/fthsdp:v7"}]


def test_the_operator_is_told_how_to_log_and_where_to_answer(template: Render) -> None:
    alone = "leaderElection.enabled=false"
    default = ["operator", "--health-port=8080", "--metrics-port=8081", "--log-level=info", "--log-format=json"]
    assert operator(template(alone))["args"] == default
    loud = operator(template(alone, "log.level=debug", "log.format=text", "metrics.enabled=false"))
    assert loud["args"] == ["operator", "--health-port=8080", "--log-level=debug", "--log-format=text"]
    assert [port["name"] for port in loud["ports"]] == ["health"]


def test_the_arguments_are_those_of_the_command(template: Render) -> None:
    chosen = cli._parser("operator").parse_args(operator(template("metrics.port=9000"))["args"])
    assert (chosen.health_port, chosen.metrics_port, chosen.log_format) == (8080, 9000, "json")
    assert (chosen.leader_elect, chosen.lease_namespace, chosen.lease_name) == (
        True,
        "fthsdp-system",
        "fthsdp-operator",
    )


@pytest.mark.parametrize("settings", [(), ("metrics.port=9000",), ("metrics.enabled=false",)])
def test_the_service_leads_to_the_ports_of_the_operator_and_to_nobody_else(
    template: Render, settings: tuple[str, ...]
) -> None:
    objects = template(*settings)
    (service,), (test,) = of_kind(objects, "Service"), of_kind(objects, "Pod")
    there = {port["name"]: port["containerPort"] for port in operator(objects)["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == there
    assert selects(service["spec"]["selector"], operator_pod(objects)["metadata"]["labels"])
    assert not selects(service["spec"]["selector"], test["metadata"]["labels"])
    asked = [word for word in test["spec"]["containers"][0]["args"] if word.startswith("http")]
    assert asked[0] == f"http://{service['metadata']['name']}.fthsdp-system:8080/healthz"
    assert asked[1:] == [
        f"http://fthsdp-operator.fthsdp-system:{port}/metrics" for name, port in there.items() if name == "metrics"
    ]


def test_prometheus_is_told_only_if_asked_and_keeps_our_labels(template: Render) -> None:
    kinds = ("ServiceMonitor", "PrometheusRule", "ConfigMap")
    assert [kind for kind in kinds if of_kind(template(), kind)] == []
    on = [f"metrics.{what}.enabled=true" for what in ("serviceMonitor", "prometheusRule", "dashboard")]
    assert [kind for kind in kinds if of_kind(template(*on, "metrics.enabled=false"), kind)] == []
    objects = template(*on, "metrics.serviceMonitor.labels.release=prometheus", "metrics.serviceMonitor.interval=5s")
    (monitor,), (rule,), (dashboard,) = (of_kind(objects, kind) for kind in kinds)
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["honorLabels"], endpoint["interval"]) == ("metrics", True, "5s")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (service,) = of_kind(objects, "Service")
    assert selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
    alerts = (CHART / "files" / "alerts.yaml").read_text().replace("RELEASE_NAMESPACE", rule["metadata"]["namespace"])
    assert rule["spec"] == yaml.safe_load(alerts)
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["fthsdp.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())


def test_a_policy_lets_the_operator_reach_the_coordinators_that_it_renders(template: Render) -> None:
    (policy,) = of_kind(template("networkPolicy.enabled=true", "networkPolicy.apiServerPorts={6443}"), "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    api, dns, coordinators = policy["spec"]["egress"]
    assert [port["port"] for port in api["ports"]] == [6443]
    assert {port["port"] for port in dns["ports"]} == {53}
    (peer,) = coordinators["to"]
    pod = render.coordinator_pod(JOB, image="x")
    assert selects(peer["podSelector"]["matchLabels"], pod["metadata"]["labels"])
    assert [port["port"] for port in coordinators["ports"]] == [render.COORDINATOR_PORT]


def test_the_addresses_of_the_api_server_can_be_named(template: Render) -> None:
    given = ("networkPolicy.enabled=true", "networkPolicy.apiServerCIDRs={10.96.0.1/32,fd00::1/128}")
    (policy,) = of_kind(template(*given), "NetworkPolicy")
    api, *_ = policy["spec"]["egress"]
    assert [peer["ipBlock"]["cidr"] for peer in api["to"]] == ["10.96.0.1/32", "fd00::1/128"]
    assert api["ports"]


def test_several_operators_prefer_different_nodes_unless_somebody_knows_better(template: Render) -> None:
    several = ("leaderElection.enabled=true", "replicaCount=2")
    pod = operator_pod(template(*several))
    (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert selects(term["podAffinityTerm"]["labelSelector"]["matchLabels"], pod["metadata"]["labels"])
    assert "affinity" not in operator_pod(template())["spec"]
    given = operator_pod(template(*several, "affinity.nodeAffinity.x=y"))["spec"]["affinity"]
    assert given == {"nodeAffinity": {"x": "y"}}


def test_who_may_scrape_can_be_named(template: Render) -> None:
    def scrapers(*settings: str) -> Object:
        (policy,) = of_kind(template("networkPolicy.enabled=true", *settings), "NetworkPolicy")
        (rule,) = (it for it in policy["spec"]["ingress"] if it["ports"][0]["port"] == "metrics")
        return dict(rule)

    assert "from" not in scrapers()
    only = scrapers("networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=monitoring")
    assert only["from"] == [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]


def test_pods_of_jobs_can_be_closed_to_all_but_jobs_and_the_operator(template: Render) -> None:
    objects = template("networkPolicy.jobNamespaces={research}")
    jobs, coordinators = of_kind(objects, "NetworkPolicy")
    assert {it["metadata"]["namespace"] for it in (jobs, coordinators)} == {"research"}
    pod = render.training_pod(JOB, replica=0, attempt=0, index=0)["metadata"]["labels"]
    coordinator = render.coordinator_pod(JOB, image="x")["metadata"]["labels"]
    exists = [{"key": JOB_LABEL, "operator": "Exists"}]
    assert jobs["spec"]["podSelector"]["matchExpressions"] == exists
    assert jobs["spec"]["ingress"] == [{"from": [{"podSelector": {"matchExpressions": exists}}]}]
    assert JOB_LABEL in pod.keys() & coordinator.keys()
    selector = coordinators["spec"]["podSelector"]["matchLabels"]
    assert selects(selector, coordinator)
    assert not selects(selector, pod)
    ((peer,),) = (rule["from"] for rule in coordinators["spec"]["ingress"])
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "fthsdp-system"}
    assert selects(peer["podSelector"]["matchLabels"], operator_pod(objects)["metadata"]["labels"])


EVERYTHING = (
    *(f"metrics.{what}.enabled=true" for what in ("serviceMonitor", "prometheusRule", "dashboard")),
    "networkPolicy.enabled=true",
    "networkPolicy.jobNamespaces={research}",
    "podDisruptionBudget.enabled=true",
)


def test_objects_of_the_longest_release_name_have_names_that_are_allowed(helm: Path) -> None:
    options = [word for setting in EVERYTHING for word in ("--set", setting)]
    command: list[str | Path] = [helm, "template", "r" * 53, CHART, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert {it["kind"] for it in objects} >= {"Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap", "Pod"}
    keys = [(it["kind"], it["metadata"].get("namespace"), it["metadata"]["name"]) for it in objects]
    assert len(set(keys)) == len(keys)
    assert [key for key in keys if len(key[2]) > (63 if key[0] == "Service" else 253)] == []


def test_a_budget_counts_the_operators(template: Render) -> None:
    objects = template("podDisruptionBudget.enabled=true")
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert selects(budget["spec"]["selector"]["matchLabels"], operator_pod(objects)["metadata"]["labels"])


def test_what_people_set_for_the_pod_gets_there(template: Render) -> None:
    objects = template(
        "extraEnv[0].name=HTTPS_PROXY",
        "extraEnv[0].value=http://proxy",
        "priorityClassName=high",
        "nodeSelector.zone=a",
        "tolerations[0].key=control-plane",
        "podAnnotations.note=x",
        "podLabels.team=y",
        "imagePullSecrets[0].name=registry",
        "podSecurityContext.runAsUser=1000",
    )
    pod = operator_pod(objects)
    assert operator(objects)["env"][1] == {"name": "HTTPS_PROXY", "value": "http://proxy"}
    assert (pod["spec"]["priorityClassName"], pod["spec"]["nodeSelector"]) == ("high", {"zone": "a"})
    assert pod["spec"]["tolerations"] == [{"key": "control-plane"}]
    assert (pod["metadata"]["annotations"], pod["metadata"]["labels"]["team"]) == ({"note": "x"}, "y")
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["spec"]["securityContext"]["runAsUser"] == 1000


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("imagee.tag=1", "additional properties 'imagee' not allowed"),
        ("image.pullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("watchNamespaces=research", "want array"),
        ("watchNamespaces={No Such}", "does not match pattern"),
        ("crds.keep=perhaps", "want boolean"),
        ("replicaCount=-1", "minimum"),
        ("log.format=xml", "value must be one of 'json', 'text'"),
        ("metrics.port=8080", "'not' failed"),
        ("metrics.serviceMonitor.interval=often", "does not match pattern"),
        ("networkPolicy.apiServerPorts={0}", "want 1"),
        ("networkPolicy.apiServerCIDRs={10.96.0.1}", "does not match pattern"),
        ("serviceAccount.create=false", "name the account in serviceAccount.name"),
        ("podDisruptionBudget.minAvailable=1", "additional properties 'minAvailable' not allowed"),
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
