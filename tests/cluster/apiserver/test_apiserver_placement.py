"""Where a real scheduler puts the pods that the operator makes; the nodes are only entries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.scheduling import Machines, scheduler, why_no_scheduler
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_crd import GOOD
from tests.cluster.kube.shell import until

from fthsdp_operator.api import parse_job
from fthsdp_operator.manifests import render

pytestmark = pytest.mark.cluster

Manifest = dict[str, Any]
RACK = "example.com/rack"


@pytest.fixture(scope="module")
def log(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if reason := why_no_scheduler():
        pytest.skip(reason)
    with scheduler(apiserver, tmp_path_factory.mktemp("scheduler")) as log:
        yield log


@pytest.fixture
def machines(apiserver: ApiServer, namespace: str) -> Machines:
    """Return machines; nothing of the job but its pods is needed here, so no operator runs."""
    apiserver.account(namespace)
    return Machines(server=apiserver, namespace=namespace)


def pods(
    machines: Machines,
    template: Manifest,
    replica: int,
    *,
    attempt: int = 0,
    count: int = 2,
    uid: str = "job-1",
    **spec: Any,
) -> list[Manifest]:
    """Return the pods of an attempt."""
    whole = {**GOOD["spec"], "podsPerReplica": count, "template": template, **spec}
    job = parse_job({**GOOD, "metadata": {"name": "llama", "namespace": machines.namespace, "uid": uid}, "spec": whole})
    return [render.training_pod(job, replica=replica, attempt=attempt, index=index) for index in range(count)]


def create(machines: Machines, *made: Manifest) -> list[str]:
    """Create pods without their owner, which is not there, and return their names."""
    for pod in made:
        pod["metadata"].pop("ownerReferences")
        machines.server.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    return [pod["metadata"]["name"] for pod in made]


def racks(machines: Machines, *rooms: int) -> None:
    """Add racks of two nodes each, with room for so many pods on a node."""
    for rack, room in enumerate(rooms):
        for node in range(2):
            machines.add(f"rack{rack}-{node}", room=room, labels={RACK: f"{machines.namespace}-{rack}"})


def rack_of(places: dict[str, str], names: list[str]) -> set[str]:
    return {places[name].partition("-")[0] for name in names}


def refused(machines: Machines, pod: str, log: Path) -> str:
    until(lambda: bool(machines.refusal(pod)), f"{pod} is refused", timeout=60, log=log)
    return machines.refusal(pod)


def test_the_pods_of_a_replica_share_a_rack(machines: Machines, log: Path) -> None:
    racks(machines, 2, 2)
    together = {"placement": {"replicaTopologyKey": RACK}}
    made = [create(machines, *pods(machines, machines.template(), replica, **together)) for replica in range(4)]
    places = machines.wait([name for names in made for name in names], log)
    assert [len(rack_of(places, names)) for names in made] == [1, 1, 1, 1]


def test_a_replica_that_fits_into_no_rack_waits_as_a_whole_or_in_part_but_is_never_torn_apart(
    machines: Machines, log: Path
) -> None:
    racks(machines, 1, 1)
    names = create(machines, *pods(machines, machines.template(), 0, count=3, placement={"replicaTopologyKey": RACK}))
    places = machines.wait(names[:2], log)
    assert len(rack_of(places, names[:2])) == 1
    assert "affinity" in refused(machines, names[2], log)


def test_the_next_attempt_may_go_to_another_rack_while_the_last_one_is_still_there(
    machines: Machines, log: Path
) -> None:
    racks(machines, 1, 1)
    together = {"placement": {"replicaTopologyKey": RACK}}
    old = create(machines, *pods(machines, machines.template(), 0, **together))
    first = rack_of(machines.wait(old, log), old)
    new = create(machines, *pods(machines, machines.template(), 0, attempt=1, **together))
    assert rack_of(machines.wait(new, log), new) != first


def test_an_exclusive_replica_shares_its_rack_with_no_other_of_any_job(machines: Machines, log: Path) -> None:
    racks(machines, 4, 4)
    alone = {"placement": {"replicaTopologyKey": RACK, "exclusive": True}}
    mine = [create(machines, *pods(machines, machines.template(), replica, **alone)) for replica in range(2)]
    places = machines.wait([name for names in mine for name in names], log)
    assert rack_of(places, mine[0]) != rack_of(places, mine[1])
    third = create(machines, *pods(machines, machines.template(), 2, **alone))
    assert "anti-affinity" in refused(machines, third[0], log)
    stranger = pods(machines, machines.template(), 0, uid="job-2")
    for pod in stranger:
        pod["metadata"]["name"] = pod["metadata"]["name"].replace("llama", "other")
    others = create(machines, *stranger)  # it does not ask to be alone, and is kept out all the same
    assert "anti-affinity" in refused(machines, others[0], log)


def with_cache(machines: Machines, node: str) -> Manifest:
    """Put a pod on a node, and return a term that asks to be in its rack."""
    cache = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "cache", "namespace": machines.namespace, "labels": {"app": "cache"}},
        "spec": {"containers": [{"name": "cache", "image": "x"}], "nodeName": f"{machines.namespace}-{node}"},
    }
    machines.server.kubectl("create", "-f", "-", stdin=json.dumps(cache))
    return {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": RACK}


def test_the_users_own_affinity_holds_as_well(machines: Machines, log: Path) -> None:
    racks(machines, 4, 4, 4)
    beside = {"weight": 100, "podAffinityTerm": with_cache(machines, "rack1-0")}
    node = {"key": RACK, "operator": "NotIn", "values": [f"{machines.namespace}-0"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [node]}]}
    own = machines.template(
        affinity={
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms},
            "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [beside]},
        }
    )
    names = create(machines, *pods(machines, own, 0, placement={"replicaTopologyKey": RACK}))
    assert rack_of(machines.wait(names, log), names) == {"rack1"}


def test_why_affinity_that_a_template_requires_is_refused_beside_ours(machines: Machines, log: Path) -> None:
    """The rack with the other pod has room for all, and the scheduler finds none."""
    racks(machines, 4)
    other = with_cache(machines, "rack0-0")
    made = pods(machines, machines.template(), 0, placement={"replicaTopologyKey": RACK})
    for pod in made:
        pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"].append(other)
    names = create(machines, *made)
    assert "pod affinity" in refused(machines, names[0], log)
    assert not set(names) & machines.places().keys()
