"""What happens to replicas that run when their template is changed."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from fthsdp_operator.api.names import MAX_REPLICAS
from fthsdp_operator.api.parts import SpecPart

__all__ = ["RECREATE_RULE", "UpdatePolicy", "UpdateType"]

RECREATE_RULE = (
    "updatePolicy.type Recreate takes all replicas away at once, and the training state with them: set checkpoint, or"
    " type Rolling or OnRestart"
)


class UpdateType(StrEnum):
    """How running replicas get a changed template."""

    ON_RESTART = "OnRestart"
    """Each with its next restart, whatever that is for."""
    ROLLING = "Rolling"
    """One after the other, at step boundaries; the others train on."""
    RECREATE = "Recreate"
    """All at once, from their checkpoint."""


class UpdatePolicy(SpecPart):
    """What happens to replicas that run when the template is changed."""

    type: UpdateType = Field(default=UpdateType.ROLLING, strict=False)
    """Rolling replaces one replica after the other while the rest train; Recreate takes all away at a step boundary
    and starts them again from the checkpoint written there; OnRestart waits until a replica restarts anyway."""
    max_unavailable: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Under Rolling, replicas that may be away at a time, those included that are away for other reasons. minReplicas
    holds all the same."""
    min_ready_steps: int = Field(default=3, ge=0, le=1_000_000)
    """Under Rolling, steps that a replica has to train with the new template before it counts as back, and the next one
    goes: the first may crash, and whether its result agrees with that of the others is known in the second. 0: as soon
    as it trains. A spare counts as back when it is ready."""
