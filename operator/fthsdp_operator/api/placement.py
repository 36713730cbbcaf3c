"""What a user says about where the pods of a replica go."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from fthsdp_operator.api.parts import SpecPart

__all__ = ["AFFINITY_CEL", "AFFINITY_RULE", "EXCLUSIVE_RULE", "PlacementSpec"]

AFFINITY_RULE = (
    "placement.replicaTopologyKey and podAffinity that the template requires cannot both hold: a scheduler looks for"
    " one pod that meets all such terms, so prefer it, or say the same with nodeAffinity"
)
_TERMS = "self.template.spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution"
AFFINITY_CEL = (
    "!has(self.placement.replicaTopologyKey) || !has(self.template.spec.affinity)"
    f" || !has(self.template.spec.affinity.podAffinity) || !has({_TERMS}) || size({_TERMS}) == 0"
)

EXCLUSIVE_RULE = (
    "placement.exclusive needs replicaTopologyKey: name the label of the nodes that says what is not shared"
)
_EXCLUSIVE_CEL = "!has(self.exclusive) || !self.exclusive || has(self.replicaTopologyKey)"
_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"


class PlacementSpec(SpecPart):
    """Where the pods of a replica go."""

    model_config = ConfigDict(
        json_schema_extra={"x-kubernetes-validations": [{"rule": _EXCLUSIVE_CEL, "message": EXCLUSIVE_RULE}]}
    )

    replica_topology_key: str | None = Field(default=None, max_length=317, pattern=_KEY)
    """Label of nodes whose value is the same for all pods of a replica, as that of a rack or of an NVLink domain. Nodes
    without it get no pod of the job. Pods go anywhere where unset."""
    exclusive: bool = False
    """Whether no other replica, of this job or of another one, shares that value with it."""
