"""An API server takes all that the chart renders, and its pods are let in where only restricted ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.kube.helm import render

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
THEIRS = "monitoring.coreos.com/v1"
"""Kinds of the Prometheus operator, which this API server does not have."""
SETTINGS = {
    "defaults": {},
    "namespaced": {"watchNamespaces": "{NAMESPACE}"},
    "everything": {
        "metrics.serviceMonitor.enabled": "true",
        "metrics.prometheusRule.enabled": "true",
        "metrics.dashboard.enabled": "true",
        "networkPolicy.enabled": "true",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team": "monitoring",
        "networkPolicy.jobNamespaces": "{NAMESPACE}",
        "podDisruptionBudget.enabled": "true",
        "podDisruptionBudget.maxUnavailable": "50%",
        "extraEnv[0].name": "HTTPS_PROXY",
        "extraEnv[0].value": "http://proxy:3128",
        "priorityClassName": "system-cluster-critical",
        "tolerations[0].key": "node-role.kubernetes.io/control-plane",
        "resources.limits.cpu": "1",
    },
}


@pytest.fixture(params=SETTINGS)
def rendered(apiserver: ApiServer, helm: Path, namespace: str, request: pytest.FixtureRequest) -> list[Object]:
    """Render the chart for a namespace that lets only restricted pods in."""
    apiserver.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    settings = (f"{name}={value.replace('NAMESPACE', namespace)}" for name, value in SETTINGS[request.param].items())
    return render(helm, *settings, namespace=namespace)


def take(apiserver: ApiServer, *objects: Object) -> str:
    manifest = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    command = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-")
    return apiserver.kubectl(*command, stdin=json.dumps(manifest))


def test_the_api_server_takes_every_object(apiserver: ApiServer, rendered: list[Object]) -> None:
    ours = [it for it in rendered if it["apiVersion"] != THEIRS and it["kind"] != "Pod"]
    assert len(take(apiserver, *ours).splitlines()) == len(ours)


def test_restricted_pods_are_let_in(apiserver: ApiServer, namespace: str, rendered: list[Object]) -> None:
    for account in ("default", "fthsdp-operator"):
        known = ("create", "serviceaccount", account, "-n", namespace, "--dry-run=client", "-o", "json")
        apiserver.kubectl("apply", "-f", "-", stdin=apiserver.kubectl(*known))
    (deployment,) = (it for it in rendered if it["kind"] == "Deployment")
    metadata = {"name": "operator", "namespace": namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": deployment["spec"]["template"]["spec"]}
    tests = [it for it in rendered if it["kind"] == "Pod"]
    assert len(take(apiserver, pod, *tests).splitlines()) == 2
