"""Pod templates as people have them, by what is special about each. All of them have to work."""

from __future__ import annotations

from typing import Any

__all__ = ["TEMPLATES", "with_proxy"]

Manifest = dict[str, Any]


def _template(*, metadata: Manifest | None = None, container: Manifest | None = None, **pod: Any) -> Manifest:
    train = {"name": "train", "image": "trainer:1", "command": ["torchrun", "train.py"], **(container or {})}
    spec = {**pod, "containers": [train, *pod.get("containers", [])]}
    return {"metadata": metadata, "spec": spec} if metadata else {"spec": spec}


_CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}
_DATA = {"name": "data", "mountPath": "/data"}

TEMPLATES: dict[str, Manifest] = {
    "as little as possible": {"spec": {"containers": [{"name": "train", "image": "trainer:1"}]}},
    "the network of the node": _template(hostNetwork=True),
    "the network of the node, ports and a name server given": _template(
        hostNetwork=True,
        dnsPolicy="None",
        dnsConfig={"nameservers": ["10.97.0.10"], "searches": ["svc.cluster.local"]},
        container={"ports": [{"name": "torch", "containerPort": 29500}, {"name": "metrics", "containerPort": 9400}]},
    ),
    "several containers": _template(containers=[{"name": "exporter", "image": "exporter:1"}]),
    "init containers": _template(initContainers=[{"name": "fetch", "image": "fetch:1", "command": ["fetch"]}]),
    "a native sidecar": _template(
        initContainers=[
            {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always", "ports": [{"containerPort": 1}]}
        ]
    ),
    "shared memory of its own": _template(
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
        container={"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm/"}]},
    ),
    "volumes of many kinds": _template(
        volumes=[
            {"name": "data", "persistentVolumeClaim": {"claimName": "corpus", "readOnly": True}},
            {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": _CLAIM}}},
            {"name": "code", "configMap": {"name": "code", "defaultMode": 0o555}},
            {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "t", "audience": "hub"}}]}},
            {"name": "nvme", "hostPath": {"path": "/mnt/nvme", "type": "Directory"}},
        ],
        container={"volumeMounts": [_DATA, {"name": "code", "mountPath": "/code", "subPath": "a"}]},
    ),
    "GPUs and network cards": _template(
        container={
            "resources": {
                "requests": {"cpu": "96", "memory": "1Ti"},
                "limits": {"nvidia.com/gpu": 8, "rdma/hca_shared_devices_a": "8", "memory": "1Ti"},
            }
        }
    ),
    "capabilities": _template(
        securityContext={"runAsUser": 1000, "fsGroup": 1000, "supplementalGroups": [7]},
        container={"securityContext": {"capabilities": {"add": ["IPC_LOCK", "SYS_PTRACE"]}}},
    ),
    "a scheduler of its own": _template(schedulerName="bin-packer", schedulingGates=[{"name": "example.com/budget"}]),
    "pull secrets": _template(imagePullSecrets=[{"name": "registry"}], container={"imagePullPolicy": "Always"}),
    "a priority": _template(priorityClassName="system-node-critical"),
    "a place": _template(
        nodeSelector={"gpu": "h200"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        topologySpreadConstraints=[
            {
                "maxSkew": 1,
                "topologyKey": "zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"team": "a"}},
            }
        ],
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}]
                }
            },
            "podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "cache"}}}
                ]
            },
        },
    ),
    "labels and annotations of others": _template(
        metadata={
            "labels": {"team": "a", "kueue.x-k8s.io/queue-name": "q", "sidecar.istio.io/inject": "false"},
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "note": "x" * 5000},
        }
    ),
    "environment from everywhere": _template(
        container={
            "env": [
                {"name": "NAME", "value": "$(FTHSDP_JOB)-$(FTHSDP_REPLICA)"},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}},
                {"name": "FTHSDP_FTAR_STREAMS", "value": "4"},
            ],
            "envFrom": [{"configMapRef": {"name": "settings", "optional": True}}],
        }
    ),
    "probes, hooks and a long goodbye": _template(
        terminationGracePeriodSeconds=900,
        container={
            "startupProbe": {"exec": {"command": ["true"]}, "failureThreshold": 100},
            "lifecycle": {"preStop": {"exec": {"command": ["sync"]}}},
            "terminationMessagePolicy": "File",
        },
    ),
    "the processes of the others": _template(shareProcessNamespace=True, hostIPC=True, enableServiceLinks=False),
    "a runtime and a service account": _template(
        serviceAccountName="trainer",
        automountServiceAccountToken=False,
        hostAliases=[{"ip": "10.0.0.1", "hostnames": ["hub"]}],
    ),
}


def with_proxy(pod: Manifest) -> Manifest:
    """Return a pod as the webhook of a service mesh leaves it: its own container is the first."""
    proxy = {"name": "istio-proxy", "image": "proxy:1"}
    return pod | {"spec": pod["spec"] | {"containers": [proxy, *pod["spec"]["containers"]]}}
