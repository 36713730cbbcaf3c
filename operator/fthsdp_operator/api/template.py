"""What is said of the pod template: the schema of those of its parts that rules look at."""

from __future__ import annotations

from typing import Any

from fthsdp_operator.api.names import TRANSPORT_ENV

__all__ = ["ENV_RULE", "RESTART_RULE", "TEMPLATE_SCHEMA"]


RESTART_RULE = "template.spec.restartPolicy has to be Never or left out: fthsdp restarts whole replicas by itself"
ENV_RULE = (
    "env names that start with FTHSDP_ or PET_ (other than those of the transport), MASTER_ADDR, MASTER_PORT, RANK and"
    " WORLD_SIZE are set by fthsdp itself: remove them from the template"
)

_RESERVED_CEL = (
    f"(self.name in {list(TRANSPORT_ENV)} || !self.name.startsWith('FTHSDP_')) && !self.name.startsWith('PET_')"
    " && !(self.name in ['MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE'])"
)
_ANYTHING: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}
_ITEMS: dict[str, Any] = {"type": "array", "items": {"type": "object", **_ANYTHING}}
_CONTAINER_SCHEMA: dict[str, Any] = {
    "type": "object",
    **_ANYTHING,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 63, "description": "Name of the container."},
        "volumeMounts": {**_ITEMS, "description": "Where volumes appear in the container."},
        "env": {
            "type": "array",
            "maxItems": 500,
            "description": "Environment of the container. Names of fthsdp and torchrun are set by the operator.",
            "items": {
                "type": "object",
                **_ANYTHING,
                "required": ["name"],
                "properties": {"name": {"type": "string", "maxLength": 256, "description": "Name of the variable."}},
                "x-kubernetes-validations": [{"rule": _RESERVED_CEL, "message": ENV_RULE}],
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
                "labels": {"type": "object", **_ANYTHING, "description": "Labels of the pods, beside those of fthsdp."},
                "annotations": {"type": "object", **_ANYTHING, "description": "Annotations of the pods."},
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
                "volumes": {**_ITEMS, "description": "Volumes of the pod; the one with the job's key is added."},
                "restartPolicy": {"type": "string", "description": "Never, or left out."},
            },
            "x-kubernetes-validations": [
                {"rule": "!has(self.restartPolicy) || self.restartPolicy == 'Never'", "message": RESTART_RULE}
            ],
        },
    },
}
