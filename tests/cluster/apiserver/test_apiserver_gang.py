"""Groups of pods on a real API server: every provider's are taken, and Kubernetes' own scheduler heeds its own.

The others are checked against the schemas that their projects publish (``podgroups/``); their schedulers are not here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.scheduling import Machines, scheduler, why_no_scheduler
from tests.cluster.apiserver.server import GANG_FEATURE, ApiServer
from tests.cluster.apiserver.test_apiserver_crd import GOOD
from tests.cluster.apiserver.test_apiserver_operator import Story
from tests.cluster.kube.shell import until

from fthsdp_operator.api import Job, parse_job
from fthsdp_operator.manifests import gang, render

pytestmark = pytest.mark.cluster

Manifest = dict[str, Any]
SCHEMAS = Path(__file__).parent / "podgroups"
GANGS: list[Manifest] = [
    {"provider": "Native"},
    {"provider": "Volcano"},
    {"provider": "Volcano", "queue": "research"},
    {"provider": "Coscheduling"},
    {"provider": "Coscheduling", "scheduleTimeoutSeconds": 300},
    {"provider": "Kueue", "queue": "research"},
]


@pytest.fixture(scope="module")
def providers(apiserver: ApiServer) -> ApiServer:
    """Give an API server with the kinds of all providers."""
    for schema in sorted(SCHEMAS.glob("*.yaml")):
        apiserver.kubectl("apply", "-f", str(schema))
        apiserver.kubectl("wait", "--for=condition=established", "-f", str(schema), "--timeout=60s")
    return apiserver


@pytest.fixture(scope="module")
def log(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if reason := why_no_scheduler():
        pytest.skip(reason)
    with scheduler(apiserver, tmp_path_factory.mktemp("scheduler"), f"--feature-gates={GANG_FEATURE}") as log:
        yield log


def job_of(namespace: str, template: Manifest, **spec: Any) -> Job:
    metadata = {"name": "llama", "namespace": namespace, "uid": "0b1c"}
    return parse_job({**GOOD, "metadata": metadata, "spec": {**GOOD["spec"], "template": template, **spec}})


def take(server: ApiServer, manifest: Manifest, *options: str) -> Manifest:
    """Create an object without its owner, which is not there; returns what the API server makes of it."""
    manifest["metadata"].pop("ownerReferences")
    command = ("create", "--validate=strict", "-o", "json", *options, "-f", "-")
    answer: Manifest = json.loads(server.kubectl(*command, stdin=json.dumps(manifest)))
    return answer


@pytest.mark.parametrize("wanted", GANGS, ids=[" ".join(map(str, wanted.values())) for wanted in GANGS])
def test_the_api_server_takes_groups_and_members_and_loses_nothing(
    providers: ApiServer, namespace: str, wanted: Manifest
) -> None:
    providers.account(namespace)
    job = job_of(namespace, GOOD["spec"]["template"], gang=wanted)
    pod = render.training_pod(job, replica=1, attempt=2, index=0)
    made = take(providers, pod, "--dry-run=server")
    for field in ("labels", "annotations"):
        assert pod["metadata"][field].items() <= made["metadata"][field].items()
    ours = {field: pod["spec"][field] for field in ("schedulingGroup", "schedulerName") if field in pod["spec"]}
    assert ours.items() <= made["spec"].items()
    if job.spec.gang.provider in gang.GROUP_API:
        group = render.pod_group(job, replica=1, attempt=2)
        assert group["spec"].items() <= take(providers, group, "--dry-run=server")["spec"].items()


@pytest.mark.parametrize("wanted", [{"provider": "Kueue"}, {"provider": "Native", "queue": "q"}, {"provider": "Slurm"}])
def test_a_gang_that_makes_no_sense_is_refused(apiserver: ApiServer, wanted: Manifest) -> None:
    job = {**GOOD, "spec": {**GOOD["spec"], "gang": wanted}}
    assert "spec.gang" in apiserver.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(job), fails=True)


# --- Kubernetes' own scheduler ---


def refused(machines: Machines, names: list[str], log: Path) -> None:
    """Wait until the scheduler has looked at a group and found no place for it."""
    kind = "podgroups.scheduling.k8s.io"

    def says_no() -> bool:
        found = machines.server.items(kind, machines.namespace).values()
        told = [it for group in found for it in group.get("status", {}).get("conditions", [])]
        return any(it["status"] == "False" for it in told) or any(machines.refusal(name) for name in names)

    until(says_no, "the group is refused", timeout=30, log=log)


def attempt_of(machines: Machines, number: int, **spec: Any) -> list[str]:
    """Create a group and its two pods; returns the names of the pods."""
    machines.server.account(machines.namespace)
    job = job_of(machines.namespace, dict(machines.template()), gang={"provider": "Native"}, **spec)
    take(machines.server, render.pod_group(job, replica=0, attempt=number))
    pods = [render.training_pod(job, replica=0, attempt=number, index=index) for index in range(2)]
    return [str(take(machines.server, pod)["metadata"]["name"]) for pod in pods]


def test_native_places_all_pods_of_an_attempt_or_none(providers: ApiServer, namespace: str, log: Path) -> None:
    machines = Machines(server=providers, namespace=namespace)
    machines.add("small", room=1)
    names = attempt_of(machines, 0)
    refused(machines, names, log)
    assert machines.places() == {}
    machines.add("another", room=1)
    assert set(machines.wait(names, log).values()) == {"small", "another"}


def test_native_places_the_next_attempt_like_the_first(providers: ApiServer, namespace: str, log: Path) -> None:
    machines = Machines(server=providers, namespace=namespace)
    machines.add("one", room=3)
    machines.wait(attempt_of(machines, 0), log)
    names = attempt_of(machines, 1)  # while the first one is still there: one of them would fit
    refused(machines, names, log)
    assert not set(names) & machines.places().keys()
    machines.add("two", room=2)
    machines.wait(names, log)


def test_native_holds_no_node_for_a_replica_that_fits_into_no_rack(
    providers: ApiServer, namespace: str, log: Path
) -> None:
    machines = Machines(server=providers, namespace=namespace)
    for rack in ("a", "b"):
        machines.add(f"{rack}-0", room=1, labels={"example.com/rack": f"{namespace}-{rack}"})
    names = attempt_of(machines, 0, placement={"replicaTopologyKey": "example.com/rack"})
    refused(machines, names, log)
    assert machines.places() == {}


# --- the operator ---


def groups(story: Story) -> set[str]:
    """Groups that are not on their way out, by replica and attempt."""
    found = story.server.items("podgroups.scheduling.k8s.io", story.namespace)
    there = [name for name, it in found.items() if "deletionTimestamp" not in it["metadata"]]
    return {"-".join(name.split("-")[-2:]) for name in there}


def states(story: Story) -> list[str]:
    return [it["state"] for it in story.job()["status"].get("replicaStatuses", [])]


def test_the_operator_keeps_a_group_for_each_attempt_and_deletes_it_with_its_pods(
    apiserver: ApiServer, namespace: str, tmp_path: Path
) -> None:
    story = Story(apiserver, namespace, tmp_path)
    with story.operator():
        story.start(gang={"provider": "Native"})
        assert groups(story) == {"r0-a0", "r1-a0", "r2-a0"}
        story.until(lambda: states(story) == ["Starting"] * 3, "all pods were seen")
        story.kubectl("delete", "pod", "llama-r2-a0-1", "--grace-period=0", "--force")
        story.until(lambda: groups(story) == {"r0-a0", "r1-a0", "r2-a1"}, "replica 2 has another group")
        story.kubectl("patch", "fthsdp", "llama", "--type=merge", "-p", '{"spec": {"suspend": true}}')
        story.until(lambda: not groups(story), "no group is left")
        story.kubectl("patch", "fthsdp", "llama", "--type=merge", "-p", '{"spec": {"suspend": false}}')
        story.until(lambda: len(groups(story)) == 3, "the groups are back")
    story.kubectl("delete", "fthsdp", "llama", "--timeout=30s")  # with no operator there
    story.until(lambda: not groups(story), "the garbage collector took the groups")
