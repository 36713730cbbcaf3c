"""What a user writes and reads: ``FTHSDPJob`` as models. The CRD is generated from them (``crd.py``).

Every rule exists twice on purpose: as CEL in the CRD, so that ``kubectl apply`` refuses a bad manifest, and here,
because ``fthsdp run`` has no API server. Both say the same sentence, written once. The docstring under each field is
what ``kubectl explain`` prints.
"""

from __future__ import annotations

from fthsdp_operator.api.advice import advice
from fthsdp_operator.api.deadlines import Deadlines
from fthsdp_operator.api.failure_policy import (
    Backoff,
    ExitCodeOperator,
    FailurePolicy,
    JobBudget,
    OnExhausted,
    OnExitCodes,
    OnPodCondition,
    PerReplica,
    Rule,
    RuleAction,
)
from fthsdp_operator.api.gang import GangProvider, GangSpec
from fthsdp_operator.api.in_place import InPlace
from fthsdp_operator.api.job import Job, Metadata
from fthsdp_operator.api.names import (
    API_VERSION,
    ATTEMPT_LABEL,
    CONFIG_ANNOTATION,
    CONTAINER_ANNOTATION,
    GROUP,
    JOB_LABEL,
    JOB_UID_LABEL,
    KIND,
    MANAGER,
    MAX_JOB_NAME,
    NAME_RULE,
    PLURAL,
    POD_INDEX_LABEL,
    REPLICA_LABEL,
    RESERVED_ENV,
    RESERVED_ENV_PREFIX,
    REVISION_LABEL,
    ROLE_LABEL,
    TRANSPORT_ENV,
    VERSION,
    Role,
    coordinator_name,
    pod_name,
)
from fthsdp_operator.api.network import PORTS_PER_ATTEMPT, PORTS_PER_REPLICA, NetworkSpec
from fthsdp_operator.api.node_policy import (
    Avoid,
    AvoidMode,
    DisruptionBudget,
    NodePolicy,
    OnCordon,
    UnhealthyCondition,
)
from fthsdp_operator.api.parse import parse_job
from fthsdp_operator.api.parts import Time, format_time
from fthsdp_operator.api.placement import PlacementSpec
from fthsdp_operator.api.reasons import REASONS, ConditionReason, ConditionType, EndReason, EventReason, FailReason
from fthsdp_operator.api.spec import Checkpoint, CoordinatorSpec, JobSpec, TlsSpec
from fthsdp_operator.api.status import (
    COMING,
    UP,
    AvoidedNode,
    Condition,
    CoordinatorStatus,
    Failure,
    JobState,
    JobStatus,
    NodeFaults,
    ReplicaState,
    ReplicaStatus,
    Waiting,
)
from fthsdp_operator.api.success import Success, SuccessPolicy
from fthsdp_operator.api.update_policy import UpdatePolicy, UpdateType

__all__ = [
    "API_VERSION",
    "ATTEMPT_LABEL",
    "COMING",
    "CONFIG_ANNOTATION",
    "CONTAINER_ANNOTATION",
    "GROUP",
    "JOB_LABEL",
    "JOB_UID_LABEL",
    "KIND",
    "MANAGER",
    "MAX_JOB_NAME",
    "NAME_RULE",
    "PLURAL",
    "POD_INDEX_LABEL",
    "PORTS_PER_ATTEMPT",
    "PORTS_PER_REPLICA",
    "REASONS",
    "REPLICA_LABEL",
    "RESERVED_ENV",
    "RESERVED_ENV_PREFIX",
    "REVISION_LABEL",
    "ROLE_LABEL",
    "TRANSPORT_ENV",
    "UP",
    "VERSION",
    "Avoid",
    "AvoidMode",
    "AvoidedNode",
    "Backoff",
    "Checkpoint",
    "Condition",
    "ConditionReason",
    "ConditionType",
    "CoordinatorSpec",
    "CoordinatorStatus",
    "Deadlines",
    "DisruptionBudget",
    "EndReason",
    "EventReason",
    "ExitCodeOperator",
    "FailReason",
    "Failure",
    "FailurePolicy",
    "GangProvider",
    "GangSpec",
    "InPlace",
    "Job",
    "JobBudget",
    "JobSpec",
    "JobState",
    "JobStatus",
    "Metadata",
    "NetworkSpec",
    "NodeFaults",
    "NodePolicy",
    "OnCordon",
    "OnExhausted",
    "OnExitCodes",
    "OnPodCondition",
    "PerReplica",
    "PlacementSpec",
    "ReplicaState",
    "ReplicaStatus",
    "Role",
    "Rule",
    "RuleAction",
    "Success",
    "SuccessPolicy",
    "Time",
    "TlsSpec",
    "UnhealthyCondition",
    "UpdatePolicy",
    "UpdateType",
    "Waiting",
    "advice",
    "coordinator_name",
    "format_time",
    "parse_job",
    "pod_name",
]
