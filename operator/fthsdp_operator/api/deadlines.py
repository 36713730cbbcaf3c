"""What a user says about time: how long a replica may take to start, and a job to end."""

from __future__ import annotations

from pydantic import Field

from fthsdp_operator.api.parts import SpecPart

__all__ = ["FORCE_RULE", "Deadlines"]

FORCE_RULE = (
    "deadlines.terminationSeconds says when pods are removed by force, which nodePolicy.forceDelete does not allow: set"
    " that to true, or remove terminationSeconds"
)
_MONTH = 30 * 24 * 3600


class Deadlines(SpecPart):
    """How long things may take, in seconds. They are counted by the operator's clock, from when it sees them begin."""

    schedule_seconds: int | None = Field(default=None, ge=10, le=_MONTH)
    """A replica fails (Unschedulable, at no cost) when one of its pods has found no node for so long: it gives back the
    nodes that its other pods hold, and waits longer each time. One that holds none just waits on, unless a rule of
    failurePolicy says otherwise. Pods with scheduling gates are not counted. Unset: it waits for ever."""
    start_seconds: int = Field(default=1800, ge=10, le=_MONTH)
    """A replica fails (StartTimeout) when all its pods have run for so long and the coordinator, which answers, does
    not know it; and when a container has been kept from starting for so long, by an image that cannot be had
    (ImagePullFailed) or by its settings. Neither a first pull is counted, however long it takes, nor a sidecar
    that crashes."""
    active_seconds: int | None = Field(default=None, ge=1, le=365 * 24 * 3600)
    """The job fails (DeadlineExceeded) so long after its startTime, when a replica trained for the first time. Unset:
    it takes as long as it takes."""
    termination_seconds: int | None = Field(default=None, ge=1, le=_MONTH)
    """With nodePolicy.forceDelete: a pod that is still there so long after its grace period is removed by force
    whatever its node says, as where a kubelet cannot unmount a volume. Unset: only on nodes that are not Ready."""
