"""What docs/what-happens-when.md says of Kubernetes: each row of its table is a test of the same name.

One job of three replicas trains through all of it, on three nodes, one thing after the other. A second one, the
witness, trains beside it and must notice nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from tests.cluster.kube.cluster import Cluster
from tests.cluster.kube.hardware import Hardware
from tests.cluster.kube.helm import CHART
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.shell import ClusterError, until
from tests.cluster.kube.training import Training
from tests.cluster.livejob import LiveJob, entry_of, state_of, trains_in_full
from tests.cluster.stage import (
    ENDLESS,
    NAMESPACE,
    NOTICED,
    RELEASE,
    another_acts,
    diagnosis,
    example,
    helm_and_namespaces,
    image_values,
    no_new_pods,
    refused_by_quota,
)

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
JOB, WITNESS = "llama", "witness"
EVERY_STEPS = 5
STARTED = 180.0
"""Seconds within which four processes that import torch begin to train, on two busy cores."""
FAILING = """
import os, runpy, signal
def fail(*_):
    raise RuntimeError("the sky falls")
def eat(*_):
    b"x" * (8 << 30)
signal.signal(signal.SIGUSR1, fail)
signal.signal(signal.SIGUSR2, eat)
runpy.run_module("fthsdp.recipes.tiny_llama", run_name="__main__", alter_sys=True)
"""
"""The example, as a program that fails when it is told to: of an error, and of its hunger."""
MEMORY = "1Gi"
CUT_OFF = 20.0
"""Seconds in which all connections to a node are given up, and everybody on the other side is silent for too long."""
AWAY = 60.0
"""Seconds for which there is no API server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A cluster with the operator, the job and its witness."""

    cluster: Cluster
    operator_node: str
    manifests: tuple[Object, Object]

    @property
    def kubectl(self) -> Kubectl:
        return self.cluster.kubectl

    @property
    def job(self) -> LiveJob:
        return LiveJob(kubectl=self.kubectl, namespace=NAMESPACE, name=JOB)

    @property
    def witness(self) -> LiveJob:
        return LiveJob(kubectl=self.kubectl, namespace=NAMESPACE, name=WITNESS)

    def set_up(self) -> None:
        """Have both jobs train as their manifests say, whatever an earlier test has left."""
        self.kubectl.apply(*self.manifests)
        generation = self.kubectl.get("fthsdp", JOB, "--namespace", NAMESPACE)["metadata"]["generation"]
        try:
            self.job.until(
                lambda status: status["observedGeneration"] == generation and _as_written(status),
                "the job trains in full",
                timeout=NOTICED,
            )
        except AssertionError:
            self.job.on("delete", "fthsdp", JOB, "--ignore-not-found", "--timeout=60s")
            self.job.on("delete", "pods", f"--selector=fthsdp.dev/job={JOB}", "--grace-period=0", "--force")
            self.kubectl.apply(*self.manifests)
            self.job.until(_as_written, "the job trains in full", timeout=STARTED)
        self.job.wait_for_coordinator()

    def ready(self, node: str) -> bool:
        conditions = self.kubectl.get("node", node)["status"]["conditions"]
        return any((it["type"], it["status"]) == ("Ready", "True") for it in conditions)

    def diagnosis(self) -> str:
        return diagnosis(self.kubectl, JOB, WITNESS)


def _as_written(status: Object) -> bool:
    rolled = status["currentRevision"] == status["updateRevision"]
    return rolled and trains_in_full(status) and status["readyReplicas"] == 3


@pytest.fixture(scope="module")
def stage(cluster: Cluster) -> Iterator[Stage]:
    """Install the operator, on a node that it keeps, and start both jobs."""
    with helm_and_namespaces(cluster) as helm:
        operator_node = workers(cluster.kubectl)[0]
        manifests = _manifests(cluster.training(), operator_node)
        stage = Stage(cluster=cluster, operator_node=operator_node, manifests=manifests)
        node = {r"nodeSelector.kubernetes\.io/hostname": stage.operator_node}
        helm.install(RELEASE, CHART, image_values(cluster) | node)
        try:
            # All of the witness stays where the operator is, its coordinator too: no machine is broken there.
            with cordoned(stage.kubectl, *(node for node in workers(stage.kubectl) if node != operator_node)):
                stage.kubectl.apply(stage.manifests[1])
                until(lambda: _placed(stage.witness) == 2, "the witness has its place", timeout=NOTICED)
            stage.kubectl.apply(stage.manifests[0])
            for job in (stage.job, stage.witness):
                job.until(trains_in_full, f"{job.name} trains in full", timeout=STARTED)
            yield stage
        except AssertionError as error:
            error.add_note(stage.diagnosis())
            raise
        finally:
            stage.job.on("delete", "fthsdp", "--all", "--timeout=60s")
            stage.job.on("delete", "pods", "--all", "--grace-period=0", "--force", "--timeout=60s")


def _placed(job: LiveJob) -> int:
    found = job.kubectl.items("pods", "--namespace", job.namespace, "--selector", f"fthsdp.dev/job={job.name}")
    return sum("nodeName" in pod["spec"] for pod in found)


def workers(kubectl: Kubectl) -> list[str]:
    return [node["metadata"]["name"] for node in kubectl.items("nodes") if not node["spec"].get("taints")]


def _manifests(training: Training, operator_node: str) -> tuple[Object, Object]:
    """Write both jobs: the one spreads over the nodes, the witness stays where the operator is."""
    job, witness = example(training, ENDLESS), example(training, ENDLESS)
    for manifest, name, replicas in ((job, JOB, 3), (witness, WITNESS, 1)):
        manifest["metadata"]["name"] = name
        manifest["spec"] |= {"replicas": replicas, "minReplicas": 1, "podsPerReplica": 1, "retainFailedPods": 0}
        manifest["spec"]["failurePolicy"] = {
            "perReplica": {"limit": 100},
            "backoff": {"initialSeconds": 0, "maxSeconds": 0},
        }
    witness["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": operator_node}
    pod = job["spec"]["template"]["spec"]
    pod["affinity"] = {"podAntiAffinity": _apart()}
    (container,) = pod["containers"]
    container["command"] = [container["command"][0], "-c", FAILING]
    container["resources"]["limits"] = {"memory": MEMORY}
    job["spec"]["nodePolicy"] = {"unreachableSeconds": 5, "onCordon": "Ignore"}
    if training.shared:
        job["spec"]["checkpoint"] = {"path": str(training.shared / "checkpoints"), "everySteps": EVERY_STEPS}
    return job, witness


def _apart() -> Object:
    trainers = {"fthsdp.dev/job": JOB, "fthsdp.dev/role": "trainer"}
    others = {"labelSelector": {"matchLabels": trainers}, "topologyKey": "kubernetes.io/hostname"}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": others}]}


@pytest.fixture
def job(stage: Stage) -> Iterator[LiveJob]:
    """Give the job as it trains in full; see afterwards that the witness noticed nothing."""
    stage.set_up()
    before = stage.witness.status(), stage.witness.pods_of(0)
    yield stage.job
    assert stage.witness.pods_of(0) == before[1]
    assert stage.witness.trains_on()["restarts"] == before[0]["restarts"] == 0


@pytest.fixture
def hardware(cluster: Cluster) -> Hardware:
    if cluster.hardware is None:
        pytest.skip("this cluster's machines are not ours to break")
    return cluster.hardware


@pytest.fixture
def checkpoints(stage: Stage) -> None:
    if "checkpoint" not in stage.manifests[0]["spec"]:
        pytest.skip("this cluster has no folder that all pods share")


def send(job: LiveJob, replica: int, signal: str) -> None:
    """Send a signal to the first process of a replica's pod."""
    words = f"import os, signal; os.kill(1, signal.{signal})"
    job.on("exec", job.pod(replica), "--", "python3", "-c", words)


def delete_pods(job: LiveJob, *pods: str) -> None:
    job.on("delete", "pod", *pods, "--wait=false")


@contextmanager
def cordoned(kubectl: Kubectl, *nodes: str) -> Iterator[None]:
    kubectl("cordon", *nodes)
    try:
        yield
    finally:
        kubectl("uncordon", *nodes)


def attempts(status: Object) -> dict[int, tuple[int, int]]:
    """Return attempt and restarts of each replica that the job has."""
    there = [entry for entry in status["replicaStatuses"] if entry["state"] != "Removed"]
    return {entry["index"]: (entry["attempt"], entry["restarts"]) for entry in there}


def waits_for(reason: str, status: Object) -> bool:
    """Return whether that keeps replica 2 from training."""
    waiting: Object = entry_of(status, 2).get("waiting") or {}
    return waiting.get("reason", "") == reason


def test_a_container_exits(job: LiveJob) -> None:
    with job.outage(2) as outage:
        send(job, 2, "SIGUSR1")
    failure = outage.failure(2)
    assert (failure["reason"], failure["exitCode"], failure["container"]) == ("Error", 1, "trainer")
    assert failure["message"].endswith("RuntimeError: the sky falls")
    assert failure["action"] == "RestartReplica"
    assert outage.restarts(2) == 1
    assert outage.meanwhile > 0


def test_a_container_is_out_of_memory(job: LiveJob) -> None:
    with job.outage(2) as outage:
        send(job, 2, "SIGUSR2")
    failure = outage.failure(2)
    assert (failure["reason"], failure["exitCode"]) == ("OOMKilled", 137)
    assert failure["action"] == "RestartReplica"
    assert outage.restarts(2) == 1
    assert outage.meanwhile > 0


def test_an_image_does_not_exist(job: LiveJob, stage: Stage) -> None:
    template = stage.manifests[0]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    with job.outage(2) as outage:
        job.patch({"template": {"spec": {"containers": [container | {"image": "localhost/fthsdp-tpyo:1"}]}}})
        job.until(partial(waits_for, "ImagePullFailed"), "the status says what it waits for", timeout=NOTICED)
        assert job.trains_on()["state"] == "Degraded"
        job.patch({"template": template})
    assert outage.restarts(2) == 0
    assert outage.meanwhile > 0


def test_a_pod_is_deleted(job: LiveJob) -> None:
    with job.outage(2) as outage:
        delete_pods(job, job.pod(2))
    failure = outage.failure(2)
    assert (failure["reason"], failure["action"]) == ("PodDeleted", "RestartReplicaFree")
    assert outage.restarts(2) == 1
    assert outage.meanwhile > 0


def evict(job: LiveJob, replica: int) -> None:
    """Ask for what a drain asks for; raises ClusterError when that is refused."""
    metadata = {"name": job.pod(replica), "namespace": NAMESPACE}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{metadata['name']}/eviction"
    job.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))


def test_a_pod_is_evicted(job: LiveJob) -> None:
    with job.outage(1) as outage:
        evict(job, 1)
    failure = outage.failure(1)
    assert (failure["reason"], failure["action"]) == ("Evicted", "RestartReplicaFree")
    assert outage.restarts(1) == 1
    assert outage.meanwhile > 0


def allowed(job: LiveJob) -> list[int]:
    """Return how many evictions each disruption budget allows, as Kubernetes counts."""
    found = job.kubectl.items("poddisruptionbudgets", "--namespace", job.namespace)
    return [it.get("status", {}).get("disruptionsAllowed", 0) for it in found]


def test_nodes_are_drained_and_the_job_has_a_disruption_budget(job: LiveJob, stage: Stage) -> None:
    job.patch({"nodePolicy": {"disruptionBudget": "MinReplicas"}})
    try:
        until(lambda: allowed(job) == [2], "all but minReplicas may go", timeout=NOTICED)
        with job.outage(1, 2) as outage, cordoned(stage.kubectl, *workers(stage.kubectl)):
            for replica in (1, 2):
                evict(job, replica)
            for _ in range(2):  # at once, and when their groups are gone
                with pytest.raises(ClusterError, match="disruption budget"):
                    evict(job, 0)
                job.until(partial(waits_for, "Unschedulable"), "replica 2 finds no node", timeout=NOTICED)
        assert [outage.failure(replica)["reason"] for replica in (1, 2)] == ["Evicted", "Evicted"]
        assert outage.meanwhile > 0
        until(lambda: allowed(job) == [2], "they are back", timeout=NOTICED)
        with job.outage(0) as outage:
            evict(job, 0)
        assert outage.failure(0)["reason"] == "Evicted"
    finally:
        job.patch({"nodePolicy": {"disruptionBudget": "None"}})
    until(lambda: allowed(job) == [], "there is no budget any more", timeout=NOTICED)


def test_two_replicas_fail_at_once(job: LiveJob) -> None:
    with job.outage(0, 2) as outage:
        delete_pods(job, job.pod(0), job.pod(2))
    assert [outage.restarts(replica) for replica in (0, 1, 2)] == [1, 0, 1]
    assert outage.meanwhile > 0


@pytest.mark.usefixtures("checkpoints")
def test_all_replicas_fail_at_once(job: LiveJob) -> None:
    with job.outage(0, 1, 2) as outage:
        job.on("delete", "pods", *(job.pod(replica) for replica in (0, 1, 2)), "--grace-period=0", "--force")
    assert [outage.restarts(replica) for replica in (0, 1, 2)] == [1, 1, 1]
    assert job.checkpoint() >= outage.began - 2 * EVERY_STEPS


def test_a_replica_finds_no_node(job: LiveJob, stage: Stage) -> None:
    with job.outage(2) as outage, cordoned(stage.kubectl, *workers(stage.kubectl)):
        delete_pods(job, job.pod(2))
        job.until(partial(waits_for, "Unschedulable"), "the status says what it waits for", timeout=NOTICED)
        assert job.trains_on()["state"] == "Degraded"
    assert outage.restarts(2) == 1


def delete_coordinator(job: LiveJob) -> None:
    before = job.status()["coordinator"]
    delete_pods(job, f"{JOB}-coordinator")
    job.until(
        lambda status: (
            status["coordinator"]["starts"] == before["starts"] + 1
            and status["coordinator"].get("podUid", before["podUid"]) != before["podUid"]
        ),
        "another coordinator is on its way",
    )


def replace_coordinator(job: LiveJob) -> None:
    delete_coordinator(job)
    job.wait_for_coordinator()


def test_the_coordinator_is_deleted(job: LiveJob, stage: Stage) -> None:
    before, untouched = job.status(), job.pods_of(0, 1, 2)
    with cordoned(stage.kubectl, *workers(stage.kubectl)):
        delete_coordinator(job)
        job.trains_without_coordinator(steps=5)
        assert trains_in_full(job.status())
    job.wait_for_coordinator()
    assert attempts(job.trains_on(steps=5)) == attempts(before)
    job.until(trains_in_full, "it counts all of them")
    assert job.pods_of(0, 1, 2) == untouched


def test_the_operator_is_deleted_while_it_restarts_a_replica(job: LiveJob) -> None:
    with job.outage(2) as outage, no_new_pods(job.kubectl):
        old = job.pod(2)
        delete_pods(job, old)
        job.until(refused_by_quota, "it has made room, and put nothing there", timeout=NOTICED)
        with another_acts(job.kubectl):
            assert job.pods().keys() <= {old, job.pod(0), job.pod(1)}
    assert outage.failure(2)["reason"] == "PodDeleted"
    assert outage.attempt(2) + 1 == attempts(outage.after)[2][0]
    assert outage.restarts(2) == 1
    assert outage.meanwhile > 0


def trains_less(status: Object, replica: int) -> bool:
    return state_of(status, replica) not in ("Active", "")


def test_the_api_server_restarts_after_a_minute(job: LiveJob, hardware: Hardware) -> None:
    pod = job.pods()[job.pod(2)]
    with job.outage(2) as outage:
        began = now()
        with hardware.without_api_server():
            time.sleep(AWAY)
            failed = now()
            hardware.crash(pod["spec"]["nodeName"], pod["metadata"]["uid"])
    assert outage.restarts(2) == 1
    assert sum(time < failed for time in job.times_of_steps(since=began)) > AWAY / 4


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def placed(job: LiveJob) -> dict[int, str]:
    """Return the node of each replica."""
    return {replica: job.node(job.pod(replica)) for replica in (0, 1, 2)}


def test_a_node_is_cordoned(job: LiveJob, stage: Stage) -> None:
    nodes = placed(job)
    node = nodes[2]
    with cordoned(stage.kubectl, node):
        untouched = job.pods_of(0, 1, 2)
        job.trains_on(steps=5)
        assert job.pods_of(0, 1, 2) == untouched
        there = [replica for replica in nodes if nodes[replica] == node]
        with job.outage(*there) as outage:
            job.patch({"nodePolicy": {"onCordon": "Migrate"}})
        assert node not in placed(job).values()
    for replica in there:
        failure = outage.failure(replica)
        assert (failure["reason"], failure["action"]) == ("NodeCordoned", "RestartReplicaFree")
        assert outage.restarts(replica) == 1
    assert outage.meanwhile > 0


def node_of_replicas_only(job: LiveJob, stage: Stage) -> tuple[str, list[int]]:
    """Return a node that has neither the operator nor the job's coordinator, and which replicas it has.

    What happened before may have left none there: then one is sent.
    """
    needed = {stage.operator_node, job.node(f"{JOB}-coordinator")}
    if needed.issuperset(placed(job).values()):
        with cordoned(stage.kubectl, *needed), job.outage(2):
            delete_pods(job, job.pod(2))
    nodes = placed(job)
    node = next(node for node in nodes.values() if node not in needed)
    return node, [replica for replica in nodes if nodes[replica] == node]


def test_a_node_is_unplugged(job: LiveJob, stage: Stage, hardware: Hardware) -> None:
    node, there = node_of_replicas_only(job, stage)
    old = [(replica, entry_of(job.status(), replica)["attempt"]) for replica in there]
    with hardware.unplugged(node):
        with job.outage(*there) as outage:
            pass
        after = job.until(lambda status: is_free(status, node, *there), "that costs nothing", timeout=NOTICED)
    assert outage.meanwhile > 0
    assert node not in placed(job).values()
    for replica in there:  # the scheduler may have sent it there again: it hears of the loss later than the operator
        assert entry_of(after, replica).get("recentRestarts") == entry_of(outage.before, replica).get("recentRestarts")
    log = ("logs", "--follow", "--tail=400", f"{JOB}-coordinator", "--namespace", NAMESPACE)
    with job.kubectl.watch(*log) as seen:
        for replica, attempt in old:
            refused = f"refused: replica {replica} attempt {attempt} "
            seen.wait_for(lambda line: refused in line, f"{refused}…", timeout=NOTICED)  # noqa: B023
    until(lambda: stage.ready(node), f"{node} is back", timeout=NOTICED)
    until(lambda: len(job.pods()) == 3, "what ran there is gone", timeout=NOTICED)
    job.trains_on()


def node_of_coordinator(job: LiveJob, stage: Stage) -> str:
    """Return the node of the job's coordinator, which goes to another one first if the operator needs that node."""
    if job.node(f"{JOB}-coordinator") == stage.operator_node:
        with cordoned(stage.kubectl, stage.operator_node):
            replace_coordinator(job)
        job.trains_on()
        job.until(trains_in_full, "it counts all of them")
    return job.node(f"{JOB}-coordinator")


def test_the_node_of_the_coordinator_is_unplugged_and_plugged_in_again(
    job: LiveJob, stage: Stage, hardware: Hardware
) -> None:
    node = node_of_coordinator(job, stage)
    job.patch({"nodePolicy": {"unreachableSeconds": 120}})  # it is back before anybody calls the node lost
    before, untouched = job.status(), job.pods_of(0, 1, 2)
    with hardware.unplugged(node):
        time.sleep(CUT_OFF)  # what is tested is that this time passes
    until(lambda: stage.ready(node), f"{node} is ready", timeout=NOTICED)
    assert attempts(job.trains_on(steps=5)) == attempts(before)
    job.until(trains_in_full, "it counts all of them")
    assert job.pods_of(0, 1, 2) == untouched


def is_free(status: Object, node: str, *replicas: int) -> bool:
    """Return whether these replicas were lost with a node, and nothing is charged for it."""
    failures = [entry_of(status, replica).get("lastFailure") or {} for replica in replicas]
    free = ("NodeLost", "RestartReplicaFree", node)
    return all((it.get("reason"), it.get("action"), it.get("node")) == free for it in failures)


def test_the_kubelet_of_a_node_stops(job: LiveJob, stage: Stage, hardware: Hardware) -> None:
    node, _ = node_of_replicas_only(job, stage)  # without its kubelet nobody could read the coordinator's log
    before, untouched = job.status(), job.pods_of(0, 1, 2)
    with hardware.without_kubelet(node):
        until(lambda: not stage.ready(node), f"{node} is not ready", timeout=NOTICED)
        job.trains_on()
    until(lambda: stage.ready(node), f"{node} is ready", timeout=NOTICED)
    assert attempts(job.trains_on()) == attempts(before)
    assert job.pods_of(0, 1, 2) == untouched


def coordinator_counts(job: LiveJob, replicas: int) -> bool:
    """Return whether the coordinator that runs was started with this number: until then another one takes its place."""
    selector = f"fthsdp.dev/job={job.name},fthsdp.dev/role=coordinator"
    found = job.kubectl.items("pods", "--namespace", job.namespace, "--selector", selector)
    return any(
        pod["status"].get("phase") == "Running"
        and "deletionTimestamp" not in pod["metadata"]
        and json.loads(pod["metadata"]["annotations"]["fthsdp.dev/coordinator-config"])["replicas"] == replicas
        for pod in found
    )


def test_the_job_is_scaled_from_2_to_4_and_to_3(job: LiveJob) -> None:
    restarts = job.status()["restarts"]
    for replicas, stay in ((2, (0, 1)), (4, (0, 1)), (3, (0, 1, 2))):
        untouched = job.pods_of(*stay)
        job.on("scale", "fthsdp", JOB, f"--replicas={replicas}")
        full = f"{replicas}/{replicas}"
        job.until(partial(trains, full), f"{full} replicas train")
        until(partial(coordinator_counts, job, replicas), "the coordinator has the number", timeout=NOTICED)
        assert job.trains_on()["restarts"] == restarts
        assert job.pods_of(*stay) == untouched
    until(lambda: len(job.pods()) == 3, "the pods of the others are gone", timeout=NOTICED)
    job.wait_for_coordinator()


def trains(full: str, status: Object) -> bool:
    return trains_in_full(status) and status["ready"] == full


def test_the_template_is_rolled_out(job: LiveJob, stage: Stage) -> None:
    before = job.status()
    (container,) = stage.manifests[0]["spec"]["template"]["spec"]["containers"]
    container["env"].append({"name": "COLOUR", "value": "green"})
    stage.kubectl.apply(stage.manifests[0])
    seen = job.watched_until(partial(is_new, before["updateRevision"]), "all replicas run the new template")
    assert all(status["readyReplicas"] >= 2 for status in seen)
    once_more = {replica: (attempt + 1, restarts) for replica, (attempt, restarts) in attempts(before).items()}
    assert attempts(job.trains_on()) == once_more


def is_new(old: str, status: Object) -> bool:
    return _as_written(status) and status["updateRevision"] != old


@pytest.mark.usefixtures("checkpoints")
def test_the_job_is_suspended_and_resumed(job: LiveJob) -> None:
    before, step = job.status(), job.step()
    job.patch({"suspend": True})
    job.until(lambda status: status["state"] == "Suspended", "it is suspended")
    until(lambda: not job.pods(), "its pods are gone", timeout=NOTICED)
    job.patch({"suspend": False})
    after = job.until(_as_written, "it trains again")
    assert after["restarts"] == before["restarts"]
    assert job.trains_on()["state"] == "Running"
    assert job.checkpoint() >= step


def test_the_job_is_deleted_while_a_replica_restarts(job: LiveJob) -> None:
    delete_pods(job, job.pod(2))
    job.until(lambda status: trains_less(status, 2), "the operator has begun")
    job.on("delete", "fthsdp", JOB, "--wait=false")
    kinds = "fthsdp,pods,services,secrets,configmaps,serviceaccounts,roles,rolebindings"
    until(
        lambda: not job.kubectl.items(kinds, "--namespace", NAMESPACE, f"--selector=fthsdp.dev/job={JOB}"),
        "nothing of it is left",
        timeout=NOTICED,
    )
