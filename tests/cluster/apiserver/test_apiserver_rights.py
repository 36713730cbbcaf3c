"""The operator works with the rights that the chart gives it, and has none that it does not use."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_crd import GOOD
from tests.cluster.apiserver.test_apiserver_in_place import TEMPLATE, coordinator, crash, told
from tests.cluster.apiserver.test_apiserver_operator import Story
from tests.cluster.kube.helm import render

from fthsdp_operator.api import parse_job
from fthsdp_operator.kube.apiserver import KubernetesCluster
from fthsdp_operator.kube.requests import Access
from fthsdp_operator.manifests.gang import group_name
from fthsdp_operator.manifests.render import pod_group
from fthsdp_operator.observed.observe import NodeView

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
Right = tuple[str, str, str]
"""Group, resource (with its subresource) and verb."""
ACCOUNT = "fthsdp-operator"
IN_PLACE: Right = ("", "pods", "patch")
CHECKED_OTHERWISE: frozenset[Right] = frozenset(
    {("", "configmaps", "update"), ("fthsdp.dev", "fthsdpjobs/finalizers", "update")}
)
"""Rights that the API server looks for while it answers another request: to give a right, and to block a deletion."""

BUDGET, NO_BUDGET = ({"disruptionBudget": which} for which in ("MinReplicas", "None"))
"""Node policies: what is made for the one is deleted for the other."""

NAME_TAKEN: Right = ("", "pods", "get")
"""Used where the name of a pod is taken already, or a pod has changed under its deletion."""
NODES: Right = ("", "nodes", "list")
"""Asked for, and done without where there is no right to it: nodes are of no namespace."""


SEEN_BY_WATCHES: frozenset[Right] = frozenset(
    (group, resource, verb)
    for group, resource in (("fthsdp.dev", "fthsdpjobs"), ("", "pods"))
    for verb in ("list", "watch")
)
"""Rights without which the operator sees nothing at all."""


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
    return role_with(helm, namespace)


def role_with(helm: Path, namespace: str, *settings: str) -> Object:
    objects = render(helm, f"watchNamespaces={{{namespace}}}", *settings, namespace=namespace)
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
    """Pods of a job of which replica 2 has crashed once, in place."""
    return [f"llama-r{replica}-a{attempt + (replica == 2)}-{index}" for replica in range(3) for index in range(2)]


def test_a_whole_life_of_a_job_uses_each_right_and_needs_no_other(story: Story, role: Object, tmp_path: Path) -> None:
    story.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    with story.operator():
        story.start(ttlSecondsAfterFinished=1, template=TEMPLATE, failurePolicy={"inPlace": {}}, nodePolicy=BUDGET)
        started = ("llama-r2-a0-0", "llama-r2-a0-1", "llama-coordinator")
        story.kubelet_starts(*started)
        with coordinator(story, tmp_path, host="127.0.29.2") as env:
            crash(story, env, 0)
        for attempt in (1, 2):  # the second time the event of the first is counted up
            suspend(story, True)
            if attempt == 1:
                story.until(lambda: not set(story.pods()) - {*started}, "only those are left that were started")
                story.kubectl("delete", "pod", *started, "--grace-period=0", "--force", "--ignore-not-found")
            story.until(lambda: not story.pods(), "no pod is left")
            suspend(story, False)
            story.until(lambda: set(names(attempt)) <= story.pods().keys(), "all pods are back")  # noqa: B023
        everybody = (*names(2), "llama-coordinator")
        story.until(lambda: set(everybody) <= story.pods().keys(), "the coordinator is back as well")
        story.kubectl("patch", "fthsdp", "llama", "--type=merge", "-p", json.dumps({"spec": {"nodePolicy": NO_BUDGET}}))
        story.until(lambda: not story.server.items("poddisruptionbudgets", story.namespace), "the budget is gone")
        story.kubelet_starts(*everybody)
        for name in everybody:
            story.kubelet_ends(name, 0, phase="Succeeded")
        story.until(lambda: "llama" not in story.server.items("fthsdp", story.namespace), "the job is deleted")
    seen = list(requests(story))
    assert {right for right, status in seen if status == 403} == {NODES}
    assert {right for right, _ in seen} - {NAME_TAKEN} == granted(role) - CHECKED_OTHERWISE - {NAME_TAKEN} | {NODES}


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
            return dict(sight.nodes())
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await cluster.close()

    try:
        seen = asyncio.run(nodes())
    finally:
        story.kubectl("delete", f"node/{name}", f"clusterrole/{name}", f"clusterrolebinding/{name}")
    assert seen[name].unschedulable


def test_groups_are_made_and_deleted_with_the_rights_of_their_provider(story: Story, helm: Path) -> None:
    plain, more = (granted(role_with(helm, story.namespace, *it)) for it in ((), ("gang.providers={Native}",)))
    groups = {("scheduling.k8s.io", "podgroups", verb) for verb in ("create", "delete")}
    assert more - plain == groups
    role = role_with(helm, story.namespace, "gang.providers={Native}")
    story.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    with story.operator():
        story.start(gang={"provider": "Native"})
        suspend(story, True)
        story.until(lambda: not story.pods(), "no pod is left")
    seen = list(requests(story))
    assert {right for right, status in seen if status == 403} <= {NODES}
    assert groups <= {right for right, _ in seen}


def test_a_group_that_is_there_already_or_gone_asks_for_no_other_right(story: Story, helm: Path) -> None:
    role = role_with(helm, story.namespace, "gang.providers={Native}")
    story.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    with story.operator():
        story.start(gang={"provider": "Native"})
        story.until(lambda: story.job()["status"].get("observedGeneration") == 1, "the job was looked at")
        job = parse_job(story.job())
        # As an operator leaves them that was killed in between.
        story.kubectl("create", "-f", "-", stdin=json.dumps(pod_group(job, replica=2, attempt=1)))
        story.kubectl("delete", "podgroups.scheduling.k8s.io", group_name(job, 2, 0), "--wait=false")
        story.until(lambda: "Starting" in str(story.job()["status"]["replicaStatuses"][2]), "all its pods were seen")
        story.kubectl("delete", "pod", "llama-r2-a0-1", "--grace-period=0", "--force")
        story.until(lambda: {"llama-r2-a1-0", "llama-r2-a1-1"} <= story.pods().keys(), "replica 2 has new pods")
        assert "CallFailed" not in story.kubectl("describe", "fthsdp", "llama")
    asked = list(requests(story))
    assert (("scheduling.k8s.io", "podgroups", "create"), 409) in asked
    assert {right for right, status in asked if status == 403} <= {NODES}


def test_without_the_rights_of_a_provider_the_job_says_what_is_missing(story: Story, role: Object) -> None:
    story.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    job = {**GOOD, "spec": {**GOOD["spec"], "gang": {"provider": "Native"}}}
    with story.operator():
        story.kubectl("apply", "-f", "-", stdin=json.dumps(job))
        story.until(lambda: "Stalled" in str(story.job().get("status", {})), "the operator has seen the job")
        story.until(lambda: "cannot create resource" in str(story.job()["status"]["conditions"]), "the job says so")
    assert not [name for name in story.pods() if "coordinator" not in name]


# --- and without one of them ----------------------------------------------------------------------------------------


def without(role: Object, right: Right, namespace: str) -> Object:
    """Return the role for a namespace, but for one right."""
    group, resource, verb = right
    rules = []
    for rule in copy.deepcopy(role["rules"]):
        if rule["apiGroups"] == [group] and resource in rule["resources"]:
            lesser = {**rule, "resources": [resource], "verbs": [each for each in rule["verbs"] if each != verb]}
            rule["resources"].remove(resource)
            rules.append(lesser)
        rules.append(rule)
    rules = [rule for rule in rules if rule["verbs"] and rule["resources"]]
    less = {**role, "metadata": {"name": ACCOUNT, "namespace": namespace}, "rules": rules}
    assert granted(less) == granted(role) - {right}
    return less


def binding(namespace: str, account: str) -> Object:
    """Give the account of another namespace the role in this one."""
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": ACCOUNT, "namespace": namespace},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": account}],
    }


class Lives:
    """Jobs that lead the same life, each where another right is missing, until the operator says that it misses it."""

    def __init__(self, story: Story, role: Object, rights: list[Right]) -> None:
        self.story = story
        self.left = {f"{story.namespace[:50]}-{number}": right for number, right in enumerate(rights)}
        """What has not been missed so far, by namespace."""
        spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in self.left]
        roles = [without(role, right, name) for name, right in self.left.items()]
        self.apply(*spaces, *roles, *(binding(name, story.namespace) for name in self.left))

    def apply(self, *objects: Object) -> None:
        """Apply all of them at once."""
        whole = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.story.server.kubectl("apply", "-f", "-", stdin=json.dumps(whole))

    def jobs(self, **changes: Any) -> None:
        """Apply the jobs of those that are left, of one pod and with these changes."""
        small = {"replicas": 1, "minReplicas": 1, "podsPerReplica": 1, "ttlSecondsAfterFinished": 1}
        spec = {**GOOD["spec"], **small, "nodePolicy": BUDGET, **changes}
        self.apply(*({**GOOD, "metadata": {"name": "llama", "namespace": name}, "spec": spec} for name in self.left))

    def objects(self, kind: str) -> dict[str, set[str]]:
        """Return the names of what there is of a kind, by namespace."""
        found = json.loads(self.story.server.kubectl("get", kind, "-A", "-o", "json"))["items"]
        names: dict[str, set[str]] = {}
        for it in found:
            names.setdefault(it["metadata"]["namespace"], set()).add(it["metadata"]["name"])
        return names

    def until(self, kind: str, holds: Callable[[set[str]], bool], what: str) -> None:
        """Wait until it holds for the objects of those that are left, or they are not left any more."""

        def all_did() -> bool:
            self.missed()
            there = self.objects(kind)
            return all(holds(there.get(name, set())) for name in self.left)

        self.story.until(all_did, f"{what}; left are {self.left}")

    def missed(self) -> None:
        """Strike out those of which the operator has said that the API server refused it."""
        said = self.story.log.read_text()
        for name, (group, resource, verb) in list(self.left.items()):
            if f'cannot {verb} resource "{resource}" in API group "{group}" in the namespace "{name}"' in said:
                del self.left[name]


def test_each_right_that_is_taken_away_is_missed(story: Story, role: Object) -> None:
    rights = sorted(granted(role) - CHECKED_OTHERWISE - SEEN_BY_WATCHES - {IN_PLACE, NAME_TAKEN})
    lives = Lives(story, role, rights)
    story.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    with story.operator(*(word for name in lives.left for word in ("--namespace", name))):
        lives.jobs()
        for _ in (1, 2):  # the second time the event of the first is counted up
            lives.until("pods", lambda names: len(names) == 2, "the pods are there")
            lives.jobs(suspend=True)
            lives.until("pods", lambda names: not names, "the pods are gone")
            lives.jobs()
        lives.until("pods", lambda names: "llama-r0-a2-0" in names and len(names) == 2, "the pods are back")
        lives.jobs(nodePolicy=NO_BUDGET)
        lives.until("poddisruptionbudgets", lambda names: not names, "the budgets are gone")
        for name in lives.left:
            there = Story(story.server, name, story.log.parent)
            there.kubelet_starts("llama-r0-a2-0", "llama-coordinator")
            for pod in ("llama-r0-a2-0", "llama-coordinator"):
                there.kubelet_ends(pod, 0, phase="Succeeded")
        lives.until("fthsdp", lambda names: not names, "the jobs are gone")
    assert lives.left == {}


def test_without_the_right_to_label_pods_a_restart_in_place_says_so(story: Story, role: Object, tmp_path: Path) -> None:
    story.kubectl("apply", "-f", "-", stdin=json.dumps(without(role, IN_PLACE, story.namespace)))
    with story.operator():
        story.start(template=TEMPLATE, failurePolicy={"inPlace": {}})
        story.kubelet_starts("llama-r2-a0-0", "llama-r2-a0-1", "llama-coordinator")
        with coordinator(story, tmp_path, host="127.0.29.3") as env:
            told(env, 0)
            words = 'cannot patch resource "pods" in API group ""'
            story.until(lambda: words in story.log.read_text(), "the operator says so")


def test_without_the_right_to_read_a_pod_one_that_is_in_the_way_is_not_named(story: Story, role: Object) -> None:
    story.kubectl("apply", "-f", "-", stdin=json.dumps(without(role, NAME_TAKEN, story.namespace)))
    story.server.account(story.namespace)
    metadata = {"name": "llama-r0-a0-0", "namespace": story.namespace}
    stranger = {"containers": [{"name": "main", "image": "x"}]}
    story.kubectl(
        "create",
        "-f",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": stranger}),
    )
    with story.operator():
        story.kubectl("apply", "-f", "-", stdin=json.dumps(GOOD))
        words = 'cannot get resource "pods" in API group ""'
        story.until(lambda: words in story.log.read_text(), "the operator says so")


@pytest.mark.parametrize("right", sorted(CHECKED_OTHERWISE), ids=[right[1] for right in sorted(CHECKED_OTHERWISE)])
def test_without_a_right_that_no_request_names_the_job_does_not_start(story: Story, role: Object, right: Right) -> None:
    story.kubectl("apply", "-f", "-", stdin=json.dumps(without(role, right, story.namespace)))
    with story.operator():
        story.kubectl("apply", "-f", "-", stdin=json.dumps(GOOD))
        story.until(lambda: "403 Forbidden" in story.kubectl("describe", "fthsdp", "llama"), "the job says so")


@pytest.mark.parametrize("right", sorted(SEEN_BY_WATCHES), ids=" ".join)
def test_without_a_right_to_look_the_operator_says_so(story: Story, role: Object, right: Right) -> None:
    group, resource, verb = right
    story.kubectl("apply", "-f", "-", stdin=json.dumps(without(role, right, story.namespace)))
    words = f'cannot {verb} resource "{resource}" in API group "{group}"'
    with story.operator():
        story.kubectl("apply", "-f", "-", stdin=json.dumps(GOOD))
        story.until(lambda: words in story.log.read_text(), "the operator says so")
