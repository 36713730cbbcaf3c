"""The operator works with the rights that the chart gives it, and has none that it does not use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_crd import GOOD
from tests.cluster.apiserver.test_apiserver_operator import Story
from tests.cluster.kube.helm import render

from fthsdp_operator.apiserver import KubernetesCluster
from fthsdp_operator.observe import NodeView
from fthsdp_operator.requests import Access

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
Right = tuple[str, str, str]
"""Group, resource (with its subresource) and verb."""
ACCOUNT = "fthsdp-operator"
CHECKED_OTHERWISE: frozenset[Right] = frozenset(
    {("", "configmaps", "update"), ("fthsdp.dev", "fthsdpjobs/finalizers", "update")}
)
"""Rights that the API server looks for while it answers another request: to give a right, and to block a deletion."""

NODES: Right = ("", "nodes", "list")
"""Asked for, and done without where there is no right to it: nodes are of no namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsOperator(ApiServer):
    """The same API server; who is given its kubeconfig is the chart's service account."""

    admin: ApiServer

    def kubectl(self, *arguments: str, stdin: str | None = None, fails: bool = False) -> str:
        """Run kubectl as somebody who may do everything."""
        return self.admin.kubectl(*arguments, stdin=stdin, fails=fails)


@pytest.fixture
def role(helm: Path, namespace: str) -> Object:
    """Return the Role that the chart gives the operator in a namespace."""
    objects = render(helm, f"watchNamespaces={{{namespace}}}", namespace=namespace)
    (found,) = (it for it in objects if it["kind"] == "Role" and it["metadata"]["name"] == ACCOUNT)
    return dict(found)


@pytest.fixture
def story(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Story:
    """Give a story whose operator is a service account, so far without any right."""
    apiserver.kubectl("create", "serviceaccount", ACCOUNT, "-n", namespace)
    binding = (f"--role={ACCOUNT}", f"--serviceaccount={namespace}:{ACCOUNT}")
    apiserver.kubectl("create", "rolebinding", ACCOUNT, "-n", namespace, *binding)
    token = apiserver.kubectl("create", "token", ACCOUNT, "-n", namespace).strip()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(apiserver.kubeconfig.read_text().replace("test-token", token))
    server = AsOperator(kubeconfig=kubeconfig, audit=apiserver.audit, admin=apiserver)
    return Story(server, namespace, tmp_path)


def granted(role: Object) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def requests(story: Story) -> Iterator[tuple[Right, int]]:
    """Yield what the operator asked for in its namespace, and the status of the answer."""
    user = f"system:serviceaccount:{story.namespace}:{ACCOUNT}"
    for line in story.server.audit.read_text().splitlines():
        entry = json.loads(line)
        asked = entry.get("objectRef") or {}
        if entry["user"]["username"] == user and asked.get("resource"):
            resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            yield (asked.get("apiGroup", ""), resource, entry["verb"]), entry["responseStatus"]["code"]


def suspend(story: Story, yes: bool) -> None:
    story.kubectl("patch", "fthsdp", "llama", "--type=merge", "-p", json.dumps({"spec": {"suspend": yes}}))


def names(attempt: int) -> list[str]:
    return [f"llama-r{replica}-a{attempt}-{index}" for replica in range(3) for index in range(2)]


def test_a_whole_life_of_a_job_uses_each_right_and_needs_no_other(story: Story, role: Object) -> None:
    story.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    with story.operator():
        story.start(ttlSecondsAfterFinished=1)
        for attempt in (1, 2):  # the second time the event of the first is counted up
            suspend(story, True)
            story.until(lambda: not story.pods(), "no pod is left")
            suspend(story, False)
            story.until(lambda: set(names(attempt)) <= story.pods().keys(), "all pods are back")  # noqa: B023
        everybody = (*names(2), "llama-coordinator")
        story.until(lambda: set(everybody) <= story.pods().keys(), "the coordinator is back as well")
        story.kubelet_starts(*everybody)
        for name in everybody:
            story.kubelet_ends(name, 0, phase="Succeeded")
        story.until(lambda: "llama" not in story.server.items("fthsdp", story.namespace), "the job is deleted")
    seen = list(requests(story))
    assert {right for right, status in seen if status == 403} == {NODES}
    assert {right for right, _ in seen} == granted(role) - CHECKED_OTHERWISE | {NODES}


def test_an_operator_of_all_namespaces_sees_nodes_and_one_of_a_few_gets_that_right_from_elsewhere(
    helm: Path, story: Story, role: Object, tmp_path: Path
) -> None:
    objects = [it for it in render(helm, namespace=story.namespace) if it["metadata"]["name"] == ACCOUNT]
    everywhere = next(it for it in objects if it["kind"] == "ClusterRole")
    assert granted(everywhere) - granted(role) == {NODES, ("", "nodes", "watch")}
    name = story.namespace
    story.kubectl("create", "clusterrole", name, "--verb=list,watch", "--resource=nodes")
    account = f"--serviceaccount={story.namespace}:{ACCOUNT}"
    story.kubectl("create", "clusterrolebinding", name, f"--clusterrole={name}", account)
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"unschedulable": True}}
    story.kubectl("create", "-f", "-", stdin=json.dumps(node))

    async def nodes() -> Mapping[str, NodeView]:
        access = Access(kubeconfig=str(story.server.kubeconfig))
        cluster = await KubernetesCluster.connect(access, coordinator_image="x")
        sight = cluster.sight([story.namespace])
        following = asyncio.create_task(sight.follow())
        try:
            await asyncio.wait_for(sight.settled(), 30)
            return sight.nodes([name, "another"])
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await cluster.close()

    try:
        seen = asyncio.run(nodes())
    finally:
        story.kubectl("delete", f"node/{name}", f"clusterrole/{name}", f"clusterrolebinding/{name}")
    assert list(seen) == [name]
    assert seen[name].unschedulable


@pytest.mark.parametrize("right", sorted(CHECKED_OTHERWISE), ids=[right[1] for right in sorted(CHECKED_OTHERWISE)])
def test_without_a_right_that_no_request_names_the_job_does_not_start(story: Story, role: Object, right: Right) -> None:
    group, resource, verb = right
    for rule in role["rules"]:
        if rule["apiGroups"] == [group] and resource in rule["resources"]:
            rule["verbs"] = [each for each in rule["verbs"] if each != verb]
    role["rules"] = [rule for rule in role["rules"] if rule["verbs"]]
    assert right not in granted(role)
    story.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    with story.operator():
        story.kubectl("apply", "-f", "-", stdin=json.dumps(GOOD))
        story.until(lambda: "403 Forbidden" in story.kubectl("describe", "fthsdp", "llama"), "the job says so")
