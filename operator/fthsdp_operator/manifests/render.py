"""What each object of a job looks like. Pure: a job and a few numbers in, manifests out.

The user's pod template is taken as it is; added are who the pod is (labels, environment before the user's own, so that
``$(FTHSDP_REPLICA)`` can be used there), how it is found (host name, subdomain), the job's key and its certificates.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fthsdp import environment
from fthsdp.launcher.command import program_of
from fthsdp_operator.api import (
    API_VERSION,
    ATTEMPT_LABEL,
    CONFIG_ANNOTATION,
    CONTAINER_ANNOTATION,
    JOB_LABEL,
    JOB_UID_LABEL,
    KIND,
    POD_INDEX_LABEL,
    REPLICA_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    DisruptionBudget,
    InPlace,
    Job,
    ReplicaState,
    Role,
    coordinator_name,
    pod_name,
)
from fthsdp_operator.manifests import gang
from fthsdp_operator.manifests.adapt import adapt, lead, master_port
from fthsdp_operator.manifests.placement import place

__all__ = [
    "BUDGET",
    "COORDINATOR_PORT",
    "KEY_FILE",
    "budget_name",
    "config_map_name",
    "coordinator_config",
    "coordinator_pod",
    "disruption_budget",
    "min_available",
    "pod_group",
    "secret_name",
    "selector",
    "support",
    "training_pod",
    "training_pods",
]

Manifest = dict[str, Any]

BUDGET = "PodDisruptionBudget"
COORDINATOR_PORT = 29400
_COORDINATOR = "coordinator"
"""Name of its container, and of its port."""
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
KEY_FOLDER = "/var/run/fthsdp"
KEY_FILE = f"{KEY_FOLDER}/key"
KEY_VOLUME = "fthsdp-key"
TLS_FOLDER = "/var/run/fthsdp-tls"
TLS_VOLUME = "fthsdp-tls"
ATTEMPT_FOLDER = "/var/run/fthsdp-pod"
ATTEMPT_VOLUME = "fthsdp-pod"
KEY_MODE = 0o444
"""Readable for whatever user the image runs as: the file is root's, the pod's security context is the user's business,
and nobody else is in the pod."""


def secret_name(job: str) -> str:
    """Name of the Secret that holds the job's key."""
    return f"{job}-key"


def config_map_name(job: str) -> str:
    """Name of the ConfigMap in which the coordinator keeps the epoch."""
    return f"{job}-epoch"


def budget_name(job: str) -> str:
    """Name of the job's PodDisruptionBudget: people call theirs as the job, or after its kind."""
    return f"{job}-min-replicas"


def selector(job: str) -> str:
    """Label selector of the job's training pods."""
    return f"{JOB_LABEL}={job},{ROLE_LABEL}={Role.TRAINER}"


# --- training pods --------------------------------------------------------------------------------------------------


def training_pod(job: Job, *, replica: int, attempt: int, index: int, generation: int | None = None) -> Manifest:
    """Return one pod of one attempt of a replica, as ``training_pods`` does."""
    return next(training_pods(job, replica=replica, attempt=attempt, indices=(index,), generation=generation))


def training_pods(
    job: Job, *, replica: int, attempt: int, indices: Iterable[int], generation: int | None = None
) -> Iterator[Manifest]:
    """Yield pods of one attempt of a replica.

    ``generation``: how often the replica has got new pods before; ``attempt`` unless it was restarted in its pods.
    There may be thousands of them: what they have in common is rendered once, and is the same object in all of them.
    """
    port = master_port(job, replica, attempt if generation is None else generation)
    common = _common(job, replica, attempt, port)
    for index in indices:
        yield _numbered(common, pod_name(job.name, replica, attempt, index), index, port)


def _common(job: Job, replica: int, attempt: int, port: int) -> Manifest:
    """Return what all pods of an attempt have in common."""
    template = copy.deepcopy(job.spec.template)
    metadata, spec = template.get("metadata") or {}, template["spec"]
    ours = _labels(job, Role.TRAINER) | {REPLICA_LABEL: str(replica), ATTEMPT_LABEL: str(attempt)}
    ours[REVISION_LABEL] = job.spec.revision
    spec |= {"restartPolicy": "Never", "subdomain": job.name}
    spec["volumes"] = [*(spec.get("volumes") or []), *_volumes(job)]
    _prefer_other_nodes(spec, [node.name for node in job.status.avoided_nodes])
    env = _environment(job, replica, attempt, port)
    kept = job.spec.failure_policy.in_place
    if kept is not None:
        _launch(spec, kept)
    for container in (*spec["containers"], *(spec.get("initContainers") or [])):
        _equip(container, env, _mounts(job))
    adapt(spec)
    place(spec, job, replica=replica, attempt=attempt)
    labels, notes = (metadata.get("labels") or {}) | ours, _which_counts(spec["containers"][0]["name"])
    notes |= metadata.get("annotations") or {}
    gang.join(spec, labels, notes, job, replica=replica, attempt=attempt)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(job, "", labels, notes), "spec": spec}


def _numbered(common: Manifest, name: str, index: int, port: int) -> Manifest:
    """Return the pod of this number; what it shares with the others is left as it is."""
    metadata, spec = common["metadata"], {**common["spec"], "hostname": name}
    labels = {**metadata["labels"], POD_INDEX_LABEL: str(index)}
    for part in ("containers", "initContainers"):
        if spec.get(part):
            spec[part] = [{**it, "env": [*_numbers(index), *it["env"]]} for it in spec[part]]
    if index == 0:
        lead(spec, port=port)
    return {**common, "metadata": {**metadata, "name": name, "labels": labels}, "spec": spec}


def _numbers(index: int) -> list[Manifest]:
    """Return the environment in which the pods of an attempt differ."""
    return [{"name": name, "value": str(index)} for name in (environment.POD_INDEX, "PET_NODE_RANK")]


def _prefer_other_nodes(spec: Manifest, names: Sequence[str]) -> None:
    """Ask for another node than these, by name: what labels say of it is the cluster's own business."""
    if not names:
        return
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]
    affinity = spec.get("affinity") or {}
    nodes = affinity.get("nodeAffinity") or {}
    wishes = nodes.get(_WISHES) or []
    ours = {"weight": 100, "preference": {"matchFields": others}}
    spec["affinity"] = {**affinity, "nodeAffinity": {**nodes, _WISHES: [*wishes, ours]}}


_WISHES = "preferredDuringSchedulingIgnoredDuringExecution"


def pod_group(job: Job, *, replica: int, attempt: int) -> Manifest:
    """Return the group of one attempt's pods, for a provider of gang scheduling that has one."""
    name, api_version = gang.group_name(job, replica, attempt), gang.GROUP_API[job.spec.gang.provider]
    return _object(job, api_version, "PodGroup", name, {"spec": gang.group_spec(job)})


def _which_counts(container: str) -> dict[str, str]:
    """Name the container that decides about the pod, for us; ``kubectl logs`` shows it where nobody names another."""
    return {CONTAINER_ANNOTATION: container, _DEFAULT_CONTAINER: container}


def _launch(spec: Manifest, kept: InPlace) -> None:
    """Let the launcher run the command of the first container, and let it see the number of the attempt."""
    trainer = spec["containers"][0]
    python = trainer["command"][0] if program_of(trainer["command"]) is not None else "python"
    trainer["command"] = [python, "-m", "fthsdp.launcher", "--", *trainer["command"]]
    known = {environment.ATTEMPT_FILE: f"{ATTEMPT_FOLDER}/attempt", environment.PRELOAD: ",".join(kept.preload)}
    trainer["env"] = [*({"name": name, "value": value} for name, value in known.items()), *(trainer.get("env") or [])]
    mount = {"name": ATTEMPT_VOLUME, "mountPath": ATTEMPT_FOLDER, "readOnly": True}
    trainer["volumeMounts"] = [*(trainer.get("volumeMounts") or []), mount]
    label = {"path": "attempt", "fieldRef": {"fieldPath": f"metadata.labels['{ATTEMPT_LABEL}']"}}
    spec["volumes"] = [*spec["volumes"], {"name": ATTEMPT_VOLUME, "downwardAPI": {"items": [label]}}]


def _equip(container: Manifest, env: Sequence[Manifest], mounts: Sequence[Manifest]) -> None:
    container["env"] = [*map(dict, env), *(container.get("env") or [])]
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), *mounts]
    # The last lines of the log become the message of a failure, unless the user's program writes one itself.
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _grace(job: Job) -> int:
    """Seconds that a pod of the template has for its end: none, where it says so."""
    given: int | None = job.spec.template["spec"].get("terminationGracePeriodSeconds")
    return 30 if given is None else given


def _environment(job: Job, replica: int, attempt: int, port: int) -> list[Manifest]:
    master = f"{pod_name(job.name, replica, attempt, 0)}.{job.name}"
    values = {
        environment.JOB: job.name,
        environment.REPLICA: replica,
        environment.ATTEMPT: attempt,
        environment.PODS_PER_REPLICA: job.spec.pods_per_replica,
        environment.PROCESSES_PER_POD: job.spec.ranks_per_pod,
        environment.BATCH_POLICY: job.spec.batch_policy,
        environment.LR_POLICY: job.spec.lr_policy,
        **_checkpoint(job),
        environment.GRACE: _grace(job),
        environment.COORDINATOR: f"{coordinator_name(job.name)}.{job.name}:{COORDINATOR_PORT}",
        environment.JOB_KEY_FILE: KEY_FILE,
        **_tls(job),
        environment.MASTER_ADDR: master,
        environment.MASTER_PORT: port,
        "PET_NNODES": job.spec.pods_per_replica,
        "PET_NPROC_PER_NODE": job.spec.ranks_per_pod,
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": port,
    }
    pod_ip = {"name": environment.POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [*({"name": name, "value": str(value)} for name, value in values.items()), pod_ip]


def _checkpoint(job: Job) -> dict[str, str]:
    kept = job.spec.checkpoint
    if kept is None:
        return {}
    # $ would begin a reference to another variable.
    return {
        environment.CHECKPOINT_PATH: kept.path.replace("$", "$$"),
        environment.CHECKPOINT_EVERY: str(kept.every_steps),
    }


# --- key and certificates, in all pods ------------------------------------------------------------------------------


def _tls(job: Job) -> dict[str, str]:
    return {} if job.spec.tls is None else {environment.TLS_DIR: TLS_FOLDER}


def _volumes(job: Job) -> list[Manifest]:
    key = {"secretName": secret_name(job.name), "defaultMode": KEY_MODE, "items": [{"key": "key", "path": "key"}]}
    volumes = [{"name": KEY_VOLUME, "secret": key}]
    if job.spec.tls is not None:
        # As a whole, so that a file that it lacks is missed by the pod, in words, and not by the kubelet.
        tls = {"secretName": job.spec.tls.secret_name, "defaultMode": KEY_MODE}
        volumes.append({"name": TLS_VOLUME, "secret": tls})
    return volumes


def _mounts(job: Job) -> list[Manifest]:
    places = {KEY_VOLUME: KEY_FOLDER} | ({} if job.spec.tls is None else {TLS_VOLUME: TLS_FOLDER})
    return [{"name": name, "mountPath": path, "readOnly": True} for name, path in places.items()]


# --- the coordinator ------------------------------------------------------------------------------------------------


def coordinator_config(job: Job) -> str:
    """What of the job a coordinator is started with: it is replaced when this changes."""
    spec = job.spec
    sizes = {"replicas": spec.replicas, "minReplicas": spec.min_replicas, "spares": spec.spares}
    # Only where they are others, so that a newer operator does not replace the coordinators of jobs that run.
    return json.dumps(sizes | spec.coordinator.other_times() | spec.coordinator.scheduling())


def coordinator_pod(job: Job, *, image: str) -> Manifest:
    """Return the coordinator's pod; ``image`` is used where the job names none."""
    name = coordinator_name(job.name)
    notes = _which_counts(_COORDINATOR) | {CONFIG_ANNOTATION: coordinator_config(job)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(job, name, _labels(job, Role.COORDINATOR), notes),
        "spec": {
            "hostname": name,
            "subdomain": job.name,
            "serviceAccountName": name,
            # A crash is mended by the kubelet, on the spot; exit 0 means that the run is over.
            "restartPolicy": "OnFailure",
            # Nothing to save on the way out: its state is in the ConfigMap before anybody hears of it.
            "terminationGracePeriodSeconds": 5,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_pull_secrets(job),
            **copy.deepcopy(job.spec.coordinator.scheduling()),
            "containers": [_coordinator_container(job, image)],
            "volumes": _volumes(job),
        },
    }


def _pull_secrets(job: Job) -> Manifest:
    """Those of the template: what its pods may pull from, this one may as well."""
    secrets = job.spec.template["spec"].get("imagePullSecrets")
    return {"imagePullSecrets": copy.deepcopy(secrets)} if secrets else {}


def _coordinator_container(job: Job, image: str) -> Manifest:
    options = {
        "--job": job.name,
        "--replicas": str(job.spec.replicas),
        "--min-replicas": str(job.spec.min_replicas),
        "--spares": str(job.spec.spares),
        **{f"--{name}-timeout": str(seconds) for name, seconds in job.spec.coordinator.times().items()},
        "--port": str(COORDINATOR_PORT),
        "--key-file": KEY_FILE,
        "--store": f"configmap:{job.namespace}/{config_map_name(job.name)}",
    }
    return {
        "name": _COORDINATOR,
        "image": job.spec.coordinator.image or image,
        "command": ["python", "-m", "fthsdp.coordinator", *(word for pair in options.items() for word in pair)],
        "ports": [{"name": "coordinator", "containerPort": COORDINATOR_PORT}],
        "resources": copy.deepcopy(job.spec.coordinator.resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": [{"name": name, "value": value} for name, value in _tls(job).items()],
        "volumeMounts": _mounts(job),
    }


# --- everything else ------------------------------------------------------------------------------------------------


def support(job: Job, *, key: str) -> Iterator[Manifest]:
    """Yield the objects that pods lean on, in the order in which they are needed."""
    name = coordinator_name(job.name)
    yield _object(job, "v1", "Secret", secret_name(job.name), {"type": "Opaque", "stringData": {"key": key}})
    yield _object(job, "v1", "ConfigMap", config_map_name(job.name), {"data": {}})
    yield _object(job, "v1", "ServiceAccount", name, {})
    yield _object(job, _RBAC, "Role", name, {"rules": [_only_the_epoch(job)]})
    yield _object(job, _RBAC, "RoleBinding", name, _binding(job))
    yield _object(job, "v1", "Service", job.name, {"spec": _service(job)})


def min_available(job: Job) -> int | None:
    """Return how many training pods have to be left Ready after an eviction; None where that is not limited.

    As many pods may be missing as replicas can be spared: each may be of another one, and takes it along. Of a job that
    can spare none one may, since a drain has to end.
    """
    spec = job.spec
    if spec.node_policy.disruption_budget is DisruptionBudget.NONE:
        return None
    abandoned = sum(entry.state is ReplicaState.ABANDONED for entry in job.status.replica_statuses)
    groups = max(spec.groups - abandoned, 1)
    return groups * spec.pods_per_replica - max(groups - spec.min_replicas, 1)


def disruption_budget(job: Job) -> Manifest:
    """Return the budget of a job that has one."""
    spec = {
        # The scale subresource counts replicas, so only a number of pods is taken for what it is.
        "minAvailable": min_available(job),
        "selector": {"matchLabels": {JOB_LABEL: job.name, ROLE_LABEL: str(Role.TRAINER)}},
        # Who does not train yet holds no drain up.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return _object(job, "policy/v1", BUDGET, budget_name(job.name), {"spec": spec})


_RBAC = "rbac.authorization.k8s.io/v1"


def _only_the_epoch(job: Job) -> Manifest:
    names = [config_map_name(job.name)]
    return {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": names, "verbs": ["get", "update"]}


def _binding(job: Job) -> Manifest:
    name = coordinator_name(job.name)
    return {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
    }


def _service(job: Job) -> Manifest:
    return {
        "clusterIP": "None",
        # Members find each other before anybody is ready, and a joiner before it trains.
        "publishNotReadyAddresses": True,
        "selector": {JOB_LABEL: job.name},
        "ports": [{"name": "coordinator", "port": COORDINATOR_PORT}],
    }


def _object(job: Job, api_version: str, kind: str, name: str, rest: Mapping[str, Any]) -> Manifest:
    return {"apiVersion": api_version, "kind": kind, "metadata": _metadata(job, name, _labels(job, None), {}), **rest}


def _metadata(job: Job, name: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Manifest:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": dict(labels),
        "annotations": dict(annotations),
        "ownerReferences": _owner(job),
    }


def _labels(job: Job, role: Role | None) -> dict[str, str]:
    mine = {JOB_LABEL: job.name, JOB_UID_LABEL: job.metadata.uid, "app.kubernetes.io/managed-by": "fthsdp"}
    return mine if role is None else mine | {ROLE_LABEL: str(role)}


def _owner(job: Job) -> list[Manifest]:
    """Deleting the job deletes all of it: no finalizer, so this works while the operator is down."""
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.metadata.uid}
    return [owner | {"controller": True, "blockOwnerDeletion": True}]
