"""A bad manifest gets one sentence that names the field, what was wrong and what is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.operator.world import manifest

from fthsdp.errors import ConfigError
from fthsdp_operator.api import (
    AvoidedNode,
    Failure,
    JobStatus,
    NodeFaults,
    ReplicaStatus,
    RuleAction,
    Waiting,
    parse_job,
)

Change = Callable[[dict[str, Any]], object]


def spec(**fields: Any) -> Change:
    return lambda job: job["spec"].update(fields)


def template(**fields: Any) -> Change:
    return lambda job: job["spec"]["template"]["spec"].update(fields)


def metadata(value: object) -> Change:
    return lambda job: job["spec"]["template"].update(metadata=value)


def container(**fields: Any) -> Change:
    return lambda job: job["spec"]["template"]["spec"]["containers"][0].update(fields)


CODES = {"operator": "In", "values": [1]}


def rules(*changes: dict[str, Any]) -> Change:
    """Rules that are right but for these changes."""
    whole = [{"name": f"r{n}", "onExitCodes": CODES, "action": "FailJob", **it} for n, it in enumerate(changes)]
    return spec(failurePolicy={"rules": [{k: v for k, v in one.items() if v is not None} for one in whole]})


BAD: list[tuple[Change, str]] = [
    (lambda job: job.update(kind="Job"), "kind is 'Job': it has to be FTHSDPJob"),
    (lambda job: job.update(apiVersion="v1"), "apiVersion is 'v1': it has to be fthsdp.dev/v1alpha1"),
    (lambda job: job.pop("spec"), "spec is missing: it has to name at least replicas and template"),
    (lambda job: job.update(spec=[]), "spec is []: it has to be a mapping"),
    (lambda job: job.pop("metadata"), "metadata.name is missing: give the job a name"),
    (lambda job: job["metadata"].update(name="Llama_3"), "metadata.name has to be at most 40 lower-case letters"),
    (lambda job: job["metadata"].update(name="a" * 41), "41 characters"),
    (lambda job: job["spec"].pop("replicas"), "spec.replicas is missing: "),
    (lambda job: job["spec"].pop("template"), "spec.template is missing: The pod that all replicas run"),
    (spec(replicas=0), "spec.replicas is 0: it has to be at least 1"),
    (spec(replicas=2000), "spec.replicas is 2000: it has to be at most 1024"),
    (spec(replicas="3"), "spec.replicas is '3': it has to be a whole number"),
    (spec(replicas=True), "spec.replicas is True: it has to be a whole number"),
    (spec(minReplicas=4), "spec.minReplicas is above replicas: lower minReplicas or raise replicas (they are 4 and 3)"),
    (spec(minReplica=1), "spec.minReplica is not a field of FTHSDPJob: did you mean minReplicas?"),
    (spec(x=1), "spec.x is not a field of FTHSDPJob: known here are replicas, minReplicas"),
    (spec(suspend="yes"), "spec.suspend is 'yes': it has to be true or false"),
    (spec(coordinator={"image": ""}), "spec.coordinator.image is '': it has to be at least 1 character long"),
    (spec(failurePolicy={"perReplica": {"limit": -1}}), "spec.failurePolicy.perReplica.limit is -1: it has to be"),
    (spec(failurePolicy={"backoff": {"maxSeconds": 1}}), "spec.failurePolicy.backoff.maxSeconds is below"),
    (
        spec(failurePolicy={"backoff": {"stableSeconds": 0}}),
        "failurePolicy.backoff.stableSeconds is 0: it has to be at",
    ),
    (spec(nodePolicy={"onCordon": "Move"}), "onCordon is 'Move': it has to be 'Ignore' or 'Migrate'"),
    (
        spec(nodePolicy={"disruptionBudget": 1}),
        "nodePolicy.disruptionBudget is 1: it has to be 'None' or 'MinReplicas'",
    ),
    (spec(nodePolicy={"unreachableSeconds": 0}), "spec.nodePolicy.unreachableSeconds is 0: it has to be at least 1"),
    (spec(nodePolicy={"avoid": {"mode": "Required"}}), "avoid.mode is 'Required': it has to be 'None' or 'Preferred'"),
    (spec(nodePolicy={"avoid": {"maxNodes": 65}}), "spec.nodePolicy.avoid.maxNodes is 65: it has to be at most 64"),
    (
        spec(nodePolicy={"unhealthyConditions": [{"type": "Ready", "status": "False"}]}),
        "spec.nodePolicy.unhealthyConditions names Ready, which unreachableSeconds speaks of: remove it, or name",
    ),
    (
        spec(nodePolicy={"unhealthyConditions": [{"type": "A", "status": True}]}),
        "spec.nodePolicy.unhealthyConditions[0].status is True: it has to be 'True', 'False' or 'Unknown'",
    ),
    (
        spec(nodePolicy={"unhealthyTaints": ["a", "node.kubernetes.io/unreachable"]}),
        "remove it, since unreachableSeconds and onCordon speak of those (it is node.kubernetes.io/unreachable)",
    ),
    (spec(nodePolicy={"unhealthyTaints": ["a", "a"]}), "spec.nodePolicy.unhealthyTaints has a twice: remove one"),
    (spec(deadlines={"startSeconds": 5}), "spec.deadlines.startSeconds is 5: it has to be at least 10"),
    (spec(deadlines={"endSeconds": 5}), "spec.deadlines.endSeconds is not a field of FTHSDPJob: "),
    (
        spec(deadlines={"terminationSeconds": 60}),
        "spec.deadlines.terminationSeconds says when pods are removed by force, which nodePolicy.forceDelete does not",
    ),
    (spec(failurePolicy={"job": {}}), "spec.failurePolicy.job.limit is missing: Restarts that all replicas together"),
    (spec(failurePolicy={"onExhausted": "Fail"}), "onExhausted is 'Fail': it has to be 'AbandonReplica' or 'FailJob'"),
    (spec(failurePolicy={"simultaneousFraction": 1.5}), "simultaneousFraction is 1.5: it has to be at most 1"),
    (spec(failurePolicy={"simultaneousFraction": "x"}), "simultaneousFraction is 'x': it has to be a number"),
    (spec(failurePolicy={"rules": {}}), "spec.failurePolicy.rules is {}: it has to be a list"),
    (rules(*[{}] * 65), "it has to be a list with at most 64 entries"),
    (
        rules({"name": None}),
        "spec.failurePolicy.rules[0].name is missing: Name of the rule, by which the status speaks",
    ),
    (
        rules({}, {"name": "r0"}),
        "spec.failurePolicy.rules has two rules of one name: give each its own, since the status",
    ),
    (
        rules({"action": "Restart"}),
        "rules[0].action is 'Restart': it has to be 'RestartReplica', 'RestartReplicaFree',",
    ),
    (rules({"when": 1}), "rules[0].when is not a field of FTHSDPJob: known here are name, onExitCodes, onPodReasons,"),
    (rules({}, {"onPodReason": []}), "rules[1].onPodReason is not a field of FTHSDPJob: did you mean onPodReasons?"),
    (
        rules({"onExitCodes": None}),
        "spec.failurePolicy.rules[0]: a rule of failurePolicy needs exactly one of onExitCodes",
    ),
    (rules({"onPodReasons": ["Hung"]}), "spec.failurePolicy.rules[0]: a rule of failurePolicy needs exactly one of"),
    (
        rules({"onExitCodes": None, "onPodReasons": []}),
        "rules[0].onPodReasons is []: it has to be a list with at least 1",
    ),
    (rules({"onExitCodes": None, "onPodReasons": ["A", "B", "A"]}), "rules[0].onPodReasons has A twice: remove one"),
    (rules({"onExitCodes": None, "onPodReasons": "Hung"}), "rules[0].onPodReasons is 'Hung': it has to be a list"),
    (
        rules({"onExitCodes": None, "onPodConditions": [{"type": "X", "status": True}]}),
        "rules[0].onPodConditions[0].status is True: it has to be 'True', 'False' or 'Unknown'",
    ),
    (
        rules({"onExitCodes": None, "onPodConditions": [{"type": "X", "state": "True"}]}),
        "rules[0].onPodConditions[0].state is not a field of FTHSDPJob: did you mean status?",
    ),
    (rules({"onExitCodes": {"values": [1]}}), "rules[0].onExitCodes.operator is missing: In: the exit code is one of"),
    (rules({"onExitCodes": CODES | {"operator": "=="}}), "onExitCodes.operator is '==': it has to be 'In' or 'NotIn'"),
    (rules({"onExitCodes": CODES | {"values": []}}), "values is []: it has to be a list with at least 1 entry"),
    (rules({"onExitCodes": CODES | {"values": [256]}}), "onExitCodes.values[0] is 256: it has to be at most 255"),
    (rules({"onExitCodes": CODES | {"values": ["1"]}}), "onExitCodes.values[0] is '1': it has to be a whole number"),
    (
        rules({"onExitCodes": CODES | {"values": [0, 1]}}),
        "rules[0].onExitCodes: onExitCodes.values has a 0: a container",
    ),
    (rules({"onExitCodes": CODES | {"values": [1, 3, 1]}}), "rules[0].onExitCodes.values has 1 twice: remove one"),
    (
        rules({"onExitCodes": CODES | {"containerName": "x"}}),
        "onExitCodes.containerName of a rule of failurePolicy is no container of the template: correct it, or leave it"
        " out to speak of all of them (it is x; known are train)",
    ),
    (
        spec(failurePolicy={"perReplica": {"n": 1}}),
        "spec.failurePolicy.perReplica.n is not a field of FTHSDPJob",
    ),
    (spec(template=[]), "spec.template is []: it has to be a mapping"),
    (spec(template={}), "spec.template.spec is missing: it has to hold the pod's containers"),
    (metadata([]), "spec.template.metadata is []: it has to be a mapping"),
    (metadata({"labels": "x"}), "spec.template.metadata.labels is 'x': it has to be a mapping of names to values"),
    (template(containers=[]), "spec.template.spec.containers is missing or empty: name one container"),
    (template(containers=["x"]), "spec.template.spec.containers[0] is 'x': it has to be a mapping"),
    (template(restartPolicy="Always"), "spec.template.spec.restartPolicy has to be Never or left out"),
    (container(restartPolicy="Always"), "restartPolicy has to be Never or left out, and so has that of the first"),
    (template(hostname="a"), "spec.template.spec.hostname and subdomain are set by fthsdp itself"),
    (template(subdomain="a"), "spec.template.spec.hostname and subdomain are set by fthsdp itself"),
    (template(hostNetwork="yes"), "spec.template.spec.hostNetwork is 'yes': it has to be true or false"),
    (
        lambda job: (template(hostNetwork=True)(job), spec(network={"masterPort": 65525})(job)),
        "spec.network.masterPort is too high: with hostNetwork each replica and spare has four ports from there on, so"
        " lower it (the last one would be 65536)",
    ),
    (spec(placement={"exclusive": True}), "spec.placement: placement.exclusive needs replicaTopologyKey"),
    (
        spec(placement={"replicaTopologyKey": "a/b/c"}),
        "spec.placement.replicaTopologyKey is 'a/b/c': it has to be of the form ^(",
    ),
    (spec(gang={"provider": "Kueue"}), "spec.gang.queue is missing: Kueue needs the name of a LocalQueue"),
    (spec(gang={"queue": "q"}), "spec.gang.queue is for the providers Volcano and Kueue: remove it, or choose one"),
    (spec(gang={"scheduleTimeoutSeconds": 9}), "spec.gang.scheduleTimeoutSeconds is for the provider Coscheduling"),
    (spec(gang={"provider": "Slurm"}), "spec.gang.provider is 'Slurm': it has to be 'None', 'Native', 'Volcano',"),
    (spec(network={"masterPort": 80}), "spec.network.masterPort is 80: it has to be at least 1024"),
    (metadata({"labels": {"fthsdp.dev/replica": "0"}}), "metadata.labels has fthsdp.dev/replica: labels and"),
    (metadata({"annotations": {"fthsdp.dev/x": "0"}}), "metadata.annotations has fthsdp.dev/x: labels and"),
    (metadata({"labels": {"on": True}}), "spec.template.metadata.labels.on is True: it has to be text"),
    (template(volumes=[{"name": "fthsdp-key"}]), "volumes[0] is fthsdp-key: names of volumes that start with fthsdp-"),
    (
        container(volumeMounts=[{"name": "a", "mountPath": "/var/run/fthsdp/"}]),
        "containers[0].volumeMounts[0].mountPath is /var/run/fthsdp/: folders that start with /var/run/fthsdp are",
    ),
    (template(initContainers=[{}]), "spec.template.spec.initContainers[0].name is missing"),
    (template(initContainers={"a": 1}), "spec.template.spec.initContainers is {'a': 1}: it has to be a list"),
    (template(volumes={"a": 1}), "spec.template.spec.volumes is {'a': 1}: it has to be a list"),
    (container(env={"A": "b"}), "spec.template.spec.containers[0].env is {'A': 'b'}: it has to be a list"),
    (container(env=["A"]), "spec.template.spec.containers[0].env[0].name is missing"),
    (container(env=[{"name": "FTHSDP_X"}]), "spec.template.spec.containers[0].env[0] names FTHSDP_X: env names that"),
    (container(env=[{"name": "MASTER_PORT"}]), "names MASTER_PORT"),
    (container(env=[{"name": "A=B"}]), "containers[0].env[0].name is 'A=B': it cannot be the name of a variable"),
    (container(env=[{"name": ""}]), "containers[0].env[0].name is '': it cannot be the name of a variable"),
    (container(env=[{"name": "PET_RDZV_ID"}]), "names PET_RDZV_ID"),
    (container(env=[{"name": "WORLD_SIZE"}]), "names WORLD_SIZE"),
    (spec(spares=-1), "spec.spares is -1: it has to be at least 0"),
    (spec(spares=1022), "spec.replicas and spares together are more than 1024: lower one of them (they are 3 and 1022"),
    (spec(batchPolicy="shrink"), "spec.batchPolicy is 'shrink': it has to be 'Shrink' or 'Constant'"),
    (spec(lrPolicy=None), "spec.lrPolicy is missing: it has to be 'None', 'Linear' or 'Sqrt'"),
    (spec(batchPolicy="Constant", lrPolicy="Sqrt"), "spec.lrPolicy follows a batch that shrinks, and batchPolicy"),
    (spec(checkpoint={"path": "/c"}), "spec.checkpoint.everySteps is missing: Steps from one checkpoint to the next"),
    (spec(checkpoint={"everySteps": 5}), "spec.checkpoint.path is missing: Folder that all pods reach"),
    (spec(checkpoint={"path": "", "everySteps": 5}), "spec.checkpoint.path is '': it has to be at least 1 character"),
    (spec(checkpoint={"path": "/c", "everySteps": 0}), "spec.checkpoint.everySteps is 0: it has to be at least 1"),
    (spec(tls={}), "spec.tls.secretName is missing: Secret in the job's namespace with tls.crt, tls.key and ca.crt"),
    (spec(tls={"secretName": ""}), "spec.tls.secretName is '': it has to be at least 1 character"),
    (spec(checkpoint="/c"), "spec.checkpoint is '/c': it has to be a mapping"),
    (container(command="python x.py"), "containers[0].command is 'python x.py': it has to be a list"),
    (container(args=["--steps", 60]), "containers[0].args[1] is 60: it has to be text, so put it in quotes"),
    (container(command=["a\0b"]), "containers[0].command[0] is 'a\\x00b': no process can be given a NUL character"),
    (container(workingDir=1), "spec.template.spec.containers[0].workingDir is 1: it has to be text"),
    (container(env=[{"name": "A", "value": True}]), "containers[0].env[0].value is True: it has to be text"),
    (container(env=[{"name": "A", "valueFrom": "b"}]), "containers[0].env[0].valueFrom is 'b': it has to be a mapping"),
    (container(volumeMounts="x"), "spec.template.spec.containers[0].volumeMounts is 'x': it has to be a list"),
]


def keeping(path: str, **kind: Any) -> Change:
    """Checkpoints at a path, and a volume of some kind at /data."""

    def change(job: dict[str, Any]) -> None:
        job["spec"]["checkpoint"] = {"path": path, "everySteps": 5}
        pod = job["spec"]["template"]["spec"]
        pod["volumes"] = [{"name": "data", **kind}, {"name": "shared", "persistentVolumeClaim": {"claimName": "c"}}]
        mounts = [{"name": "data", "mountPath": "/data"}, {"name": "shared", "mountPath": "/data/shared"}]
        pod["containers"][0]["volumeMounts"] = mounts

    return change


@pytest.mark.parametrize("kind", ["emptyDir", "configMap"])
def test_checkpoints_on_a_volume_that_is_gone_with_its_pod_are_refused(kind: str) -> None:
    job = copy.deepcopy(manifest())
    keeping("/data/checkpoints", **{kind: {}})(job)
    with pytest.raises(ConfigError, match=f"checkpoints is on the volume data, which is of the kind {kind}: use one"):
        parse_job(job)


@pytest.mark.parametrize(
    "change",
    [
        keeping("/data/shared/checkpoints", emptyDir={}),
        keeping("/data/checkpoints", hostPath={"path": "/x"}),
        keeping("/elsewhere", emptyDir={}),
        keeping("checkpoints", emptyDir={}),
    ],
)
def test_checkpoints_anywhere_else_are_welcome(change: Change) -> None:
    job = copy.deepcopy(manifest())
    change(job)
    assert parse_job(job).spec.checkpoint is not None


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_bad_manifest(change: Change, sentence: str) -> None:
    job = copy.deepcopy(manifest())
    change(job)
    with pytest.raises(ConfigError) as refused:
        parse_job(job)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("what", [None, [], "job", 3])
def test_what_is_no_mapping_is_refused(what: Any) -> None:
    with pytest.raises(ConfigError, match="it has to be a mapping with kind: FTHSDPJob"):
        parse_job(what)


def test_what_is_left_out_has_a_default() -> None:
    job = manifest()
    job["spec"] = {"replicas": 2, "template": job["spec"]["template"]}
    parsed = parse_job(job).spec
    assert (parsed.min_replicas, parsed.pods_per_replica, parsed.ranks_per_pod, parsed.suspend) == (1, 1, 1, False)
    assert (parsed.processes_per_pod, parsed.network.master_port) == (None, 29500)
    assert (parsed.failure_policy.per_replica.limit, parsed.failure_policy.backoff.max_seconds) == (5, 300)
    assert (parsed.spares, parsed.batch_policy, parsed.lr_policy, parsed.checkpoint) == (0, "Shrink", "None", None)
    policy = parsed.failure_policy
    assert (policy.rules, policy.job, policy.on_exhausted, policy.simultaneous_fraction) == (
        (),
        None,
        "AbandonReplica",
        1,
    )
    assert policy.backoff.stable_seconds == 600
    nodes, limits = parsed.node_policy, parsed.deadlines
    assert (nodes.unreachable_seconds, nodes.force_delete, nodes.on_cordon) == (60, False, "Ignore")
    assert (nodes.avoid.mode, nodes.avoid.threshold, nodes.avoid.ttl_seconds, nodes.avoid.max_nodes) == (
        "Preferred",
        2,
        3600,
        16,
    )
    assert (limits.schedule_seconds, limits.start_seconds, limits.active_seconds, limits.termination_seconds) == (
        None,
        1800,
        None,
        None,
    )


def test_rules_are_welcome_as_a_pod_failure_policy_has_them() -> None:
    job = copy.deepcopy(manifest())
    template(initContainers=[{"name": "fetch", "image": "x"}])(job)
    rules(
        {"onExitCodes": {"containerName": "fetch", "operator": "NotIn", "values": [0, 3]}},
        {"onExitCodes": None, "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"onExitCodes": None, "onPodReasons": ["Hung", "OOMKilled"]},
    )(job)
    first, second, third = parse_job(job).spec.failure_policy.rules
    assert first.on_exit_codes is not None
    assert (first.on_exit_codes.operator, first.on_exit_codes.values) == ("NotIn", (0, 3))
    assert second.on_pod_conditions is not None
    assert (second.on_pod_conditions[0].type, second.on_pod_conditions[0].status) == ("DisruptionTarget", "True")
    assert third.on_pod_reasons == ("Hung", "OOMKilled")


def test_the_longest_legal_name_still_gives_host_names() -> None:
    from fthsdp_operator.api.names import MAX_JOB_NAME, MAX_PODS, MAX_REPLICAS, pod_name

    assert len(pod_name("a" * MAX_JOB_NAME, MAX_REPLICAS - 1, 999_999, MAX_PODS - 1)) <= 63


def test_a_status_survives_being_written_and_read() -> None:
    entry = ReplicaStatus(index=1, recent_restarts=(1_800_000_000.123, 1_800_000_007.0))
    why = Failure(pod="p", reason="Hung", time=1_800_000_000.0, action=RuleAction.FAIL_JOB, rule="hangs")
    entry = entry.model_copy(update={"last_failure": why, "ready_since": 1_800_000_001.0, "restarts_in_a_row": 2})
    avoided = AvoidedNode(name="node-1", since=1_800_000_000.0, until=1_800_003_600.0, why="NodeLost")
    faults = NodeFaults(name="node-2", times=(1_800_000_000.25,))
    waits = Waiting(reason="Unschedulable", pod="p", since=1_800_000_000.5)
    entry = entry.model_copy(update={"waiting": waits})
    status = JobStatus(
        replica_statuses=(entry,),
        avoided_nodes=(avoided,),
        node_faults=(faults,),
        start_time=1_800_000_000.5,
        loss=0.1,
    )
    assert JobStatus.model_validate(status.dump()).dump() == status.dump()
    assert status.dump()["startTime"] == "2027-01-15T08:00:00.500Z"


def test_a_status_that_a_newer_operator_wrote_can_be_read() -> None:
    assert JobStatus.model_validate({"state": "Running", "later": {"x": 1}}).state == "Running"
