"""Which version of the pod template a replica runs: a hash of what the user wrote, and of nothing else.

Pods carry more than the template: names, environment, what a newer operator adds. None of it is part of the revision,
so an upgrade of the operator rolls nothing. Nor does a template that says the same in other words: keys in another
order, fields that are empty, defaults of the API server written out.

What this returns for a template must stay the same in all versions, or an upgrade would roll every job: a test holds
some. New defaults of Kubernetes are therefore not added here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["revision_of"]

_LENGTH = 10
"""Hex digits: enough to tell versions of one template apart, and short enough for a column."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "spec": {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "enableServiceLinks": True,
        "serviceAccountName": "default",
        "serviceAccount": "default",
    },
    "containers": {"terminationMessagePath": "/dev/termination-log"},
    "initContainers": {"terminationMessagePath": "/dev/termination-log"},
    "ports": {"protocol": "TCP"},
    "fieldRef": {"apiVersion": "v1"},
    "secret": {"defaultMode": 420},
    "configMap": {"defaultMode": 420},
    "downwardAPI": {"defaultMode": 420},
    "projected": {"defaultMode": 420},
    "hostPath": {"type": ""},
    "httpGet": {"scheme": "HTTP"},
    "livenessProbe": {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
    "readinessProbe": {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
    "startupProbe": {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
    "env": {"value": ""},
}
"""By the field in which an object, or each object of a list, stands: what Kubernetes takes where nothing is said."""
_QUANTITIES = ("limits", "requests")
_EMPTY_MEANS_ALL = ("labelSelector", "namespaceSelector")
"""Fields whose empty value says something else than their absence."""
_EXACT = ("nodeSelector", "labels", "annotations", "matchLabels", "data")
"""Maps of names that users choose: none of these is a field with a default."""


def revision_of(template: Mapping[str, Any], ranks_per_pod: int) -> str:
    """Return the revision of a template: the same for templates that give the same pods."""
    metadata = template.get("metadata") or {}
    said = {
        "labels": dict(metadata.get("labels") or {}),
        "annotations": dict(metadata.get("annotations") or {}),
        "spec": _plain(template["spec"], "spec"),
        "processesPerPod": ranks_per_pod,
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def _plain(value: Any, field: str) -> Any:
    """Return a value without what says nothing."""
    if isinstance(value, list):
        return [_plain(item, field) for item in value]
    if not isinstance(value, Mapping):
        return value
    if field in _EXACT:
        return dict(value)
    if field in _QUANTITIES:
        return {name: str(amount) for name, amount in value.items()}
    plain = {name: _plain(part, name) for name, part in value.items()}
    defaults = _DEFAULTS.get(field, {})
    return {name: part for name, part in plain.items() if not _says_nothing(name, part, defaults)}


def _says_nothing(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    if value is None or (name in defaults and value == defaults[name]):
        return True
    return value in ([], {}) and name not in _EMPTY_MEANS_ALL
