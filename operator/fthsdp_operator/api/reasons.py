"""The words by which conditions and events say why, each with what it means. Any other word is a type error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

__all__ = ["REASONS", "ConditionReason", "ConditionType", "EndReason", "EventReason", "FailReason", "meanings"]

ConditionType: TypeAlias = (
    Annotated[Literal["Accepted"], "The operator can do what the spec says."]
    | Annotated[Literal["Available"], "At least `minReplicas` replicas train."]
    | Annotated[Literal["Progressing"], "A changed template is on its way to the replicas."]
    | Annotated[Literal["Degraded"], "The job has begun, and fewer replicas train than are wanted."]
    | Annotated[Literal["Stalled"], "What the job needs is refused, or does not come by itself; what runs goes on."]
    | Annotated[Literal["Suspended"], "`spec.suspend` is true, and all pods are deleted."]
    | Annotated[Literal["Complete"], "The run is finished. This never changes again."]
    | Annotated[Literal["Failed"], "The job is not restarted any more. This never changes again."]
)
"""One aspect of a job each."""

_AcceptedReason: TypeAlias = (
    Annotated[Literal["Valid"], "Nothing is wrong with the spec."]
    | Annotated[Literal["InvalidSpec"], "The spec breaks a rule; what runs is left as it is."]
    | Annotated[Literal["NameTaken"], "An object that the job needs is there and is not its own; no pod is created."]
)
_AvailableReason: TypeAlias = (
    Annotated[Literal["EnoughReplicas"], "At least `minReplicas` train."]
    | Annotated[Literal["TooFewReplicas"], "Fewer than `minReplicas` train, or the job is paused, suspended or failed."]
)
_DegradedReason: TypeAlias = (
    Annotated[Literal["ReplicasMissing"], "Some of the wanted replicas do not train; the message names them."]
    | Annotated[Literal["NoneMissing"], "All wanted replicas train, or the job has not begun or is over."]
)
_StalledReason: TypeAlias = (
    Annotated[Literal["QuotaExceeded"], "A ResourceQuota is used up; the message names it."]
    | Annotated[
        Literal["CallRefused"], "The API server refuses a call, for a limit, a policy or a right that is missing."
    ]
    | Annotated[
        Literal["CoordinatorHeld"],
        "The coordinator's pod is to go and does not, so no other can be started; the message says what keeps it.",
    ]
    | Annotated[
        Literal["PodNameTaken"],
        "A pod that is not the job's has the name of one that it needs; the message says which, and what keeps it.",
    ]
    | Annotated[
        Literal["CoordinatorWaits"],
        "The coordinator's pod has not started, or not come back, for five minutes, and all replicas wait for it; the"
        " message says why.",
    ]
    | Annotated[
        Literal["BudgetNameTaken"],
        "The name of the job's PodDisruptionBudget is taken, so the job has none; the message says what to do.",
    ]
    | Annotated[Literal["ReplicasWait"], "They have for five minutes; the message says who, and for what."]
    | Annotated[Literal["NobodyWaits"], "Nothing was refused, and no replica waits for so long."]
)
_SuspendedReason: TypeAlias = (
    Annotated[Literal["SuspendIsTrue"], "`spec.suspend` says so."]
    | Annotated[Literal["SuspendIsFalse"], "`spec.suspend` says so."]
)
_RollReason: TypeAlias = (
    Annotated[
        Literal["RollStalled"], "A replica does not come up with the changed template; the others are left alone."
    ]
    | Annotated[Literal["NoRoom"], "As many replicas train as `minReplicas` asks for, so none can be replaced."]
)
_ProgressingReason: TypeAlias = (
    Annotated[Literal["UpToDate"], "All replicas run the template as it is."]
    | Annotated[Literal["Rolling"], "Replicas get the changed template one after the other."]
    | Annotated[Literal["Recreating"], "All replicas stop, to start again with the changed template."]
    | Annotated[Literal["OnRestart"], "Replicas get the changed template when they restart."]
    | Annotated[Literal["NotRunning"], "The job is suspended, or over."]
    | _RollReason
)
_NotEnded: TypeAlias = Annotated[Literal["NotEnded"], "The job has not ended in this way."]
_CompleteReason: TypeAlias = Annotated[Literal["RunFinished"], "All training pods have ended, as they should."]
FailReason: TypeAlias = (
    Annotated[Literal["FailedByRule"], "A rule of `failurePolicy` with action FailJob matched."]
    | Annotated[Literal["AbandonedByRule"], "A rule abandoned a replica, and fewer than `minReplicas` were left."]
    | Annotated[Literal["ConfigError"], "A replica ended with exit code 2 before the first step: its input is wrong."]
    | Annotated[Literal["CodeFault"], "Many replicas failed in the same way at once: it is the code that they share."]
    | Annotated[Literal["RestartBudgetExhausted"], "A replica failed after all restarts of `failurePolicy.perReplica`."]
    | Annotated[Literal["ReplicasUnfinished"], "The run is over, and some failed (`success.policy` All)."]
    | Annotated[Literal["DeadlineExceeded"], "The job has not ended within `deadlines.activeSeconds`."]
    | Annotated[Literal["JobBudgetExhausted"], "A replica failed after all restarts of `failurePolicy.job`."]
)
"""Why a job fails."""
EndReason: TypeAlias = _CompleteReason | FailReason
"""Why a job is over."""
ConditionReason: TypeAlias = (
    _AcceptedReason
    | _AvailableReason
    | _ProgressingReason
    | _DegradedReason
    | _StalledReason
    | _SuspendedReason
    | _NotEnded
    | EndReason
)

REASONS: Mapping[ConditionType, Any] = {
    "Accepted": _AcceptedReason,
    "Available": _AvailableReason,
    "Progressing": _ProgressingReason,
    "Degraded": _DegradedReason,
    "Stalled": _StalledReason,
    "Suspended": _SuspendedReason,
    "Complete": _CompleteReason | _NotEnded,
    "Failed": FailReason | _NotEnded,
}
"""The reasons of each condition."""

EventReason: TypeAlias = (
    Annotated[Literal["Running"], "As many replicas train as are wanted."]
    | Annotated[Literal["Paused"], "Fewer than `minReplicas` train; the others keep their state and wait."]
    | Annotated[Literal["Suspended"], "`spec.suspend` is true: all pods are deleted."]
    | Annotated[Literal["ReplicaActive"], "A replica trains."]
    | Annotated[Literal["SpareReady"], "A spare has the state, and can take over."]
    | Annotated[Literal["ReplicaFailed"], "A replica failed, why, and when its next attempt starts."]
    | Annotated[Literal["ReplicaMoved"], "A replica leaves an ill or cordoned node at a step boundary."]
    | Annotated[Literal["NodeAvoided"], "New pods keep away from a node, and why."]
    | Annotated[Literal["ReplicaAbandoned"], "A replica failed and is not restarted; the others train on."]
    | Annotated[Literal["ReplicaReplaced"], "A replica gets the changed template."]
    | Annotated[Literal["RolledOut"], "All replicas run the changed template."]
    | _RollReason
    | Annotated[Literal["StateLost"], "The job was suspended without a checkpoint: it begins anew."]
    | Annotated[Literal["CoordinatorReplaced"], "The coordinator's pod was lost, and another one created."]
    | Annotated[Literal["CoordinatorHeld"], "The coordinator's pod does not go, so no other one can be started."]
    | Annotated[Literal["PodNameTaken"], "A pod that is not the job's has the name of one that it needs."]
    | Annotated[Literal["CoordinatorWaits"], "The coordinator's pod does not start; the message says why."]
    | Annotated[Literal["Questionable"], "Something in the spec is allowed and most likely not meant."]
    | Annotated[Literal["CallFailed"], "The API server did not do what the operator asked for; it is tried again."]
    | EndReason
)


def meanings(words: Any) -> dict[str, str]:
    """Return each word of one of these types with what it means."""
    if get_origin(words) is Annotated:
        ((word,), meaning) = get_args(get_args(words)[0]), words.__metadata__[0]
        return {word: meaning}
    return {word: meaning for each in get_args(words) for word, meaning in meanings(each).items()}
