"""What the operator says: the job's status."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from fthsdp_operator.api.failure_policy import RuleAction
from fthsdp_operator.api.parts import StatusPart, Time

__all__ = [
    "COMING",
    "UP",
    "AvoidedNode",
    "Condition",
    "CoordinatorStatus",
    "Failure",
    "JobState",
    "JobStatus",
    "NodeFaults",
    "ReplicaState",
    "ReplicaStatus",
    "Waiting",
]


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
    """The run is finished."""
    FAILED = "Failed"
    """The job is not restarted any more; the condition Failed says why."""


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
    """It is not restarted, since the run is over: it failed, or the job did."""
    ABANDONED = "Abandoned"
    """It failed and is not restarted; the others train on without it."""
    SUSPENDED = "Suspended"
    """The job is suspended: it has no pods."""
    REMOVED = "Removed"
    """The job was scaled below its index."""


COMING = (ReplicaState.PENDING, ReplicaState.BACKOFF, ReplicaState.STARTING, ReplicaState.CATCHING_UP)
"""States of a replica that is on its way to training."""
UP = (ReplicaState.STARTING, ReplicaState.CATCHING_UP, ReplicaState.ACTIVE, ReplicaState.SPARE)
"""States of a replica all of whose pods were seen."""


class Failure(StatusPart):
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
    """PodDeleted, Error, OOMKilled, Evicted, Preempted, NodeLost, NodeUnhealthy, NodeCordoned, ExitedEarly, Silent,
    Hung, Frozen, StateDiverged, ConnectionLost, Failed, Unschedulable, ImagePullFailed, StartTimeout, or what the
    kubelet says."""
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
    revision: str | None = None
    """Revision of the template that the replica ran."""


class Waiting(StatusPart):
    """What keeps a replica from training."""

    reason: str
    """Unschedulable, SchedulingGated, ImagePullFailed, NotJoined, RunIsOver, or why its kubelet starts no container."""
    message: str = ""
    """The pod, and what is said of it."""
    pod: str = ""
    """The first of its pods that waits."""
    since: Time
    """Since when it is this, as far as it was seen."""


class ReplicaStatus(StatusPart):
    """One replica."""

    index: int
    """Its number, 0 … replicas+spares-1."""
    state: ReplicaState = ReplicaState.PENDING
    """Pending, Starting, CatchingUp, Active, Spare, Backoff, Finished, Failed, Abandoned, Suspended or Removed."""
    attempt: int = 0
    """Incarnation; part of the pods' names. Written here before the pods of the one before are deleted."""
    revision: str | None = None
    """Revision of the template from which the pods of this attempt are made."""
    pods_attempt: int | None = None
    """The attempt after which its pods are named, if it was restarted in place since; unset where that is attempt."""
    restarts: int = 0
    """Restarts after failures so far."""
    restarts_in_place: int = 0
    """Those of them that were made in the pods that it had."""
    recent_restarts: tuple[Time, ...] = ()
    """Those that cost budget, within the longer window of failurePolicy.perReplica and failurePolicy.job."""
    restarts_in_a_row: int = 0
    """Those after the last stable time, which space out the next one."""
    ready_since: Time | None = None
    """When this attempt was first seen to train, or to stand by as a spare; unset for one that has not yet."""
    trains_since_step: int | None = None
    """Its newest step when this attempt was first seen to train; unset for one that has not yet."""
    away_since: Time | None = None
    """When it went away last: it failed, was moved, or got another template. Who fails again before it was stable has
    been away since the first of these failures."""
    next_restart_time: Time | None = None
    """When its pods are created again, while it is in Backoff."""
    first_exit_time: Time | None = None
    """When it was first seen that a pod of it had exited with 0, while others still ran."""
    waiting: Waiting | None = None
    """What keeps it from training, where something does that does not just take its time, or takes five minutes."""
    last_failure: Failure | None = None
    """Why it failed last."""

    @property
    def named_after(self) -> int:
        """The attempt that is part of its pods' names."""
        return self.attempt if self.pods_attempt is None else self.pods_attempt

    @property
    def generation(self) -> int:
        """How often it has got new pods so far."""
        return self.attempt - self.restarts_in_place


class CoordinatorStatus(StatusPart):
    """The coordinator's pod."""

    starts: int = 0
    """Pods created for it so far."""
    recent_starts: tuple[Time, ...] = ()
    """Those within the window of failurePolicy.perReplica that nobody asked for; they space out further ones. Other
    settings, and a suspend, begin anew."""
    pod_uid: str | None = None
    """UID of its pod as it was seen last; unset while one is being created."""


class NodeFaults(StatusPart):
    """A node on which replicas failed in a way that machines cause."""

    name: str
    """Name of the node."""
    times: tuple[Time, ...] = ()
    """When, within the last nodePolicy.avoid.ttlSeconds."""


class AvoidedNode(StatusPart):
    """A node that new pods keep away from, if there is room elsewhere."""

    name: str
    """Name of the node."""
    since: Time
    """When it came to be avoided."""
    until: Time
    """When that is forgotten."""
    why: str
    """What happened there."""


class Condition(StatusPart):
    """One aspect of the job's state, as Kubernetes tools expect it."""

    type: str
    """Available, Progressing, Degraded, Stalled, Suspended, Complete, Failed or Accepted."""
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


class JobStatus(StatusPart):
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
    restarting_replicas: int = 0
    """Replicas on their way back: in an attempt after their first, or waiting for it, and not training yet."""
    selector: str | None = None
    """Selects the job's training pods."""
    abandoned_replicas: int = 0
    """Replicas that failed and are not restarted, while the others train on."""
    current_revision: str | None = None
    """Revision of the template that all replicas run; while a changed one is on its way to them, the one before."""
    update_revision: str | None = None
    """Revision of the template in the spec."""
    updated_replicas: int = 0
    """Replicas with pods of that revision, spares included."""
    restarts: int = 0
    """Restarts of replicas after failures so far."""
    step: int = 0
    """Newest final step."""
    loss: float | None = None
    """Loss of the newest final step."""
    samples_per_second: float | None = None
    """Samples that all replicas together train in a second, over the newest steps; 0 while none ends."""
    tokens_per_second: float | None = None
    """The same in tokens, for a job that says in spec.tokensPerSample how many a sample has."""
    effective_training_time: float | None = None
    """Share of all replicas' time that went into final steps at the pace of an undisturbed one, since this coordinator
    started: 1 is a run without any loss."""
    progress_time: Time | None = None
    """When step, loss, samplesPerSecond or effectiveTrainingTime changed last. They are written down every 10 s, and
    with each change of the state."""
    last_failure: str | None = None
    """The newest failure of a replica in one line."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    """Available, Progressing, Degraded, Stalled, Suspended, Complete, Failed, Accepted."""
    replica_statuses: Annotated[
        tuple[ReplicaStatus, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["index"]}),
    ] = ()
    """Each replica, by index."""
    coordinator: CoordinatorStatus = CoordinatorStatus()
    """The coordinator's pod."""
    disruption_budget: int | None = None
    """Ready pods that the job's PodDisruptionBudget asks for; unset without one."""
    avoided_nodes: Annotated[
        tuple[AvoidedNode, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = ()
    """Nodes that new pods keep away from, the newest last."""
    node_faults: Annotated[
        tuple[NodeFaults, ...],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = ()
    """Nodes on which replicas failed, too seldom so far for them to be avoided."""
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
