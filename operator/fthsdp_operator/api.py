"""What a user writes and reads: ``FTHSDPJob`` as models. The CRD is generated from them (``crd.py``).

Every rule exists twice on purpose: as CEL in the CRD, so that ``kubectl apply`` refuses a bad manifest, and here,
because ``fthsdp run`` has no API server. Both say the same sentence, written once. The docstring under each field is
what ``kubectl explain`` prints.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from fthsdp.data.policies import BatchPolicy, LrPolicy
from fthsdp.errors import ConfigError

__all__ = [
    "API_VERSION",
    "ATTEMPT_LABEL",
    "CONFIG_ANNOTATION",
    "GROUP",
    "JOB_LABEL",
    "JOB_UID_LABEL",
    "KIND",
    "MAX_JOB_NAME",
    "NAME_RULE",
    "PLURAL",
    "POD_INDEX_LABEL",
    "REPLICA_LABEL",
    "RESERVED_ENV",
    "RESERVED_ENV_PREFIX",
    "ROLE_LABEL",
    "TRANSPORT_ENV",
    "VERSION",
    "Backoff",
    "Checkpoint",
    "Condition",
    "CoordinatorSpec",
    "CoordinatorStatus",
    "ExitCodeOperator",
    "Failure",
    "FailurePolicy",
    "Job",
    "JobBudget",
    "JobSpec",
    "JobState",
    "JobStatus",
    "Metadata",
    "OnExhausted",
    "OnExitCodes",
    "OnPodCondition",
    "PerReplica",
    "ReplicaState",
    "ReplicaStatus",
    "Role",
    "Rule",
    "RuleAction",
    "Time",
    "TlsSpec",
    "coordinator_name",
    "format_time",
    "parse_job",
    "pod_name",
]

GROUP = "fthsdp.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "FTHSDPJob"
PLURAL = "fthsdpjobs"

JOB_LABEL = f"{GROUP}/job"
"""Name of the job; on every object that belongs to it."""
JOB_UID_LABEL = f"{GROUP}/job-uid"
"""UID of the job: tells its pods from those of an earlier job of the same name."""
REPLICA_LABEL = f"{GROUP}/replica"
ATTEMPT_LABEL = f"{GROUP}/attempt"
POD_INDEX_LABEL = f"{GROUP}/pod-index"
ROLE_LABEL = f"{GROUP}/role"
"""trainer or coordinator."""
CONFIG_ANNOTATION = f"{GROUP}/coordinator-config"
"""What the coordinator was started with; when the job says something else by now, it is replaced."""

MAX_JOB_NAME = 40
"""Pods are called {job}-r1023-a999999-4095 at the longest, and a host name has at most 63 characters."""
MAX_REPLICAS = 1024
MAX_PODS = 4096
MAX_PROCESSES = 256
MAX_RULES = 64

RESERVED_ENV_PREFIX = "FTHSDP_"
RESERVED_ENV = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_NPROC_PER_NODE",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
)
"""Set by the operator in every container of a training pod, beside those that start with FTHSDP_; the last two by
torchrun."""
TRANSPORT_ENV = (
    "FTHSDP_FTAR_CHUNK_BYTES",
    "FTHSDP_FTAR_STREAMS",
    "FTHSDP_FTAR_WINDOW",
    "FTHSDP_FTAR_WIRE_DTYPE",
    "FTHSDP_KEEPALIVE_INTERVAL",
    "FTHSDP_SILENCE_TIMEOUT",
    "FTHSDP_CONNECT_TIMEOUT",
)
"""Set by the user, for the transport between replicas."""


class Role(StrEnum):
    """What a pod is in its job."""

    TRAINER = "trainer"
    COORDINATOR = "coordinator"


def pod_name(job: str, replica: int, attempt: int, index: int) -> str:
    """Name of a training pod: another one for each attempt, so that a new pod never waits for an old one to go."""
    return f"{job}-r{replica}-a{attempt}-{index}"


def coordinator_name(job: str) -> str:
    """Name of the coordinator's pod, and of its service account and role."""
    return f"{job}-coordinator"


def _parse_time(value: object) -> object:
    if isinstance(value, str):
        return datetime.fromisoformat(value).timestamp()
    return value


def format_time(value: float) -> str:
    """Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Time = Annotated[
    float,
    BeforeValidator(_parse_time),
    PlainSerializer(format_time),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""Unix time in seconds here, RFC 3339 on the wire."""


class _Part(BaseModel):
    """A part of the object: camelCase outside, descriptions from docstrings."""

    model_config = ConfigDict(
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


class _Spec(_Part):
    """What users write: unknown names are mistakes."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Status(_Part):
    """What the operator writes: names that a newer operator wrote are passed over."""

    model_config = ConfigDict(extra="ignore")


# --- spec -----------------------------------------------------------------------------------------------------------


class CoordinatorSpec(_Spec):
    """The small pod that numbers the memberships of the job."""

    image: str | None = Field(default=None, min_length=1)
    """Image of the coordinator's pod; the operator's own image where unset."""
    resources: dict[str, Any] = Field(
        default_factory=lambda: {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    """Requests and limits of the coordinator's container, as in any pod."""


_RULE_NAMES_RULE = "failurePolicy.rules has two rules of one name: give each its own, since the status names them"
_CRITERION_RULE = (
    "a rule of failurePolicy needs exactly one of onExitCodes, onPodReasons and onPodConditions: remove the others, or"
    " make a rule of each"
)
_ZERO_RULE = "onExitCodes.values has a 0: a container that exits with 0 has not failed, so remove it"
_CONTAINER_RULE = (
    "onExitCodes.containerName of a rule of failurePolicy is no container of the template: correct it, or leave it out"
    " to speak of all of them"
)


class RuleAction(StrEnum):
    """What is done about a failure."""

    RESTART_REPLICA = "RestartReplica"
    """The replica is restarted, and that costs budget."""
    RESTART_REPLICA_FREE = "RestartReplicaFree"
    """The replica is restarted, and that costs no budget."""
    ABANDON_REPLICA = "AbandonReplica"
    """The replica is not restarted; the others train on."""
    FAIL_JOB = "FailJob"
    """The job fails."""


class ExitCodeOperator(StrEnum):
    """How an exit code is compared with a list."""

    IN = "In"
    NOT_IN = "NotIn"


class OnExitCodes(_Spec):
    """Exit codes of containers; 0 never matches."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {"rule": "self.operator != 'In' || !(0 in self.values)", "message": _ZERO_RULE, "fieldPath": ".values"}
            ]
        }
    )

    container_name: str | None = Field(default=None, min_length=1, max_length=63)
    """Only this container of the template counts; all of them where unset."""
    operator: ExitCodeOperator = Field(strict=False)
    """In: the exit code is one of values. NotIn: it is none of them."""
    values: tuple[Annotated[int, Field(ge=0, le=255)], ...] = Field(
        strict=False, min_length=1, max_length=255, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """Exit codes, each of them once; those above 128 are signals, as in 128 + 9 for SIGKILL."""


class OnPodCondition(_Spec):
    """A condition in the status of the pod that failed."""

    type: str = Field(min_length=1, max_length=316)
    """Type of the condition, as in DisruptionTarget."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Status that it has, in quotes."""


class Rule(_Spec):
    """What is done about failures of one kind."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": (
                        "[has(self.onExitCodes), has(self.onPodReasons), has(self.onPodConditions)]"
                        ".exists_one(given, given)"
                    ),
                    "message": _CRITERION_RULE,
                }
            ]
        }
    )

    name: str = Field(min_length=1, max_length=63)
    """Name of the rule, by which the status speaks of it."""
    on_exit_codes: OnExitCodes | None = None
    """It matches a pod of which a container ended with such an exit code."""
    on_pod_reasons: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] | None = Field(
        default=None, strict=False, min_length=1, max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """It matches a failure with one of these reasons: those of lastFailure.reason, or what the pod's status says."""
    on_pod_conditions: tuple[OnPodCondition, ...] | None = Field(
        default=None, strict=False, min_length=1, max_length=64
    )
    """It matches a pod with one of these conditions."""
    action: RuleAction = Field(strict=False)
    """RestartReplica, RestartReplicaFree (which costs no budget), AbandonReplica or FailJob."""


class PerReplica(_Spec):
    """How often one replica may be restarted."""

    limit: int = Field(default=5, ge=0, le=1000)
    """Restarts that a replica may use within windowSeconds; onExhausted says what the failure after that does."""
    window_seconds: int = Field(default=3600, ge=1, le=30 * 24 * 3600)
    """Length of the sliding window in seconds; restarts before it are forgiven, so that a run of months is not failed
    by what happened weeks ago."""


class JobBudget(_Spec):
    """How often the replicas of a job may be restarted, all of them together."""

    limit: int = Field(ge=0, le=10_000)
    """Restarts that all replicas together may use within windowSeconds; the failure after that fails the job."""
    window_seconds: int = Field(default=3600, ge=1, le=30 * 24 * 3600)
    """Length of the sliding window in seconds."""


class OnExhausted(StrEnum):
    """What the failure does that comes after a replica has used its budget."""

    ABANDON_REPLICA = "AbandonReplica"
    FAIL_JOB = "FailJob"


_BACKOFF_RULE = "backoff.maxSeconds is below backoff.initialSeconds: raise maxSeconds or lower initialSeconds"


class Backoff(_Spec):
    """How long a replica waits before it is restarted again; the first restart after a stable time does not wait."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    # The API server also tries the rule on the empty default, before the fields have theirs.
                    "rule": "!has(self.initialSeconds) || self.initialSeconds <= self.maxSeconds",
                    "message": _BACKOFF_RULE,
                }
            ]
        }
    )

    initial_seconds: int = Field(default=5, ge=0, le=3600)
    """Wait before the second restart in a row, in seconds. Each wait is shortened by up to a quarter, by another share
    for each replica, so that those that failed together do not come back together."""
    max_seconds: int = Field(default=300, ge=0, le=24 * 3600)
    """Longest wait, in seconds."""
    factor: int = Field(default=2, ge=1, le=10)
    """Each further wait is this many times the one before."""
    stable_seconds: int = Field(default=600, ge=1, le=30 * 24 * 3600)
    """Seconds for which a replica has to train or stand by as a spare; then its next restart is a first one again."""


class FailurePolicy(_Spec):
    """What happens when a replica fails."""

    rules: tuple[Rule, ...] = Field(
        default=(),
        strict=False,
        max_length=MAX_RULES,
        json_schema_extra={
            "x-kubernetes-validations": [
                {"rule": "self.all(a, self.exists_one(b, b.name == a.name))", "message": _RULE_NAMES_RULE}
            ]
        },
    )
    """What is done about which failure; the first that matches decides. Where none does, what the cluster has done to a
    pod (evicted, preempted, deleted, its node lost) costs no budget, and what the run has done itself does."""
    per_replica: PerReplica = PerReplica()
    """Restart budget of each replica."""
    job: JobBudget | None = None
    """Restart budget of all replicas together; without a limit of its own where unset."""
    simultaneous_fraction: float = Field(default=1.0, ge=0, le=1)
    """When at least this part of the replicas, and at least two, fail with the same exit code within a minute (before
    the first step of the job: ever), and none of them has come up since, it is a fault of the code that they run, and
    the job fails at once. 0 switches this off."""
    on_exhausted: OnExhausted = Field(default=OnExhausted.ABANDON_REPLICA, strict=False)
    """What the failure does that comes after a replica has used its budget. AbandonReplica: the others train on without
    it, as long as minReplicas of them can; otherwise the job fails. FailJob: the job fails."""
    backoff: Backoff = Backoff()
    """Waits between the restarts of one replica."""


class Checkpoint(_Spec):
    """Where the training state is kept, in case that no replica is left."""

    path: str = Field(min_length=1, max_length=4096)
    """Folder that all pods reach under this path, on a volume of the template; the newest whole checkpoint in it is
    where a job begins that has no replica with a state."""
    every_steps: int = Field(ge=1, le=10**9)
    """Steps from one checkpoint to the next."""


class TlsSpec(_Spec):
    """Encryption of all connections of the job."""

    secret_name: str = Field(min_length=1, max_length=253)
    """Secret in the job's namespace with tls.crt, tls.key and ca.crt, as cert-manager fills it. All pods of the job
    mount it and use it for both sides of a connection; a renewed one is taken up without a restart."""


_REPLICAS_RULE = "minReplicas is above replicas: lower minReplicas or raise replicas"
_SPARES_RULE = f"replicas and spares together are more than {MAX_REPLICAS}: lower one of them"
_LR_RULE = (
    "lrPolicy follows a batch that shrinks, and batchPolicy Constant keeps it whole: set lrPolicy None, or batchPolicy"
    " Shrink"
)
_FIXED_RULE = (
    "batchPolicy, lrPolicy, checkpoint and tls have to be the same for all replicas, so they cannot be changed while"
    " pods run: suspend the job first"
)
_PODS_RULE = "podsPerReplica cannot be changed while the job exists: delete the job and create it anew"
NAME_RULE = (
    f"metadata.name has to be at most {MAX_JOB_NAME} lower-case letters, digits and dashes, starting with a letter and"
    " ending with a letter or digit: it becomes part of the host names of the pods"
)
_RESTART_RULE = "template.spec.restartPolicy has to be Never or left out: fthsdp restarts whole replicas by itself"
_ENV_RULE = (
    "env names that start with FTHSDP_ or PET_ (other than those of the transport), MASTER_ADDR, MASTER_PORT, RANK and"
    " WORLD_SIZE are set by fthsdp itself: remove them from the template"
)
_NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

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
                "x-kubernetes-validations": [{"rule": _RESERVED_CEL, "message": _ENV_RULE}],
            },
        },
    },
}
_TEMPLATE_SCHEMA: dict[str, Any] = {
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
                {"rule": "!has(self.restartPolicy) || self.restartPolicy == 'Never'", "message": _RESTART_RULE}
            ],
        },
    },
}


_CONTAINER_CEL = (
    "self.failurePolicy.rules.all(rule, !has(rule.onExitCodes) || !has(rule.onExitCodes.containerName)"
    " || self.template.spec.containers.exists(one, one.name == rule.onExitCodes.containerName)"
    " || (has(self.template.spec.initContainers)"
    " && self.template.spec.initContainers.exists(one, one.name == rule.onExitCodes.containerName)))"
)


class JobSpec(_Spec):
    """What the job should be."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "self.minReplicas <= self.replicas",
                    "message": _REPLICAS_RULE,
                    "fieldPath": ".minReplicas",
                },
                {
                    "rule": f"self.replicas + self.spares <= {MAX_REPLICAS}",
                    "message": _SPARES_RULE,
                    "fieldPath": ".spares",
                },
                {
                    "rule": "self.batchPolicy == 'Shrink' || self.lrPolicy == 'None'",
                    "message": _LR_RULE,
                    "fieldPath": ".lrPolicy",
                },
                {
                    "rule": (
                        "oldSelf.suspend || (self.batchPolicy == oldSelf.batchPolicy"
                        " && self.lrPolicy == oldSelf.lrPolicy && has(self.checkpoint) == has(oldSelf.checkpoint)"
                        " && (!has(self.checkpoint) || self.checkpoint == oldSelf.checkpoint)"
                        " && has(self.tls) == has(oldSelf.tls) && (!has(self.tls) || self.tls == oldSelf.tls))"
                    ),
                    "message": _FIXED_RULE,
                },
                {"rule": _CONTAINER_CEL, "message": _CONTAINER_RULE, "fieldPath": ".failurePolicy.rules"},
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
    processes_per_pod: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Ranks in each pod. Above 1 the command is torchrun, which reads this number from PET_NPROC_PER_NODE."""
    template: dict[str, Any] = Field(json_schema_extra=_TEMPLATE_SCHEMA)
    """The pod that all replicas run, a PodTemplateSpec. Each finds who it is in its environment (FTHSDP_REPLICA, …)."""
    coordinator: CoordinatorSpec = CoordinatorSpec()
    """The pod that numbers the memberships of the job."""
    failure_policy: FailurePolicy = FailurePolicy()
    """What happens when a replica fails."""
    batch_policy: BatchPolicy = Field(default=BatchPolicy.SHRINK, strict=False)
    """While replicas are missing: Shrink trains what the others bring, and no work is repeated; Constant has the others
    train the missing share too, in the same step."""
    lr_policy: LrPolicy = Field(default=LrPolicy.NONE, strict=False)
    """How the learning rate follows a batch that shrank: None, Linear (in proportion) or Sqrt (with its root)."""
    checkpoint: Checkpoint | None = None
    """Where the training state is kept, in case that no replica is left; nowhere where unset."""
    tls: TlsSpec | None = None
    """Encryption of all connections of the job; what travels can be read on its way where unset."""
    suspend: bool = False
    """True takes all pods of the job away until it is false again."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=10 * 365 * 24 * 3600)
    """Seconds after which a job that is Complete or Failed is deleted; never where unset."""

    @property
    def groups(self) -> int:
        """Groups of pods: the replicas and the spares. Which of them trains is the coordinator's choice."""
        return self.replicas + self.spares


# --- status ---------------------------------------------------------------------------------------------------------


class JobState(StrEnum):
    """Where the job stands, in one word."""

    PENDING = "Pending"
    """No training pod has been placed on a node."""
    STARTING = "Starting"
    """Pods start; no replica trains so far."""
    RUNNING = "Running"
    """As many replicas train as are wanted."""
    DEGRADED = "Degraded"
    """At least minReplicas train, the others are on their way back, or were abandoned."""
    PAUSED = "Paused"
    """Fewer than minReplicas train; the others wait at a step boundary."""
    SUSPENDED = "Suspended"
    """spec.suspend is true."""
    COMPLETE = "Complete"
    FAILED = "Failed"


class ReplicaState(StrEnum):
    """Where one replica stands."""

    PENDING = "Pending"
    """Its pods are being created."""
    STARTING = "Starting"
    """All its pods exist."""
    CATCHING_UP = "CatchingUp"
    """It downloads the state and replays, or waits to become active."""
    ACTIVE = "Active"
    """It trains."""
    SPARE = "Spare"
    """It has the state of those that train, and takes over as soon as one of them fails."""
    BACKOFF = "Backoff"
    """It failed and waits for nextRestartTime."""
    FINISHED = "Finished"
    """All its pods exited with 0 at the end of the run."""
    FAILED = "Failed"
    """It failed and is not restarted, since the run is over."""
    ABANDONED = "Abandoned"
    """It failed and is not restarted; the others train on without it."""
    SUSPENDED = "Suspended"
    REMOVED = "Removed"
    """The job was scaled below its index."""


class Failure(_Status):
    """Why a replica failed."""

    pod: str
    """The pod with which it began."""
    node: str | None = None
    """Node on which the pod ran."""
    container: str | None = None
    """Container that exited."""
    exit_code: int | None = None
    """Exit code of the container, as soon as it is known."""
    reason: str
    """PodDeleted, Error, OOMKilled, Evicted, Preempted, NodeLost, ExitedEarly, Silent, Hung, Frozen, StateDiverged,
    ConnectionLost, Failed, or what the kubelet says."""
    message: str = ""
    """What is known beyond that."""
    time: Time
    """When it was noticed."""
    during: ReplicaState | None = None
    """State of the replica when it failed."""
    action: RuleAction | None = None
    """What was asked for: RestartReplica, RestartReplicaFree (which costs no budget), AbandonReplica or FailJob."""
    rule: str | None = None
    """Name of the rule of failurePolicy that asked for it; unset where none of them matched."""


class ReplicaStatus(_Status):
    """One replica."""

    index: int
    """Its number, 0 … replicas+spares-1."""
    state: ReplicaState = ReplicaState.PENDING
    """Pending, Starting, CatchingUp, Active, Spare, Backoff, Finished, Failed, Abandoned, Suspended or Removed."""
    attempt: int = 0
    """Incarnation; part of the pods' names. Written here before the pods of the one before are deleted."""
    restarts: int = 0
    """Restarts so far."""
    recent_restarts: tuple[Time, ...] = ()
    """Those that cost budget, within the longer window of failurePolicy.perReplica and failurePolicy.job."""
    restarts_in_a_row: int = 0
    """Those after the last stable time, which space out the next one."""
    ready_since: Time | None = None
    """Since when it trains, or stands by as a spare."""
    next_restart_time: Time | None = None
    """When its pods are created again, while it is in Backoff."""
    first_exit_time: Time | None = None
    """When it was first seen that a pod of it had exited with 0, while others still ran."""
    last_failure: Failure | None = None
    """Why it failed last."""


class CoordinatorStatus(_Status):
    """The coordinator's pod."""

    starts: int = 0
    """Pods created for it so far."""
    recent_starts: tuple[Time, ...] = ()
    """Those within the window of failurePolicy.perReplica; they space out further ones."""
    pod_uid: str | None = None
    """UID of its pod as it was seen last; unset while one is being created."""


class Condition(_Status):
    """One aspect of the job's state, as Kubernetes tools expect it."""

    type: str
    """Available, Degraded, Suspended, Complete, Failed or Accepted."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: str
    """One word that says why."""
    message: str = ""
    """A sentence that says why."""
    last_transition_time: Time
    """When the status changed last."""
    observed_generation: int | None = None
    """Generation of the spec that this speaks of."""


class JobStatus(_Status):
    """What the job is."""

    observed_generation: int | None = None
    """Generation of the spec that the operator saw last."""
    state: JobState = JobState.PENDING
    """Pending, Starting, Running, Degraded, Paused, Suspended, Complete or Failed."""
    ready: str | None = None
    """Replicas that train, of those wanted, as in 2/3."""
    spares: str | None = None
    """Spares that are ready, of those wanted, as in 1/1; unset for a job without."""
    replicas: int = 0
    """Replicas that have pods, spares left out."""
    ready_replicas: int = 0
    """Replicas that train, or finished."""
    selector: str | None = None
    """Selects the job's training pods."""
    abandoned_replicas: int = 0
    """Replicas that failed and are not restarted, while the others train on."""
    restarts: int = 0
    """Restarts of replicas so far."""
    step: int = 0
    """Newest final step."""
    loss: float | None = None
    """Loss of the newest final step."""
    last_failure: str | None = None
    """The newest failure of a replica in one line."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    """Available, Degraded, Suspended, Complete, Failed, Accepted."""
    replica_statuses: Annotated[
        tuple[ReplicaStatus, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["index"]}),
    ] = ()
    """Each replica, by index."""
    coordinator: CoordinatorStatus = CoordinatorStatus()
    """The coordinator's pod."""
    start_time: Time | None = None
    """When a replica trained for the first time."""
    completion_time: Time | None = None
    """When the job became Complete or Failed."""

    @property
    def terminal(self) -> bool:
        """Complete and Failed are never left again."""
        return self.state in (JobState.COMPLETE, JobState.FAILED)

    def replica(self, index: int) -> ReplicaStatus | None:
        """Return the entry of a replica, or None."""
        return next((entry for entry in self.replica_statuses if entry.index == index), None)

    def dump(self) -> dict[str, Any]:
        """Return it as it stands in the object."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


# --- the object -----------------------------------------------------------------------------------------------------


class Metadata(_Status):
    """The part of an object's metadata that rules look at."""

    name: str
    namespace: str = "default"
    uid: str = ""
    resource_version: str = ""
    generation: int | None = None
    deletion_timestamp: str | None = None


class Job(_Status):
    """An FTHSDPJob."""

    metadata: Metadata
    spec: JobSpec
    status: JobStatus = JobStatus()

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Namespace of the job."""
        return self.metadata.namespace


def parse_job(manifest: Mapping[str, Any]) -> Job:
    """Turn a manifest into a Job; raises ConfigError with one sentence about the first thing that is wrong."""
    if not isinstance(manifest, Mapping):
        raise ConfigError(f"the manifest is {_show(manifest)}: it has to be a mapping with kind: {KIND}")
    _check_kind(manifest)
    _check_name(manifest)
    try:
        job = Job.model_validate(dict(manifest))
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from error
    for complaint in _complaints(job.spec):
        raise ConfigError(complaint)
    return job


def _check_kind(manifest: Mapping[str, Any]) -> None:
    for field, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != right:
            raise ConfigError(f"{field} is {_show(manifest.get(field))}: it has to be {right}")
    if "spec" not in manifest:
        raise ConfigError("spec is missing: it has to name at least replicas and template")


def _check_name(manifest: Mapping[str, Any]) -> None:
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ConfigError("metadata.name is missing: give the job a name")
    if len(name) > MAX_JOB_NAME or not _NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{NAME_RULE} (it is {name!r}, {len(name)} characters)")


def _complaints(spec: JobSpec) -> Iterator[str]:
    """Say what the types above cannot, in the order in which people read a manifest."""
    if spec.min_replicas > spec.replicas:
        yield f"spec.{_REPLICAS_RULE} (they are {spec.min_replicas} and {spec.replicas})"
    if spec.groups > MAX_REPLICAS:
        yield f"spec.{_SPARES_RULE} (they are {spec.replicas} and {spec.spares})"
    if spec.batch_policy is BatchPolicy.CONSTANT and spec.lr_policy is not LrPolicy.NONE:
        yield f"spec.{_LR_RULE} (it is {spec.lr_policy})"
    if spec.failure_policy.backoff.initial_seconds > spec.failure_policy.backoff.max_seconds:
        yield f"spec.failurePolicy.{_BACKOFF_RULE}"
    yield from _template_complaints(spec.template)
    yield from _rules_complaints(spec.failure_policy.rules, spec.template["spec"])
    if spec.checkpoint is not None:
        yield from _checkpoint_complaints(spec.checkpoint, spec.template["spec"])


def _rules_complaints(rules: Sequence[Rule], pod: Mapping[str, Any]) -> Iterator[str]:
    names = [rule.name for rule in rules]
    if twice := _repeated(names):
        yield f"spec.{_RULE_NAMES_RULE} (it is {twice})"
    known = {one["name"] for field in ("containers", "initContainers") for one in pod.get(field) or ()}
    for number, rule in enumerate(rules):
        where = f"spec.failurePolicy.rules[{number}]"
        if sum(it is not None for it in (rule.on_exit_codes, rule.on_pod_reasons, rule.on_pod_conditions)) != 1:
            yield f"{where}: {_CRITERION_RULE}"
        if twice := _repeated(rule.on_pod_reasons or ()):
            yield f"{where}.onPodReasons has {twice} twice: remove one"
        if rule.on_exit_codes is not None:
            yield from _exit_codes_complaints(rule.on_exit_codes, f"{where}.onExitCodes", known)


def _exit_codes_complaints(codes: OnExitCodes, where: str, known: Collection[str]) -> Iterator[str]:
    if codes.operator is ExitCodeOperator.IN and 0 in codes.values:
        yield f"{where}: {_ZERO_RULE}"
    if twice := _repeated(codes.values):
        yield f"{where}.values has {twice} twice: remove one"
    if codes.container_name is not None and codes.container_name not in known:
        yield f"{where}: {_CONTAINER_RULE} (it is {codes.container_name}; known are {', '.join(sorted(known))})"


def _repeated(values: Sequence[object]) -> str:
    """Return the first value that was there before, as text; empty where each is another one."""
    return next((str(value) for number, value in enumerate(values) if value in values[:number]), "")


def _checkpoint_complaints(checkpoint: Checkpoint, pod: Mapping[str, Any]) -> Iterator[str]:
    """A checkpoint that is gone with the pod that wrote it helps nobody."""
    path = PurePosixPath(checkpoint.path)
    mounts = {
        PurePosixPath(str(mount.get("mountPath"))): mount for mount in _mappings(pod["containers"][0], "volumeMounts")
    }
    at = max((at for at in mounts if path.is_relative_to(at)), key=lambda at: len(at.parts), default=None)
    name = None if at is None else mounts[at].get("name")
    kinds = [kind for volume in _mappings(pod, "volumes") if volume.get("name") == name for kind in volume]
    for kind in {"emptyDir", "secret", "configMap"}.intersection(kinds):
        yield (
            f"spec.checkpoint.path {checkpoint.path} is on the volume {name}, which is of the kind {kind}:"
            " use one that outlives the pods and that all of them share"
        )


def _mappings(part: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    return [item for item in part.get(field) or () if isinstance(item, Mapping)]


def _template_complaints(template: Mapping[str, Any]) -> Iterator[str]:
    pod = template.get("spec")
    if not isinstance(pod, Mapping):
        yield "spec.template.spec is missing: it has to hold the pod's containers"
        return
    if not pod.get("containers"):
        yield "spec.template.spec.containers is missing or empty: name one container with image and command"
    if pod.get("restartPolicy", "Never") != "Never":
        yield f"spec.{_RESTART_RULE}"
    yield from _metadata_complaints(template.get("metadata"))
    yield from _list_complaint(pod.get("volumes"), "spec.template.spec.volumes")
    for field in ("containers", "initContainers"):
        where = f"spec.template.spec.{field}"
        yield from _list_complaint(pod.get(field), where)
        for number, container in enumerate(pod.get(field) or ()):
            yield from _container_complaints(container, f"{where}[{number}]")


def _metadata_complaints(metadata: object) -> Iterator[str]:
    where = "spec.template.metadata"
    if not isinstance(metadata, Mapping):
        if metadata is not None:
            yield f"{where} is {_show(metadata)}: it has to be a mapping"
        return
    for field in ("labels", "annotations"):
        if not isinstance(metadata.get(field) or {}, Mapping):
            yield f"{where}.{field} is {_show(metadata[field])}: it has to be a mapping of names to values"


def _list_complaint(value: object, where: str) -> Iterator[str]:
    if value is not None and not isinstance(value, list):
        yield f"{where} is {_show(value)}: it has to be a list"


def _container_complaints(container: object, where: str) -> Iterator[str]:
    if not isinstance(container, Mapping):
        yield f"{where} is {_show(container)}: it has to be a mapping with name, image and command"
        return
    if not isinstance(container.get("name"), str) or not container["name"]:
        yield f"{where}.name is missing: give the container a name"
    for field in ("command", "args"):
        yield from _list_complaint(container.get(field), f"{where}.{field}")
        for number, word in enumerate(container.get(field) or ()):
            yield from _text_complaint(word, f"{where}.{field}[{number}]")
    yield from _text_complaint(container.get("workingDir", ""), f"{where}.workingDir")
    yield from _list_complaint(container.get("volumeMounts"), f"{where}.volumeMounts")
    yield from _list_complaint(container.get("env"), f"{where}.env")
    for number, variable in enumerate(container.get("env") or ()):
        yield from _variable_complaints(variable, f"{where}.env[{number}]")


def _variable_complaints(variable: object, where: str) -> Iterator[str]:
    if not isinstance(variable, Mapping) or not isinstance(variable.get("name"), str):
        yield f"{where}.name is missing: each entry of env has a name and a value"
        return
    if not variable["name"] or not set(variable["name"]).isdisjoint("=\0"):
        yield f"{where}.name is {_show(variable['name'])}: it cannot be the name of a variable"
    if _reserved(variable["name"]):
        yield f"{where} names {variable['name']}: {_ENV_RULE}"
    yield from _text_complaint(variable.get("value", ""), f"{where}.value")
    if not isinstance(variable.get("valueFrom") or {}, Mapping):
        yield f"{where}.valueFrom is {_show(variable['valueFrom'])}: it has to be a mapping"


def _text_complaint(value: object, where: str) -> Iterator[str]:
    """Numbers and booleans are the usual slip: YAML reads them as such unless they stand in quotes."""
    if value is not None and not isinstance(value, str):
        yield f"{where} is {_show(value)}: it has to be text, so put it in quotes"
    elif value is not None and "\0" in value:
        yield f"{where} is {_show(value)}: no process can be given a NUL character"


def _reserved(name: str) -> bool:
    reserved = name.startswith((RESERVED_ENV_PREFIX, "PET_")) or name in RESERVED_ENV
    return reserved and name not in TRANSPORT_ENV


def _sentence(error: ValidationError) -> str:
    """Say the first thing that pydantic found, in our words."""
    first = error.errors(include_url=False)[0]
    where = _path(first["loc"])
    given, kind, context = first["input"], first["type"], first.get("ctx", {})
    if kind == "missing":
        return f"{where} is missing: {_description(first['loc'])}"
    if kind == "extra_forbidden":
        return f"{where} is not a field of {KIND}{_suggestion(first['loc'])}"
    if kind in _WORDS:
        return f"{where} is {_show(given)}: it has to be {_WORDS[kind].format(**context)}"
    return f"{where} is {_show(given)}: {first['msg'][:1].lower()}{first['msg'][1:]}"


_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "too_short": "a list with at least {min_length} entry",
    "too_long": "a list with at most {max_length} entries",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} character long",
    "string_too_long": "at most {max_length} characters long",
    "enum": "{expected}",
}


def _path(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _show(value: object) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Return the model that holds the last name of a location."""
    model: type[BaseModel] = Job
    for part in location[:-1]:
        if isinstance(part, int):
            continue  # a place in a list, whose items are of the model that was found before
        field = next((f for f in model.model_fields.values() if f.alias == part), None)
        inner = next(_models_in(field.annotation), None) if field is not None else None
        if inner is None:
            return None
        model = inner
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in X, X | None or tuple[X, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _description(location: tuple[int | str, ...]) -> str:
    model = _model_at(location)
    fields = model.model_fields.values() if model else ()
    field = next((f for f in fields if f.alias == location[-1]), None)
    words = " ".join((field.description or "").split()) if field else ""
    return words.rstrip(".") or "it has to be given"


def _suggestion(location: tuple[int | str, ...]) -> str:
    model = _model_at(location)
    names = [f.alias or "" for f in model.model_fields.values()] if model else []
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f": did you mean {near[0]}?" if near else f": known here are {', '.join(names)}"
