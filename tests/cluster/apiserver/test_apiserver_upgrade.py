"""A job that was made before the chart was upgraded goes on under the new definition and the new operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.apiserver.server import CRD, ApiServer
from tests.cluster.apiserver.test_apiserver_operator import Story, uids
from tests.cluster.kube.helm import CHART
from tests.cluster.kube.shell import run
from tests.upgrade import before

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
SYSTEM = "fthsdp-system"
DEFINITION = ("crd", "fthsdpjobs.fthsdp.dev")


class Upgrade(Story):
    """A namespace with a job of before, and the chart around it."""

    helm: Path

    def chart(self, verb: str, *arguments: str | Path) -> None:
        """Run Helm in the chart's namespace."""
        where = ("--kubeconfig", self.server.kubeconfig, "--namespace", SYSTEM)
        run(self.helm, *where, verb, "fthsdp", *arguments)

    def definition(self) -> Object:
        """Return the schema of an FTHSDPJob that the API server has."""
        found = json.loads(self.server.kubectl("get", *DEFINITION, "-o", "json"))
        return dict(found["spec"]["versions"][0]["schema"]["openAPIV3Schema"])

    def bring_back(self) -> None:
        """Make the job of before and all that belongs to it, as they were."""
        job = before.objects()[0]
        self._make({key: job[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "llama"}})
        uid = self.job()["metadata"]["uid"]
        job, *others = before.objects(uid=uid)
        for it in others:
            metadata = {key: it["metadata"][key] for key in ("name", "labels", "annotations", "ownerReferences")}
            self._make({key: part for key, part in it.items() if key != "status"} | {"metadata": metadata})
        for it in (job, *others):
            if "status" in it:
                kind, name, patch = it["kind"], it["metadata"]["name"], json.dumps({"status": it["status"]})
                self.kubectl("patch", kind, name, "--subresource=status", "--type=merge", "-p", patch)

    def _make(self, thing: Object) -> None:
        self.kubectl("create", "-f", "-", stdin=json.dumps(thing))


@pytest.fixture
def upgrade(apiserver: ApiServer, helm: Path, namespace: str, tmp_path: Path) -> Iterator[Upgrade]:
    """Give a namespace in which the chart of before is installed; the definition is that of today afterwards."""
    story = Upgrade(apiserver, namespace, tmp_path)
    story.helm = helm
    apiserver.kubectl("delete", *DEFINITION, "--timeout=60s")  # that of the other tests is no part of any release
    try:
        story.chart("install", before.BEFORE, "--create-namespace")
        apiserver.kubectl("wait", "--for=condition=established", "/".join(DEFINITION), "--timeout=60s")
        yield story
    finally:
        story.chart("uninstall", "--ignore-not-found")
        apiserver.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
        apiserver.kubectl("wait", "--for=condition=established", "/".join(DEFINITION), "--timeout=60s")


def schema(path: Path) -> Object:
    """Return the schema of an FTHSDPJob in a file with the definition."""
    documents = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    (found,) = (it for it in documents if it and it["kind"] == "CustomResourceDefinition")
    return dict(found["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def test_an_upgrade_leaves_the_pods_of_running_jobs_alone(upgrade: Upgrade) -> None:
    assert upgrade.definition() == schema(before.OBJECTS)
    upgrade.bring_back()
    pods = uids(upgrade.pods())
    assert len(pods) == 9

    upgrade.chart("upgrade", CHART)
    assert upgrade.definition() == schema(CRD)
    with upgrade.operator():
        upgrade.kubectl("delete", "pod", "llama-r1-a0-0", "--wait=false")
        upgrade.until(lambda: {"llama-r1-a1-0", "llama-r1-a1-1"} <= upgrade.pods().keys(), "replica 1 is back")
        untouched = {name: uid for name, uid in pods.items() if "-r1-" not in name}
        assert untouched.items() <= uids(upgrade.pods()).items()
        attempts = [(it["attempt"], it["restarts"]) for it in upgrade.job()["status"]["replicaStatuses"]]
        assert attempts == [(0, 0), (1, 1), (1, 1), (0, 0)]


def test_an_uninstall_leaves_the_definition_and_the_jobs(upgrade: Upgrade) -> None:
    upgrade.bring_back()
    pods = uids(upgrade.pods())
    upgrade.chart("upgrade", CHART)
    upgrade.chart("uninstall")
    left = upgrade.server.kubectl("get", "all,roles,rolebindings,leases,configmaps", "-n", SYSTEM, "-o", "name")
    assert [name for name in left.split() if "fthsdp" in name] == []
    assert upgrade.definition() == schema(CRD)
    assert uids(upgrade.pods()) == pods
    upgrade.chart("install", CHART)  # of what was left it takes the definition over again


def test_leader_election_can_be_switched_off_and_on(upgrade: Upgrade) -> None:
    strategies = []
    for on in ("true", "false", "true"):
        upgrade.chart("upgrade", CHART, "--set", f"leaderElection.enabled={on}")
        deployment = upgrade.server.items("deployments", SYSTEM)["fthsdp-operator"]
        strategies.append(deployment["spec"]["strategy"]["type"])
        assert ("fthsdp-operator" in upgrade.server.items("leases", SYSTEM)) == (on == "true")
    assert strategies == ["RollingUpdate", "Recreate", "RollingUpdate"]
