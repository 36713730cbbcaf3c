"""What a user wants: the job's spec."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pydantic import ConfigDict, Field

from fthsdp.data.policies import BatchPolicy, LrPolicy
from fthsdp_operator.api.deadlines import FORCE_RULE, Deadlines
from fthsdp_operator.api.failure_policy import CONTAINER_RULE, FailurePolicy
from fthsdp_operator.api.gang import GangSpec
from fthsdp_operator.api.in_place import COMMAND_CEL, COMMAND_RULE
from fthsdp_operator.api.names import MANAGER, MAX_PODS, MAX_PROCESSES, MAX_REPLICAS
from fthsdp_operator.api.network import PORTS_CEL, PORTS_RULE, NetworkSpec
from fthsdp_operator.api.node_policy import NodePolicy
from fthsdp_operator.api.parts import SpecPart
from fthsdp_operator.api.placement import AFFINITY_CEL, AFFINITY_RULE, PlacementSpec
from fthsdp_operator.api.revision import revision_of
from fthsdp_operator.api.success import Success
from fthsdp_operator.api.template import TEMPLATE_SCHEMA, gpus
from fthsdp_operator.api.update_policy import RECREATE_RULE, UpdatePolicy

__all__ = ["LR_RULE", "REPLICAS_RULE", "SPARES_RULE", "Checkpoint", "CoordinatorSpec", "JobSpec", "TlsSpec"]


STALL_RULE = (
    "coordinator.stallTimeoutSeconds has to be more than silenceTimeoutSeconds + 10, so that who is silent or does not"
    " answer is found out first: raise stallTimeoutSeconds or lower silenceTimeoutSeconds"
)


class CoordinatorSpec(SpecPart):
    """The small pod that numbers the memberships of the job."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    # The API server also tries the rule on the empty default, before the fields have theirs.
                    "rule": (
                        "!has(self.stallTimeoutSeconds) || !has(self.silenceTimeoutSeconds)"
                        " || self.stallTimeoutSeconds > self.silenceTimeoutSeconds + 10"
                    ),
                    "message": STALL_RULE,
                    "fieldPath": ".stallTimeoutSeconds",
                }
            ]
        }
    )

    image: str | None = Field(default=None, min_length=1)
    """Image of the coordinator's pod; the operator's own image where unset."""
    resources: dict[str, Any] = Field(
        default_factory=lambda: {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    """Requests and limits of the coordinator's container, as in any pod; 50m of CPU and 64Mi, and at most 256Mi, where
    unset."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that may take the coordinator's pod; any node where empty. It needs no accelerator, and lives
    longest away from those that fail."""
    tolerations: tuple[dict[str, Any], ...] = Field(
        default=(),
        strict=False,
        max_length=64,
        json_schema_extra={"items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    )
    """Taints of nodes that may take the coordinator's pod nevertheless, as in any pod. It takes none from the
    template."""
    priority_class_name: str | None = Field(default=None, min_length=1, max_length=253)
    """PriorityClass of the coordinator's pod; the cluster's default where unset."""
    start_timeout_seconds: int = Field(default=600, ge=1, le=7 * 24 * 3600)
    """Seconds for which the run waits for all replicas before it begins with minReplicas of them."""
    silence_timeout_seconds: int = Field(default=5, ge=2, le=3600)
    """Seconds after which a replica is taken out that says nothing, though its connection is open: it is frozen, or its
    node is cut off. Nobody goes on for as long. What is known to have ended does not wait for it."""
    stall_timeout_seconds: int = Field(default=300, ge=16, le=7 * 24 * 3600)
    """Seconds without the end of any step after which all ranks are asked where they are, and who keeps the others
    waiting is taken out. Longer than the longest step, with everything that the script does between two steps."""

    def times(self) -> dict[str, int]:
        """Return the timeouts in seconds, by what they are of."""
        return {
            "start": self.start_timeout_seconds,
            "silence": self.silence_timeout_seconds,
            "stall": self.stall_timeout_seconds,
        }

    def other_times(self) -> dict[str, int]:
        """Return those that are not as they are by default."""
        return {name: seconds for name, seconds in self.times().items() if seconds != _TIMES[name]}

    def scheduling(self) -> dict[str, Any]:
        """Return the fields of the pod's spec that say where it goes, those that are set."""
        fields = {
            "nodeSelector": self.node_selector,
            "tolerations": list(self.tolerations),
            "priorityClassName": self.priority_class_name,
        }
        return {name: value for name, value in fields.items() if value}


_TIMES = CoordinatorSpec().times()


class Checkpoint(SpecPart):
    """Where the training state is kept, in case that no replica is left."""

    path: str = Field(min_length=1, max_length=4096)
    """Folder that all pods reach under this path, on a volume of the template; the newest whole checkpoint in it is
    where a job begins that has no replica with a state."""
    every_steps: int = Field(ge=1, le=10**9)
    """Steps from one checkpoint to the next."""


class TlsSpec(SpecPart):
    """Encryption of all connections of the job."""

    secret_name: str = Field(min_length=1, max_length=253)
    """Secret in the job's namespace with tls.crt, tls.key and ca.crt, as cert-manager fills it. All pods of the job
    mount it and use it for both sides of a connection; a renewed one is taken up without a restart."""


REPLICAS_RULE = "minReplicas is above replicas: lower minReplicas or raise replicas"
SPARES_RULE = f"replicas and spares together are more than {MAX_REPLICAS}: lower one of them"
LR_RULE = (
    "lrPolicy follows a batch that shrinks, and batchPolicy Constant keeps it whole: set lrPolicy None, or batchPolicy"
    " Shrink"
)
_FIXED_RULE = (
    "batchPolicy, lrPolicy, processesPerPod, checkpoint and tls have to be the same for all replicas, so they cannot be"
    " changed while pods run: suspend the job first"
)
_MANAGER_RULE = "managedBy cannot be changed while the job exists: delete the job and create it anew"
_PODS_RULE = "podsPerReplica cannot be changed while the job exists: delete the job and create it anew"


_CONTAINER_CEL = (
    "self.failurePolicy.rules.all(rule, !has(rule.onExitCodes) || !has(rule.onExitCodes.containerName)"
    " || self.template.spec.containers.exists(one, one.name == rule.onExitCodes.containerName)"
    " || (has(self.template.spec.initContainers)"
    " && self.template.spec.initContainers.exists(one, one.name == rule.onExitCodes.containerName)))"
)


class JobSpec(SpecPart):
    """What the job should be."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "self.minReplicas <= self.replicas",
                    "message": REPLICAS_RULE,
                    "fieldPath": ".minReplicas",
                },
                {
                    "rule": f"self.replicas + self.spares <= {MAX_REPLICAS}",
                    "message": SPARES_RULE,
                    "fieldPath": ".spares",
                },
                {
                    "rule": "self.batchPolicy == 'Shrink' || self.lrPolicy == 'None'",
                    "message": LR_RULE,
                    "fieldPath": ".lrPolicy",
                },
                {
                    "rule": (
                        "oldSelf.suspend || (self.batchPolicy == oldSelf.batchPolicy"
                        " && self.lrPolicy == oldSelf.lrPolicy"
                        " && has(self.processesPerPod) == has(oldSelf.processesPerPod)"
                        " && (!has(self.processesPerPod) || self.processesPerPod == oldSelf.processesPerPod)"
                        " && has(self.checkpoint) == has(oldSelf.checkpoint)"
                        " && (!has(self.checkpoint) || self.checkpoint == oldSelf.checkpoint)"
                        " && has(self.tls) == has(oldSelf.tls) && (!has(self.tls) || self.tls == oldSelf.tls))"
                    ),
                    "message": _FIXED_RULE,
                },
                {
                    "rule": "self.updatePolicy.type != 'Recreate' || has(self.checkpoint)",
                    "message": RECREATE_RULE,
                    "fieldPath": ".updatePolicy.type",
                },
                {"rule": _CONTAINER_CEL, "message": CONTAINER_RULE, "fieldPath": ".failurePolicy.rules"},
                {
                    "rule": "!has(self.deadlines.terminationSeconds) || self.nodePolicy.forceDelete",
                    "message": FORCE_RULE,
                    "fieldPath": ".deadlines.terminationSeconds",
                },
                {"rule": COMMAND_CEL, "message": COMMAND_RULE, "fieldPath": ".failurePolicy.inPlace"},
                {"rule": AFFINITY_CEL, "message": AFFINITY_RULE, "fieldPath": ".placement"},
                {"rule": PORTS_CEL, "message": PORTS_RULE, "fieldPath": ".network.masterPort"},
            ]
        }
    )

    replicas: int = Field(ge=1, le=MAX_REPLICAS)
    """Data-parallel replicas, each with a whole copy of the training state. May be changed while the job runs."""
    min_replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Below this many training replicas the job pauses at a step boundary, keeps its state and waits."""
    spares: int = Field(default=0, ge=0, le=MAX_REPLICAS)
    """Replicas kept ready beside these, with the state but without a share of the batch: when one of the others fails,
    a spare takes its place in the same step, and the failed one comes back as a spare. May be changed."""
    pods_per_replica: int = Field(
        default=1,
        ge=1,
        le=MAX_PODS,
        json_schema_extra={"x-kubernetes-validations": [{"rule": "self == oldSelf", "message": _PODS_RULE}]},
    )
    """Pods that make up one replica; they start, fail and restart together. Cannot be changed."""
    processes_per_pod: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Ranks in each pod; as many as its first container has GPUs where unset, and 1 where it has none. Above 1 the
    command is torchrun, which reads this number from PET_NPROC_PER_NODE."""
    template: dict[str, Any] = Field(json_schema_extra=TEMPLATE_SCHEMA)
    """The pod that all replicas run, a PodTemplateSpec. Each finds who it is in its environment (FTHSDP_REPLICA, …)."""
    update_policy: UpdatePolicy = UpdatePolicy()
    """What happens to replicas that run when the template is changed."""
    coordinator: CoordinatorSpec = CoordinatorSpec()
    """The pod that numbers the memberships of the job."""
    network: NetworkSpec = NetworkSpec()
    """Ports that have to be fixed."""
    placement: PlacementSpec = PlacementSpec()
    """Where the pods of a replica go."""
    gang: GangSpec = GangSpec()
    """Whether the pods of a replica are placed all at once or not at all."""
    failure_policy: FailurePolicy = FailurePolicy()
    """What happens when a replica fails."""
    node_policy: NodePolicy = NodePolicy()
    """What follows from the state of the nodes on which the pods are."""
    deadlines: Deadlines = Deadlines()
    """How long a replica may take to start, and the job to end."""
    batch_policy: BatchPolicy = Field(default=BatchPolicy.SHRINK, strict=False)
    """While replicas are missing: Shrink trains what the others bring, and no work is repeated; Constant has the others
    train the missing share too, in the same step."""
    lr_policy: LrPolicy = Field(default=LrPolicy.NONE, strict=False)
    """How the learning rate follows a batch that shrank: None, Linear (in proportion) or Sqrt (with its root)."""
    tokens_per_sample: int | None = Field(default=None, ge=1, le=10**12)
    """Tokens in a sample, such as the sequence length of a language model; for status.tokensPerSecond only."""
    checkpoint: Checkpoint | None = None
    """Where the training state is kept, in case that no replica is left; nowhere where unset."""
    tls: TlsSpec | None = None
    """Encryption of all connections of the job; what travels can be read on its way where unset."""
    suspend: bool = False
    """True takes all pods of the job away until it is false again. With checkpoint the replicas write one as they
    leave, and the job goes on from it; without, its training state is gone, and it begins anew."""
    success: Success = Success()
    """When a run that is over was a success."""
    managed_by: str = Field(
        default=MANAGER,
        min_length=1,
        max_length=63,
        json_schema_extra={"x-kubernetes-validations": [{"rule": "self == oldSelf", "message": _MANAGER_RULE}]},
    )
    """Who looks after the job. Of one that names somebody else, this operator touches nothing, not even the status.
    Cannot be changed."""
    retain_failed_pods: int = Field(default=1, ge=0, le=10)
    """Of each replica, attempts that failed whose pods stay for their logs, those that have ended by themselves; older
    ones are deleted. They use no resources."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=10 * 365 * 24 * 3600)
    """Seconds after which a job that is Complete or Failed is deleted; never where unset."""

    @property
    def ranks_per_pod(self) -> int:
        """Ranks in each pod."""
        return self.processes_per_pod or min(gpus(self.template), MAX_PROCESSES) or 1

    @cached_property
    def revision(self) -> str:
        """Which version of the template this is. Each pod and each replica asks for it, so it is worked out once."""
        return revision_of(self.template, self.ranks_per_pod)

    @property
    def groups(self) -> int:
        """Groups of pods: the replicas and the spares. Which of them trains is the coordinator's choice."""
        return self.replicas + self.spares
