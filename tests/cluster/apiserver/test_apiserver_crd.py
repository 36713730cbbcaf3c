"""What the API server makes of our CRD: it refuses what ``fthsdp run`` refuses, and explains every field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.cluster.apiserver.server import ApiServer

from fthsdp.errors import ConfigError
from fthsdp_operator.api import API_VERSION, KIND, TRANSPORT_ENV, AvoidedNode, parse_job
from fthsdp_operator.manifests.render import training_pod

pytestmark = pytest.mark.cluster

Manifest = dict[str, Any]
GOOD: Manifest = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "llama"},
    "spec": {
        "replicas": 3,
        "minReplicas": 2,
        "podsPerReplica": 2,
        "template": {"spec": {"containers": [{"name": "train", "image": "x", "env": [{"name": "A", "value": "b"}]}]}},
    },
}


def changed(change: Callable[[Manifest], object]) -> Manifest:
    job = copy.deepcopy(GOOD)
    change(job)
    return job


def spec(**fields: Any) -> Manifest:
    return changed(lambda job: job["spec"].update(fields))


def pod(**fields: Any) -> Manifest:
    return changed(lambda job: job["spec"]["template"]["spec"].update(fields))


def _pod(job: Manifest) -> Manifest:
    made: Manifest = job["spec"]["template"]["spec"]
    return made


def container_of(job: Manifest) -> Manifest:
    made: Manifest = _pod(job)["containers"][0]
    return made


def metadata(**fields: Any) -> Manifest:
    return changed(lambda job: job["spec"]["template"].update(metadata=fields))


def container(**fields: Any) -> Manifest:
    return changed(lambda job: job["spec"]["template"]["spec"]["containers"][0].update(fields))


def rules(*changes: dict[str, Any]) -> Manifest:
    """A job with rules that are right but for these changes."""
    codes = {"operator": "In", "values": [1]}
    whole = [{"name": f"r{n}", "onExitCodes": codes, "action": "FailJob", **it} for n, it in enumerate(changes)]
    return spec(failurePolicy={"rules": [{k: v for k, v in one.items() if v is not None} for one in whole]})


def codes(**fields: Any) -> dict[str, Any]:
    return {"onExitCodes": {"operator": "In", "values": [1], **fields}}


SAME_SENTENCE = [
    (spec(updatePolicy={"type": "Recreate"}), "updatePolicy.type Recreate takes all replicas away at once"),
    (spec(minReplicas=4), "minReplicas is above replicas: lower minReplicas or raise replicas"),
    (spec(failurePolicy={"backoff": {"maxSeconds": 1}}), "backoff.maxSeconds is below backoff.initialSeconds"),
    (rules({"onExitCodes": None}), "a rule of failurePolicy needs exactly one of onExitCodes, onPodReasons and"),
    (rules({"onPodReasons": ["Hung"]}), "a rule of failurePolicy needs exactly one of onExitCodes, onPodReasons and"),
    (rules(codes(values=[1, 0])), "onExitCodes.values has a 0: a container that exits with 0 has not failed"),
    (rules({}, {}, {"name": "r1"}), "failurePolicy.rules has two rules of one name: give each its own"),
    (rules(codes(containerName="x")), "onExitCodes.containerName of a rule of failurePolicy is no container"),
    (
        spec(coordinator={"silenceTimeoutSeconds": 290}),
        "coordinator.stallTimeoutSeconds has to be more than silenceTimeoutSeconds + 10",
    ),
    (spec(coordinator={"stallTimeoutSeconds": 16, "silenceTimeoutSeconds": 6}), "coordinator.stallTimeoutSeconds has"),
    (
        spec(nodePolicy={"unhealthyConditions": [{"type": "Ready"}]}),
        "nodePolicy.unhealthyConditions names Ready, which unreachableSeconds speaks of",
    ),
    (
        spec(nodePolicy={"unhealthyTaints": ["node.kubernetes.io/not-ready"]}),
        "nodePolicy.unhealthyTaints names a taint that Kubernetes itself sets",
    ),
    (
        spec(deadlines={"terminationSeconds": 9}),
        "deadlines.terminationSeconds says when pods are removed by force, which nodePolicy.forceDelete does not",
    ),
    (spec(failurePolicy={"inPlace": {}}), "failurePolicy.inPlace needs the command of the first container"),
    (
        changed(lambda job: (container_of(job).update(command=[]), job["spec"].update(failurePolicy={"inPlace": {}}))),
        "failurePolicy.inPlace needs the command of the first container",
    ),
    (spec(spares=1022), "replicas and spares together are more than 1024: lower one of them"),
    (spec(batchPolicy="Constant", lrPolicy="Linear"), "lrPolicy follows a batch that shrinks"),
    (pod(restartPolicy="OnFailure"), "template.spec.restartPolicy has to be Never or left out"),
    (container(restartPolicy="Always"), "template.spec.restartPolicy has to be Never or left out"),
    (pod(hostname="a"), "template.spec.hostname and subdomain are set by fthsdp itself"),
    (pod(subdomain="a"), "template.spec.hostname and subdomain are set by fthsdp itself"),
    (pod(volumes=[{"name": "fthsdp-key"}]), "names of volumes that start with fthsdp- are those of fthsdp itself"),
    (
        container(volumeMounts=[{"name": "a", "mountPath": "/var/run/fthsdp/x"}]),
        "folders that start with /var/run/fthsdp are those of fthsdp itself: mount the volume somewhere else",
    ),
    (metadata(labels={"fthsdp.dev/replica": "0"}), "labels and annotations that start with fthsdp.dev/ are set"),
    (metadata(annotations={"fthsdp.dev/x": "0"}), "labels and annotations that start with fthsdp.dev/ are set"),
    (spec(placement={"exclusive": True}), "placement.exclusive needs replicaTopologyKey: name the label of the nodes"),
    (
        changed(
            lambda job: (
                _pod(job).update(affinity={"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}),
                job["spec"].update(placement={"replicaTopologyKey": "rack"}),
            )
        ),
        "placement.replicaTopologyKey and podAffinity that the template requires cannot both hold",
    ),
    (spec(gang={"provider": "Kueue"}), "gang.queue is missing: Kueue needs the name of a LocalQueue"),
    (spec(gang={"provider": "Native", "queue": "q"}), "gang.queue is for the providers Volcano and Kueue"),
    (spec(gang={"scheduleTimeoutSeconds": 9}), "gang.scheduleTimeoutSeconds is for the provider Coscheduling"),
    (
        changed(lambda job: (_pod(job).update(hostNetwork=True), job["spec"].update(network={"masterPort": 65525}))),
        "network.masterPort is too high: with hostNetwork each replica and spare has four ports",
    ),
    (container(env=[{"name": "FTHSDP_RANK", "value": "1"}]), "env names that start with FTHSDP_ or PET_"),
    (container(env=[{"name": "MASTER_ADDR", "value": "x"}]), "env names that start with FTHSDP_ or PET_"),
    (container(env=[{"name": "RANK", "value": "0"}]), "env names that start with FTHSDP_ or PET_"),
    (
        changed(lambda job: job["metadata"].update(name="a" * 41)),
        "metadata.name has to be at most 40 lower-case",
    ),
    (changed(lambda job: job["metadata"].update(name="1a")), "metadata.name has to be at most 40 lower-case"),
]
SAME_FIELD = [
    (spec(replicas=0), "spec.replicas"),
    (spec(replicas="3"), "spec.replicas"),
    (spec(podsPerReplica=0), "spec.podsPerReplica"),
    (spec(suspend="yes"), "spec.suspend"),
    (spec(updatePolicy={"type": "Blue"}), "spec.updatePolicy.type"),
    (spec(success={"policy": "Most"}), "spec.success.policy"),
    (spec(managedBy=""), "spec.managedBy"),
    (spec(retainFailedPods=11), "spec.retainFailedPods"),
    (spec(batchPolicy="shrink"), "spec.batchPolicy"),
    (spec(checkpoint={"path": "/c"}), "spec.checkpoint.everySteps"),
    (spec(replica=3), "spec.replica"),
    (pod(containers=[]), "spec.template.spec.containers"),
    (pod(volumes="x"), "spec.template.spec.volumes"),
    (pod(hostNetwork="yes"), "spec.template.spec.hostNetwork"),
    (container(command="train"), "spec.template.spec.containers[0].command"),
    (container(command=["train", 1]), "spec.template.spec.containers[0].command[1]"),
    (metadata(labels={"on": True}), "spec.template.metadata.labels.on"),
    (spec(network={"masterPort": 80}), "spec.network.masterPort"),
    (spec(gang={"provider": "Slurm"}), "spec.gang.provider"),
    (spec(placement={"replicaTopologyKey": "a/b/c"}), "spec.placement.replicaTopologyKey"),
    (changed(lambda job: job["spec"].pop("template")), "spec.template"),
    (changed(lambda job: job["spec"]["template"]["spec"].pop("containers")), "spec.template.spec.containers"),
    (spec(coordinator={"silenceTimeoutSeconds": 1}), "spec.coordinator.silenceTimeoutSeconds"),
    (spec(ttlSecondsAfterFinished=-1), "spec.ttlSecondsAfterFinished"),
    (spec(failurePolicy={"simultaneousFraction": 1.5}), "spec.failurePolicy.simultaneousFraction"),
    (spec(failurePolicy={"onExhausted": "Fail"}), "spec.failurePolicy.onExhausted"),
    (spec(failurePolicy={"job": {"windowSeconds": 60}}), "spec.failurePolicy.job.limit"),
    (spec(failurePolicy={"backoff": {"stableSeconds": 0}}), "spec.failurePolicy.backoff.stableSeconds"),
    (spec(nodePolicy={"onCordon": "Move"}), "spec.nodePolicy.onCordon"),
    (spec(nodePolicy={"disruptionBudget": "All"}), "spec.nodePolicy.disruptionBudget"),
    (spec(nodePolicy={"unhealthyTaints": ["a", "a"]}), "spec.nodePolicy.unhealthyTaints"),
    (spec(nodePolicy={"unhealthyConditions": [{"status": "True"}]}), "spec.nodePolicy.unhealthyConditions[0].type"),
    (spec(nodePolicy={"avoid": {"mode": "Required"}}), "spec.nodePolicy.avoid.mode"),
    (spec(nodePolicy={"avoid": {"ttlSeconds": 1}}), "spec.nodePolicy.avoid.ttlSeconds"),
    (spec(deadlines={"startSeconds": 9}), "spec.deadlines.startSeconds"),
    (spec(deadlines={"activeSeconds": "1h"}), "spec.deadlines.activeSeconds"),
    (rules(*[{}] * 65), "spec.failurePolicy.rules"),
    (rules({"action": "Restart"}), "spec.failurePolicy.rules[0].action"),
    (rules({"onExitCodes": None, "onPodReasons": []}), "spec.failurePolicy.rules[0].onPodReasons"),
    (rules({"onExitCodes": None, "onPodReasons": ["A", "A"]}), "spec.failurePolicy.rules[0].onPodReasons"),
    (rules(codes(values=[256])), "spec.failurePolicy.rules[0].onExitCodes.values[0]"),
    (rules(codes(values=[1, 1])), "spec.failurePolicy.rules[0].onExitCodes.values"),
    (rules(codes(operator="==")), "spec.failurePolicy.rules[0].onExitCodes.operator"),
    (
        rules({"onExitCodes": None, "onPodConditions": [{"type": "X", "status": True}]}),
        "spec.failurePolicy.rules[0].onPodConditions[0].status",
    ),
]


@pytest.mark.parametrize(("job", "words"), SAME_SENTENCE + SAME_FIELD)
def test_it_refuses_what_a_local_run_refuses(apiserver: ApiServer, job: Manifest, words: str) -> None:
    assert words in apiserver.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(job), fails=True)
    with pytest.raises(ConfigError) as refused:
        parse_job(job)
    assert words in str(refused.value)


def test_a_template_may_set_the_transport_and_nothing_else_of_ours(apiserver: ApiServer) -> None:
    job = container(env=[{"name": name, "value": "4"} for name in TRANSPORT_ENV])
    apiserver.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(job))
    assert parse_job(job).name == job["metadata"]["name"]


def test_a_command_that_is_null_is_one_that_is_left_out(apiserver: ApiServer) -> None:
    """Templates of charts have such, where no value was given."""
    job = container(command=None)
    apiserver.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(job))
    assert parse_job(job).name == job["metadata"]["name"]
    job["spec"]["failurePolicy"] = {"inPlace": {}}
    said = apiserver.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(job), fails=True)
    assert "failurePolicy.inPlace needs the command of the first container" in said


def test_the_longest_failure_policy_is_accepted(apiserver: ApiServer) -> None:
    many = [{"name": f"{number:063}", **codes(values=list(range(1, 256)))} for number in range(64)]
    many[0] |= codes(containerName="train")
    job = rules(*many)
    job["spec"]["failurePolicy"] |= {"job": {"limit": 9}, "simultaneousFraction": 0.5, "onExhausted": "FailJob"}
    made = json.loads(apiserver.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(job)))
    assert parse_job(made).spec == parse_job(job).spec
    assert made["spec"]["failurePolicy"]["job"] == {"limit": 9, "windowSeconds": 3600}


def test_a_job_comes_back_with_its_defaults(apiserver: ApiServer) -> None:
    made = json.loads(apiserver.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(GOOD)))
    assert "processesPerPod" not in made["spec"]
    assert made["spec"]["network"] == {"masterPort": 29500}
    policy = made["spec"]["failurePolicy"]
    assert policy["perReplica"] == {"limit": 5, "windowSeconds": 3600}
    assert policy["backoff"] == {"initialSeconds": 5, "maxSeconds": 300, "factor": 2, "stableSeconds": 600}
    assert (policy["onExhausted"], policy["simultaneousFraction"]) == ("AbandonReplica", 1)
    assert "job" not in policy
    assert made["spec"]["updatePolicy"] == {"type": "Rolling", "maxUnavailable": 1, "minReadySteps": 3}
    assert made["spec"]["success"] == {"policy": "First"}
    assert (made["spec"]["managedBy"], made["spec"]["retainFailedPods"]) == ("fthsdp.dev/fthsdp-operator", 1)
    assert (made["spec"]["spares"], made["spec"]["batchPolicy"], made["spec"]["lrPolicy"]) == (0, "Shrink", "None")
    assert made["spec"]["deadlines"] == {"startSeconds": 1800}
    nodes = made["spec"]["nodePolicy"]
    assert (nodes["unreachableSeconds"], nodes["forceDelete"], nodes["onCordon"]) == (60, False, "Ignore")
    assert nodes["disruptionBudget"] == "None"
    assert nodes["avoid"] == {"mode": "Preferred", "threshold": 2, "ttlSeconds": 3600, "maxNodes": 16}
    assert {"type": "GPUMissing", "status": "True"} in nodes["unhealthyConditions"]
    assert nodes["unhealthyTaints"] == ["nvidia.com/gpu-xid-error"]
    assert made["spec"]["template"] == GOOD["spec"]["template"]
    assert parse_job(made).spec == parse_job(GOOD).spec


def test_the_longest_node_policy_is_accepted(apiserver: ApiServer) -> None:
    conditions = [{"type": f"{number:0316}", "status": "False"} for number in range(64)]
    policy = {
        "forceDelete": True,
        "onCordon": "Migrate",
        "disruptionBudget": "MinReplicas",
        "unhealthyConditions": conditions,
        "unhealthyTaints": [f"{number:0316}" for number in range(64)],
        "avoid": {"mode": "None"},
    }
    limits = {"scheduleSeconds": 600, "activeSeconds": 90, "terminationSeconds": 60}
    job = spec(nodePolicy=policy, deadlines=limits)
    made = json.loads(apiserver.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(job)))
    assert parse_job(made).spec == parse_job(job).spec


def test_a_pod_may_be_asked_to_keep_away_from_many_nodes(apiserver: ApiServer, namespace: str) -> None:
    avoided = tuple(AvoidedNode(name=f"node-{n}.example", since=0.0, until=1.0, why="x") for n in range(64))
    job = parse_job(changed(lambda it: it["metadata"].update(namespace=namespace, uid="u")))
    job = job.model_copy(update={"status": job.status.model_copy(update={"avoided_nodes": avoided})})
    pod = json.dumps(training_pod(job, replica=0, attempt=0, index=0))
    made = json.loads(apiserver.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=pod))
    (term,) = made["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert len(term["preference"]["matchFields"]) == 64


def test_pods_per_replica_cannot_be_changed_and_replicas_can(apiserver: ApiServer, namespace: str) -> None:
    apiserver.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(GOOD))
    patch = json.dumps({"spec": {"podsPerReplica": 3}})
    said = apiserver.kubectl("patch", "fthsdp", "llama", "-n", namespace, "--type=merge", "-p", patch, fails=True)
    assert "podsPerReplica cannot be changed while the job exists" in said
    apiserver.kubectl("scale", "fthsdp/llama", "-n", namespace, "--replicas=4")
    assert apiserver.items("fthsdp", namespace)["llama"]["spec"]["replicas"] == 4
    patch = json.dumps({"spec": {"replicas": 1}})
    said = apiserver.kubectl("patch", "fthsdp", "llama", "-n", namespace, "--type=merge", "-p", patch, fails=True)
    assert "minReplicas is above replicas" in said


@pytest.mark.parametrize(
    "change",
    [
        {"batchPolicy": "Constant"},
        {"lrPolicy": "Sqrt"},
        {"processesPerPod": 2},
        {"checkpoint": {"path": "/c", "everySteps": 9}},
        {"tls": {"secretName": "s"}},
    ],
)
def test_what_all_replicas_have_to_agree_on_cannot_be_changed_while_they_run(
    apiserver: ApiServer, namespace: str, change: Manifest
) -> None:
    apiserver.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(GOOD))
    patch = ("patch", "fthsdp", "llama", "-n", namespace, "--type=merge", "-p")
    said = apiserver.kubectl(*patch, json.dumps({"spec": change}), fails=True)
    assert "suspend the job first" in said
    apiserver.kubectl(*patch, json.dumps({"spec": {"spares": 1}}))
    apiserver.kubectl(*patch, json.dumps({"spec": {"suspend": True}}))
    apiserver.kubectl(*patch, json.dumps({"spec": {"suspend": False, **change}}))


def test_who_looks_after_a_job_cannot_be_changed(apiserver: ApiServer, namespace: str) -> None:
    job = json.dumps(spec(managedBy="kueue.x-k8s.io/multikueue"))
    apiserver.kubectl("create", "-n", namespace, "-f", "-", stdin=job)
    patch = json.dumps({"spec": {"managedBy": "fthsdp.dev/fthsdp-operator"}})
    said = apiserver.kubectl("patch", "fthsdp", "llama", "-n", namespace, "--type=merge", "-p", patch, fails=True)
    assert "managedBy cannot be changed while the job exists" in said


def test_a_template_is_stored_as_it_was_given_so_that_its_revision_stays(apiserver: ApiServer, namespace: str) -> None:
    apiserver.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(GOOD))
    stored = apiserver.items("fthsdp", namespace)["llama"]
    assert parse_job(stored).spec.revision == parse_job(GOOD).spec.revision


def test_a_job_is_listed_under_its_short_name_and_with_everything(apiserver: ApiServer, namespace: str) -> None:
    apiserver.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(GOOD))
    header = apiserver.kubectl("get", "fthsdp", "-n", namespace).splitlines()[0].split()
    assert header == ["NAME", "READY", "MIN", "STEP", "RESTARTS", "STATE", "LAST-FAILURE", "AGE"]
    wide = apiserver.kubectl("get", "fthsdp", "-n", namespace, "-o", "wide").splitlines()[0].split()
    assert {"SPARES", "UP-TO-DATE", "ABANDONED"} <= set(wide)
    assert "fthsdpjob.fthsdp.dev/llama" in apiserver.kubectl("get", "all", "-n", namespace)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("fthsdp", "When a replica fails, only that one is restarted"),
        ("fthsdp.spec.minReplicas", "the job pauses at a step boundary"),
        ("fthsdp.spec.template", "PodTemplateSpec"),
        ("fthsdp.spec.failurePolicy.perReplica.windowSeconds", "Length of the sliding window in seconds"),
        ("fthsdp.spec.failurePolicy.rules.onExitCodes.operator", "In: the exit code is one of values"),
        ("fthsdp.spec.failurePolicy.onExhausted", "the others train on without it"),
        ("fthsdp.spec.nodePolicy.onCordon", "a cordoned node keeps its replicas"),
        ("fthsdp.spec.deadlines.startSeconds", "Neither a first pull is counted"),
        ("fthsdp.status.avoidedNodes", "keep away from"),
        ("fthsdp.status.replicaStatuses.lastFailure.exitCode", "Exit code of the container"),
    ],
)
def test_kubectl_explains_it(apiserver: ApiServer, field: str, words: str) -> None:
    assert words in " ".join(apiserver.kubectl("explain", field).split())
