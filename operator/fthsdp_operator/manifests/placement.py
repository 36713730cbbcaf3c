"""Where the pods of a replica go: what the scheduler is told about it. Pure: a pod's spec is changed in place.

It is said as affinity between pods, which no webhook has to add. The pods of one attempt attract each other: the first
one, with nobody there to be near to, goes anywhere. What the user's template says of affinity stays, and holds as well.
"""

from __future__ import annotations

from typing import Any

from fthsdp_operator.api import ATTEMPT_LABEL, JOB_UID_LABEL, REPLICA_LABEL, ROLE_LABEL, Job, Role

__all__ = ["place"]

Manifest = dict[str, Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def place(spec: Manifest, job: Job, *, replica: int, attempt: int) -> None:
    """Keep the pods of an attempt together, and apart from others, as the job wants it."""
    wanted = job.spec.placement
    if wanted.replica_topology_key is None:
        return
    where = {"topologyKey": wanted.replica_topology_key}
    _demand(spec, "podAffinity", {**where, "labelSelector": _same_attempt(job, replica, attempt)})
    if wanted.exclusive:
        for others in (_other_replicas(job, replica), _other_jobs(job)):
            _demand(spec, "podAntiAffinity", {**where, **others})


def _demand(spec: Manifest, kind: str, term: Manifest) -> None:
    """Add a term: all of a list have to hold."""
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    terms = affinity[kind] = dict(affinity.get(kind) or {})
    terms[_REQUIRED] = [*(terms.get(_REQUIRED) or []), term]


def _same_attempt(job: Job, replica: int, attempt: int) -> Manifest:
    """An attempt that is on its way out attracts nobody: it may be on a node that is broken."""
    labels = {JOB_UID_LABEL: job.metadata.uid, REPLICA_LABEL: str(replica), ATTEMPT_LABEL: str(attempt)}
    return {"matchLabels": labels}


def _other_replicas(job: Job, replica: int) -> Manifest:
    """Earlier attempts of the same one are let be: it may want to return to where it was."""
    labels = {JOB_UID_LABEL: job.metadata.uid, ROLE_LABEL: str(Role.TRAINER)}
    apart = {"key": REPLICA_LABEL, "operator": "NotIn", "values": [str(replica)]}
    return {"labelSelector": {"matchLabels": labels, "matchExpressions": [apart]}}


def _other_jobs(job: Job) -> Manifest:
    """Those of all namespaces: a rack is shared across them."""
    apart = {"key": JOB_UID_LABEL, "operator": "NotIn", "values": [job.metadata.uid]}
    return {
        "labelSelector": {"matchLabels": {ROLE_LABEL: str(Role.TRAINER)}, "matchExpressions": [apart]},
        "namespaceSelector": {},
    }
