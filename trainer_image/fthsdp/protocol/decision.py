"""What a replica waits for from the coordinator, and the answer as its leader shares it with all ranks."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from fthsdp.coordinator.messages import EpochRecord
from fthsdp.protocol.leader import Leader

__all__ = ["Decision", "Over", "Wanted", "decision"]


class Over(Exception):
    """There is nothing more to do for this replica: the run is finished, or it was let go at a boundary."""

    def __init__(self, *, finished: bool) -> None:
        super().__init__()
        self.finished = finished


class Wanted(StrEnum):
    """Which epoch a replica waits for."""

    JOIN = "join"
    """One that takes a newcomer in."""
    INSTALL = "install"
    """One that the coordinator made of a broken one."""


class Decision(BaseModel):
    """The leader's answer; empty when there was none in the time that was given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    record: EpochRecord | None = None
    closed: int | None = None
    """The last step of the run: it is final."""
    bye: bool = False
    """This replica is let go."""
    refused: str = ""
    """Why the coordinator turns this replica away."""


def decision(leader: Leader, wanted: Wanted, after: int) -> Decision | None:
    """Return what the leader knows that ends a wait for an epoch newer than ``after``, or None."""
    if leader.refused is not None:
        return Decision(refused=leader.refused)
    if leader.closed is not None:
        return Decision(closed=leader.closed)
    if leader.bye:
        return Decision(bye=True)
    record = leader.to_join(after) if wanted is Wanted.JOIN else leader.to_install(after)
    return None if record is None else Decision(record=record)
