"""What is added to a user's pod, and that nothing of it is taken away."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.unit.operator.templates import TEMPLATES
from tests.unit.operator.world import NAME, manifest

from fthsdp_operator.api import Job, parse_job
from fthsdp_operator.manifests import render

Manifest = dict[str, Any]
SHM = "/dev/shm"


def job_of(template: Manifest | str, **spec: Any) -> Job:
    return parse_job(manifest(template=TEMPLATES[template] if isinstance(template, str) else template, **spec))


def pod(job: Job, *, replica: int = 0, attempt: int = 0, index: int = 0) -> Manifest:
    return render.training_pod(job, replica=replica, attempt=attempt, index=index)


def master_port(made: Manifest) -> int:
    env = {it["name"]: it.get("value") for it in made["spec"]["containers"][0]["env"]}
    assert env["MASTER_PORT"] == env["PET_MASTER_PORT"]
    return int(env["MASTER_PORT"])


def host_ports(made: Manifest) -> list[int]:
    return [it["hostPort"] for it in made["spec"]["containers"][0].get("ports", []) if "hostPort" in it]


def lasts(given: Any, made: Any) -> bool:
    """Whether all that was given is there: in mappings more may be, and in lists too."""
    if isinstance(given, dict):
        return isinstance(made, dict) and all(name in made and lasts(it, made[name]) for name, it in given.items())
    if isinstance(given, list):
        return isinstance(made, list) and all(any(lasts(it, one) for one in made) for it in given)
    return bool(given == made)


@pytest.mark.parametrize("template", TEMPLATES)
def test_all_of_a_template_stays(template: str) -> None:
    made = pod(job_of(template))
    assert lasts(TEMPLATES[template], made)
    order = [it["name"] for it in TEMPLATES[template]["spec"]["containers"]]
    assert [it["name"] for it in made["spec"]["containers"]] == order


# --- the network of the node ---


def test_on_the_network_of_a_node_no_two_pods_that_may_be_there_at_a_time_share_a_port() -> None:
    job = job_of("the network of the node", replicas=40, spares=2)
    for replicas in itertools.pairwise(range(42)):
        pods = [pod(job, replica=replica, attempt=attempt) for replica in replicas for attempt in (6, 7)]
        ports = [port for made in pods for port in (master_port(made), master_port(made) + 1)]
        assert len(set(ports)) == len(ports)
        assert [port for made in pods for port in host_ports(made)] == ports  # so that the scheduler knows


def test_only_the_pod_with_the_rendezvous_claims_its_port() -> None:
    job = job_of("the network of the node")
    leader, other = pod(job, replica=1), pod(job, replica=1, index=1)
    assert master_port(leader) == master_port(other) == 29504
    assert (host_ports(leader), host_ports(other)) == ([29504, 29505], [])


def test_a_pod_with_an_address_of_its_own_claims_nothing_of_its_node() -> None:
    made = pod(job_of("several containers"), replica=1, attempt=3)
    assert (master_port(made), host_ports(made)) == (29500, [])
    assert "dnsPolicy" not in made["spec"]


def test_a_port_that_the_user_declares_is_not_declared_twice() -> None:
    ports = pod(job_of("the network of the node, ports and a name server given"))["spec"]["containers"][0]["ports"]
    assert [it["containerPort"] for it in ports] == [29500, 9400, 29501]


@pytest.mark.parametrize(
    ("given", "made"),
    [({}, "ClusterFirstWithHostNet"), ({"dnsPolicy": "ClusterFirst"}, "ClusterFirstWithHostNet")]
    + [({"dnsPolicy": own}, own) for own in ("ClusterFirstWithHostNet", "Default", "None")],
)
def test_on_the_network_of_a_node_the_names_of_the_cluster_are_known(given: Manifest, made: str) -> None:
    template = {"spec": {**TEMPLATES["the network of the node"]["spec"], **given}}
    assert pod(job_of(template))["spec"]["dnsPolicy"] == made


def test_the_user_may_choose_the_port() -> None:
    own = {"network": {"masterPort": 12000}}
    assert master_port(pod(job_of("several containers", **own), replica=2)) == 12000
    assert master_port(pod(job_of("the network of the node", **own), replica=2, attempt=1)) == 12010


# --- shared memory ---


def shared_memory(made: Manifest) -> list[Manifest]:
    mounts = made["spec"]["containers"][0]["volumeMounts"]
    names = [it["name"] for it in mounts if it["mountPath"].rstrip("/") == SHM]
    return [it for it in made["spec"]["volumes"] if it["name"] in names]


def test_the_training_container_gets_as_much_shared_memory_as_it_may_have_memory() -> None:
    made = pod(job_of("several containers"))
    assert shared_memory(made) == [{"name": "fthsdp-shm", "emptyDir": {"medium": "Memory"}}]
    assert SHM not in str(made["spec"]["containers"][1])


def test_shared_memory_of_the_users_own_wins() -> None:
    assert [it["name"] for it in shared_memory(pod(job_of("shared memory of its own")))] == ["shm"]


def test_where_the_node_shares_its_memory_nothing_hides_it() -> None:
    assert shared_memory(pod(job_of("the processes of the others"))) == []


# --- ranks and GPUs ---


@pytest.mark.parametrize(
    ("resources", "ranks"),
    [
        ({}, 1),
        ({"limits": {"nvidia.com/gpu": 8}}, 8),
        ({"limits": {"nvidia.com/gpu": "4"}, "requests": {"nvidia.com/gpu": "4"}}, 4),
        ({"requests": {"amd.com/gpu": 2}}, 2),
        ({"limits": {"nvidia.com/mig-3g.40gb": 2, "nvidia.com/mig-1g.10gb": 1}}, 3),
        ({"limits": {"nvidia.com/gpu": 0, "cpu": 7, "rdma/hca": 8}}, 1),
        ({"limits": {"nvidia.com/gpu": "many"}}, 1),
    ],
)
def test_a_pod_has_as_many_ranks_as_gpus(resources: Manifest, ranks: int) -> None:
    template = {"spec": {"containers": [{"name": "train", "image": "x", "resources": resources}]}}
    made = pod(job_of(template))
    env = {it["name"]: it.get("value") for it in made["spec"]["containers"][0]["env"]}
    assert env["PET_NPROC_PER_NODE"] == env["FTHSDP_PROCESSES_PER_POD"] == str(ranks)


def test_what_the_user_says_about_ranks_wins() -> None:
    assert job_of("GPUs and network cards").spec.ranks_per_pod == 8
    assert job_of("GPUs and network cards", processesPerPod=4).spec.ranks_per_pod == 4


# --- which container counts ---


def test_the_first_container_is_named_for_us_and_for_kubectl() -> None:
    notes = pod(job_of("several containers"))["metadata"]["annotations"]
    assert notes == {"fthsdp.dev/container": "train", "kubectl.kubernetes.io/default-container": "train"}


def test_a_user_may_have_kubectl_show_another_one() -> None:
    own = {"annotations": {"kubectl.kubernetes.io/default-container": "exporter"}}
    made = pod(job_of(TEMPLATES["several containers"] | {"metadata": own}))
    assert made["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] == "exporter"
    assert made["metadata"]["annotations"]["fthsdp.dev/container"] == "train"


def test_pods_are_found_under_names_of_their_own() -> None:
    spec = pod(job_of("the network of the node"), replica=2, attempt=1, index=1)["spec"]
    assert (spec["hostname"], spec["subdomain"]) == (f"{NAME}-r2-a1-1", NAME)
