"""What a user says about nodes: which are as good as lost, which are left, which are avoided."""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from fthsdp_operator.api.parts import SpecPart

__all__ = [
    "OWN_CONDITION_RULE",
    "OWN_TAINTS",
    "OWN_TAINT_RULE",
    "Avoid",
    "AvoidMode",
    "DisruptionBudget",
    "NodePolicy",
    "OnCordon",
    "UnhealthyCondition",
]

OWN_TAINTS = (
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/unschedulable",
)
OWN_TAINT_RULE = (
    "nodePolicy.unhealthyTaints names a taint that Kubernetes itself sets for nodes that are not Ready or cordoned:"
    " remove it, since unreachableSeconds and onCordon speak of those"
)
OWN_CONDITION_RULE = (
    "nodePolicy.unhealthyConditions names Ready, which unreachableSeconds speaks of: remove it, or name another one"
)


def _fits(pattern: str, name: str) -> bool:
    """Only * stands for something else."""
    return fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]"))


class OnCordon(StrEnum):
    """What happens to a replica when a node of it is cordoned."""

    IGNORE = "Ignore"
    """It stays: a cordon keeps new pods away, and leaves those alone that run."""
    MIGRATE = "Migrate"
    """It leaves at a step boundary, and starts again elsewhere."""


class DisruptionBudget(StrEnum):
    """What keeps evictions from taking more replicas than the job can spare."""

    NONE = "None"
    """Nothing: every eviction is allowed, as far as no budget of somebody else forbids it."""
    MIN_REPLICAS = "MinReplicas"
    """A PodDisruptionBudget: never more are gone at a time than leave minReplicas whole."""


class AvoidMode(StrEnum):
    """How bad nodes are avoided."""

    NONE = "None"
    """No node is avoided."""
    PREFERRED = "Preferred"
    """The scheduler is asked for another node, and takes this one where there is none."""


class UnhealthyCondition(SpecPart):
    """A condition in the status of a node that says that it is ill."""

    type: str = Field(min_length=1, max_length=316)
    """Type of the condition, as in GPUMissing; * stands for anything, as in Gpu*Watch."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Status that it has when the node is ill, in quotes."""

    def matches(self, condition: tuple[str, str]) -> bool:
        """Whether a condition of a node, by type and status, is this one."""
        kind, status = condition
        return status == self.status and kind != "Ready" and _fits(self.type, kind)


_KNOWN_CONDITIONS = tuple(
    UnhealthyCondition(type=kind)
    for kind in (
        "GPUMissing",
        "NVLinkStatusInactive",
        "XIDErrors",
        "IBLinkFlapping",
        "Gpu*Watch",
        "SysLogs*Error",
    )
)
"""Those of the node-problem-detector of AKS, and of NVSentinel."""


class Avoid(SpecPart):
    """How long nodes are avoided on which replicas failed."""

    mode: AvoidMode = Field(default=AvoidMode.PREFERRED, strict=False)
    """Preferred: new pods go elsewhere if there is room, and never wait for that. None: no node is avoided."""
    threshold: int = Field(default=2, ge=1, le=100)
    """Failures of the machine's kind on one node within ttlSeconds, after which it is avoided. A node that says itself
    that it is ill is avoided at once."""
    ttl_seconds: int = Field(default=3600, ge=60, le=30 * 24 * 3600)
    """Seconds for which a node is avoided, and failures are remembered."""
    max_nodes: int = Field(default=16, ge=1, le=64)
    """Nodes that are avoided at a time; of more, the newest."""


class NodePolicy(SpecPart):
    """What follows from the state of nodes. All of it needs an operator that may look at nodes, but for the avoidance
    of those on which replicas failed, and for the disruption budget."""

    unreachable_seconds: int = Field(default=60, ge=1, le=24 * 3600)
    """Seconds for which a node has not been Ready, after which a replica with a pod there starts again elsewhere, at no
    cost; never while the coordinator hears of that replica. Kubernetes itself takes pods away after five minutes."""
    force_delete: bool = False
    """True: pods on a node that has not been Ready for unreachableSeconds are removed from the API server once their
    grace period is over, though nobody can tell that their processes have ended; what they write to shared storage has
    to do no harm. The processes themselves are refused by the coordinator and by the other replicas. Pods of an
    earlier job of the same name are removed as well, where this one needs their names."""
    unhealthy_conditions: tuple[UnhealthyCondition, ...] = Field(
        default=_KNOWN_CONDITIONS,
        strict=False,
        max_length=64,
        json_schema_extra={
            "x-kubernetes-validations": [
                {"rule": "self.all(one, one.type != 'Ready')", "message": OWN_CONDITION_RULE},
            ]
        },
    )
    """A node with one of these conditions is ill: its replica leaves it at a step boundary, at no cost, one replica at
    a time and never below minReplicas. The default names those of NVSentinel, and of the node-problem-detector of AKS:
    GPUMissing, NVLinkStatusInactive, XIDErrors, IBLinkFlapping, Gpu*Watch, SysLogs*Error."""
    unhealthy_taints: tuple[Annotated[str, Field(min_length=1, max_length=316)], ...] = Field(
        default=("nvidia.com/gpu-xid-error",),
        strict=False,
        max_length=64,
        json_schema_extra={
            "x-kubernetes-list-type": "set",
            "x-kubernetes-validations": [
                {"rule": f"self.all(key, !(key in {list(OWN_TAINTS)}))", "message": OWN_TAINT_RULE},
            ],
        },
    )
    """Keys of taints, with * for anything, which say the same. The default is that of NVSentinel."""
    on_cordon: OnCordon = Field(default=OnCordon.IGNORE, strict=False)
    """Ignore: a cordoned node keeps its replicas, as Kubernetes means it. Migrate: they leave it at step boundaries, at
    no cost, one at a time and never below minReplicas; without room elsewhere the one that left waits for it."""
    disruption_budget: DisruptionBudget = Field(default=DisruptionBudget.NONE, strict=False)
    """MinReplicas: a PodDisruptionBudget lets a drain, and whoever else evicts pods, take as many at a time as leave
    minReplicas whole, and the next ones only when these replicas are back; at least one. Not together with another
    budget that selects the same pods: Kubernetes evicts no pod that two select."""
    avoid: Avoid = Avoid()
    """Nodes on which replicas failed again and again."""

    def taint_matches(self, key: str) -> bool:
        """Whether a taint of this key says that its node is ill."""
        return key not in OWN_TAINTS and any(_fits(pattern, key) for pattern in self.unhealthy_taints)
