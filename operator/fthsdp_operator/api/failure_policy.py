"""What a user says about failures: rules, budgets, waits."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from fthsdp_operator.api.in_place import InPlace
from fthsdp_operator.api.names import MAX_RULES
from fthsdp_operator.api.parts import SpecPart

__all__ = [
    "BACKOFF_RULE",
    "CONTAINER_RULE",
    "CRITERION_RULE",
    "RULE_NAMES_RULE",
    "ZERO_RULE",
    "Backoff",
    "ExitCodeOperator",
    "FailurePolicy",
    "JobBudget",
    "OnExhausted",
    "OnExitCodes",
    "OnPodCondition",
    "PerReplica",
    "Rule",
    "RuleAction",
]


RULE_NAMES_RULE = "failurePolicy.rules has two rules of one name: give each its own, since the status names them"
CRITERION_RULE = (
    "a rule of failurePolicy needs exactly one of onExitCodes, onPodReasons and onPodConditions: remove the others, or"
    " make a rule of each"
)
ZERO_RULE = "onExitCodes.values has a 0: a container that exits with 0 has not failed, so remove it"
CONTAINER_RULE = (
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
    """The exit code is one of values."""
    NOT_IN = "NotIn"
    """The exit code is none of them, and not 0."""


class OnExitCodes(SpecPart):
    """Exit codes of containers; 0 never matches."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {"rule": "self.operator != 'In' || !(0 in self.values)", "message": ZERO_RULE, "fieldPath": ".values"}
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


class OnPodCondition(SpecPart):
    """A condition in the status of the pod that failed."""

    type: str = Field(min_length=1, max_length=316)
    """Type of the condition, as in DisruptionTarget."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Status that it has, in quotes."""


class Rule(SpecPart):
    """What is done about failures of one kind."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": (
                        "[has(self.onExitCodes), has(self.onPodReasons), has(self.onPodConditions)]"
                        ".exists_one(given, given)"
                    ),
                    "message": CRITERION_RULE,
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


class PerReplica(SpecPart):
    """How often one replica may be restarted."""

    limit: int = Field(default=5, ge=0, le=1000)
    """Restarts that a replica may use within windowSeconds; onExhausted says what the failure after that does."""
    window_seconds: int = Field(default=3600, ge=1, le=30 * 24 * 3600)
    """Length of the sliding window in seconds; restarts before it are forgiven, so that a run of months is not failed
    by what happened weeks ago."""


class JobBudget(SpecPart):
    """How often the replicas of a job may be restarted, all of them together."""

    limit: int = Field(ge=0, le=10_000)
    """Restarts that all replicas together may use within windowSeconds; the failure after that fails the job."""
    window_seconds: int = Field(default=3600, ge=1, le=30 * 24 * 3600)
    """Length of the sliding window in seconds."""


class OnExhausted(StrEnum):
    """What the failure does that comes after a replica has used its budget."""

    ABANDON_REPLICA = "AbandonReplica"
    """The others train on without it, as long as minReplicas of them can; otherwise the job fails."""
    FAIL_JOB = "FailJob"
    """The job fails."""


BACKOFF_RULE = "backoff.maxSeconds is below backoff.initialSeconds: raise maxSeconds or lower initialSeconds"


class Backoff(SpecPart):
    """How long a replica waits before it is restarted again; the first restart after a stable time does not wait."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    # The API server also tries the rule on the empty default, before the fields have theirs.
                    "rule": "!has(self.initialSeconds) || self.initialSeconds <= self.maxSeconds",
                    "message": BACKOFF_RULE,
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


class FailurePolicy(SpecPart):
    """What happens when a replica fails."""

    rules: tuple[Rule, ...] = Field(
        default=(),
        strict=False,
        max_length=MAX_RULES,
        json_schema_extra={
            "x-kubernetes-validations": [
                {"rule": "self.all(a, self.exists_one(b, b.name == a.name))", "message": RULE_NAMES_RULE}
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
    in_place: InPlace | None = None
    """When set, even to {}, a replica of which a training process crashed is restarted in the pods that it has, the
    first time; if it fails again before it was stable, and for whatever else befalls it, its pods are replaced. Pods
    are always replaced where unset. Needs the command of the first container in the template: what the image would
    run by itself cannot be known."""
