"""What is said of the pod template: the schema of those of its parts that rules look at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fthsdp_operator.api.names import GROUP, TRANSPORT_ENV

__all__ = [
    "ENV_RULE",
    "HOSTNAME_RULE",
    "LABEL_RULE",
    "MOUNT_RULE",
    "OUR_FOLDERS",
    "OUR_LABELS",
    "OUR_VOLUMES",
    "RESTART_RULE",
    "TEMPLATE_SCHEMA",
    "VOLUME_RULE",
    "gpus",
]


RESTART_RULE = (
    "template.spec.restartPolicy has to be Never or left out, and so has that of the first container: fthsdp restarts"
    " whole replicas by itself"
)
ENV_RULE = (
    "env names that start with FTHSDP_ or PET_ (other than those of the transport), MASTER_ADDR, MASTER_PORT, RANK and"
    " WORLD_SIZE are set by fthsdp itself: remove them from the template"
)
OUR_LABELS = f"{GROUP}/"
LABEL_RULE = (
    f"labels and annotations that start with {OUR_LABELS} are set by fthsdp itself: remove them from the template"
)
OUR_VOLUMES = "fthsdp-"
VOLUME_RULE = f"names of volumes that start with {OUR_VOLUMES} are those of fthsdp itself: give the volume another name"
OUR_FOLDERS = "/var/run/fthsdp"
MOUNT_RULE = f"folders that start with {OUR_FOLDERS} are those of fthsdp itself: mount the volume somewhere else"
HOSTNAME_RULE = (
    "template.spec.hostname and subdomain are set by fthsdp itself, so that pods find each other: remove them from the"
    " template"
)

_RESERVED_CEL = (
    f"(self.name in {list(TRANSPORT_ENV)} || !self.name.startsWith('FTHSDP_')) && !self.name.startsWith('PET_')"
    " && !(self.name in ['MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE'])"
)
_ANYTHING: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


_ITEMS: dict[str, Any] = {"type": "array", "items": {"type": "object", **_ANYTHING}}


def _rules(*rules: tuple[str, str]) -> dict[str, Any]:
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def _words(description: str, *, longest: int) -> dict[str, Any]:
    """Names of labels or annotations, and their values."""
    return {
        "type": "object",
        "description": description,
        "maxProperties": 256,
        "additionalProperties": {"type": "string", "maxLength": longest},
        **_rules((f"self.all(name, !name.startsWith('{OUR_LABELS}'))", LABEL_RULE)),
    }


def _named(description: str, field: str, words: str, *rules: tuple[str, str]) -> dict[str, Any]:
    """A list of anything of which one field of each item is looked at."""
    return {
        "type": "array",
        "maxItems": 256,
        "description": description,
        "items": {
            "type": "object",
            **_ANYTHING,
            "properties": {field: {"type": "string", "maxLength": 1024, "description": words}},
            **_rules(*rules),
        },
    }


_CONTAINER_SCHEMA: dict[str, Any] = {
    "type": "object",
    **_ANYTHING,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 63, "description": "Name of the container."},
        "command": {
            "type": "array",
            "description": "What runs in the container; the entrypoint of its image where unset.",
            "items": {"type": "string"},
        },
        "restartPolicy": {
            "type": "string",
            "description": "Never or left out for the first container; Always makes an init container a sidecar.",
        },
        "volumeMounts": _named(
            "Where volumes appear in the container.",
            "mountPath",
            "Folder in the container.",
            (f"!has(self.mountPath) || !self.mountPath.startsWith('{OUR_FOLDERS}')", MOUNT_RULE),
        ),
        "env": {
            "type": "array",
            "maxItems": 500,
            "description": "Environment of the container. Names of fthsdp and torchrun are set by the operator.",
            "items": {
                "type": "object",
                **_ANYTHING,
                "required": ["name"],
                "properties": {"name": {"type": "string", "maxLength": 256, "description": "Name of the variable."}},
                **_rules((_RESERVED_CEL, ENV_RULE)),
            },
        },
    },
}
_AFFINITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    **_ANYTHING,
    "description": "Which nodes the pods like, and which other pods.",
    "properties": {
        "podAffinity": {
            "type": "object",
            **_ANYTHING,
            "description": "Near which pods they want to be.",
            "properties": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    **_ITEMS,
                    "description": "What has to hold; not beside placement.replicaTopologyKey.",
                },
            },
        },
    },
}
TEMPLATE_SCHEMA: dict[str, Any] = {
    "type": "object",
    **_ANYTHING,
    "required": ["spec"],
    "properties": {
        "metadata": {
            "type": "object",
            **_ANYTHING,
            "description": "Labels and annotations of the pods.",
            "properties": {
                "labels": _words("Labels of the pods, beside those of fthsdp.", longest=63),
                "annotations": _words("Annotations of the pods.", longest=262144),
            },
        },
        "spec": {
            "type": "object",
            **_ANYTHING,
            "description": "Spec of the pod, as in any PodTemplateSpec.",
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 32,
                    "description": "Containers of the pod; the first one trains.",
                    "items": _CONTAINER_SCHEMA,
                },
                "initContainers": {
                    "type": "array",
                    "maxItems": 32,
                    "description": "Containers that run before the others.",
                    "items": _CONTAINER_SCHEMA,
                },
                "volumes": _named(
                    "Volumes of the pod; those with the job's key and with shared memory are added.",
                    "name",
                    "Name of the volume.",
                    (f"!has(self.name) || !self.name.startsWith('{OUR_VOLUMES}')", VOLUME_RULE),
                ),
                "restartPolicy": {"type": "string", "description": "Never, or left out."},
                "affinity": _AFFINITY_SCHEMA,
                "hostname": {"type": "string", "description": "Set by the operator."},
                "subdomain": {"type": "string", "description": "Set by the operator."},
                "hostNetwork": {"type": "boolean", "description": "Whether the pods share the network of their node."},
            },
            **_rules(
                (
                    "(!has(self.restartPolicy) || self.restartPolicy == 'Never') && (size(self.containers) == 0"
                    " || !has(self.containers[0].restartPolicy) || self.containers[0].restartPolicy == 'Never')",
                    RESTART_RULE,
                ),
                ("!has(self.hostname) && !has(self.subdomain)", HOSTNAME_RULE),
            ),
        },
    },
}

_GPU = re.compile(r"[^/]+/gpu|nvidia\.com/mig-.+")


def gpus(template: Mapping[str, Any]) -> int:
    """Return how many GPUs the training container of a pod template gets.

    Its limits say so, for want of them its requests. What is called gpu counts, whoever's it is, and parts of NVIDIA's
    (MIG).
    """
    resources = template["spec"]["containers"][0].get("resources") or {}
    given = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return sum(int(count) for name, count in given.items() if _GPU.fullmatch(name) and str(count).isdigit())
