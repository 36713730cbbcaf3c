"""What the coordinator and the leaders (and the operator) say to each other, and the epoch record.

Every message is a frozen pydantic model with a literal ``kind``; ``parse`` turns a received frame into one of them and
refuses everything else. Step numbers count applied updates: "at step n" means that updates 1 … n are in the state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fthsdp.errors import WireError

__all__ = [
    "Announce",
    "Assigned",
    "Break",
    "Broken",
    "Bye",
    "Close",
    "Connected",
    "Cause",
    "Entered",
    "EpochRecord",
    "Exited",
    "Finished",
    "FromCoordinator",
    "Go",
    "Heartbeat",
    "Hello",
    "Install",
    "JoinRecord",
    "Leaving",
    "Member",
    "MemberState",
    "Outcome",
    "Ready",
    "Records",
    "RefusedMember",
    "ReplicaStatus",
    "Report",
    "Role",
    "Status",
    "StatusRequest",
    "StepRecord",
    "ToCoordinator",
    "Welcome",
    "parse_from_coordinator",
    "parse_to_coordinator",
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- the epoch record -----------------------------------------------------------------------------------------------


class Role(StrEnum):
    """What a member does in the rings of an epoch."""

    ACTIVE = "active"
    """Contributes gradients."""
    SHADOW = "shadow"
    """Contributes nothing, receives every reduced gradient, catches up."""


class Member(_Model):
    """One replica in an epoch."""

    replica: int
    attempt: int
    role: Role
    addresses: tuple[str, ...]
    """host:port of each rank's endpoint, by rank."""


class Assigned(_Model):
    """The active replicas, in order, among which the samples of ``step`` were dealt where the step first began."""

    step: int
    replicas: tuple[int, ...]


class Outcome(_Model):
    """How an epoch made after a broken ring (or the first one) decides the step in flight."""

    step: int
    """The last step that counts. A member at this step goes on; one behind rolls forward; one ahead starts over."""
    source: int | None = None
    """Replica that serves the reduced gradients of ``step``; None when everybody is at it."""
    serving: bool = True
    """False when no member that can serve is left: whoever is not exactly at ``step`` starts over."""
    assigned: Assigned | None = None
    """The list under which step ``step + 1`` had begun, when it had."""


class EpochRecord(_Model):
    """One numbered membership. Persisted before anybody hears of it."""

    number: int
    members: tuple[Member, ...]
    """In ring order."""
    paused: bool = False
    """Fewer active members than minReplicas: settle the outcome, keep the state, begin no step, wait for the next."""
    outcome: Outcome | None = None
    """None: planned, it begins at the boundary that the rings agree on. Else it begins at ``outcome.step``."""
    snapshots: tuple[int, ...] = ()
    """Shadows for which every donor copies its stripe at the boundary where this epoch begins for all."""

    def member(self, replica: int) -> Member | None:
        """Return the entry of a replica, or None."""
        return next((m for m in self.members if m.replica == replica), None)

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of the active replicas, in ring order."""
        return tuple(m.replica for m in self.members if m.role is Role.ACTIVE)


class MemberState(_Model):
    """Where a member stands; what a decision is made from."""

    epoch: int = 0
    """Newest epoch it has entered; 0 for none."""
    fence: int = 0
    """It commits nothing in any epoch up to this number."""
    step: int | None = None
    """Last step applied; None while it has no full state (a shadow)."""
    begun: Assigned | None = None
    """The step it is in, and under which list that step began."""
    serves: bool = False
    """It holds the reduced gradients of ``step`` (or ``step`` is 0) and can be the source of a roll-forward."""
    broken: bool = False
    """Its rings are down: it waits for a decision."""


# --- records of what happened ---------------------------------------------------------------------------------------


class StepRecord(_Model):
    """One final step as one replica saw it."""

    replica: int
    attempt: int
    step: int
    epoch: int
    role: Role
    began: float
    """Unix time in seconds at which the step's body began (for a shadow: at which it joined the collective)."""
    ended: float
    """Unix time in seconds at which the update was applied."""
    samples: tuple[tuple[int, int], ...]
    """Half-open ranges of sample numbers that this replica contributed."""
    contributors: tuple[int, ...]
    total_samples: int
    loss: float | None
    """Mean over all samples of the step."""
    digest: str
    """Of the state after this step, over all ranks of the replica; empty where it is not known (a shadow)."""
    outcome: Literal["normal", "retried", "rolled-forward", "replayed"]


class JoinRecord(_Model):
    """One finished catch-up."""

    replica: int
    attempt: int
    started: float
    """Unix time in seconds at which the process started."""
    active: float
    """Unix time in seconds at which it became active."""
    first_step: int
    """First step it contributed to."""
    bytes: int
    """Downloaded, all ranks together."""
    replayed_steps: int


class Cause(StrEnum):
    """Why a member was taken out."""

    EXITED = "Exited"
    CONNECTION_LOST = "ConnectionLost"
    SILENT = "Silent"
    HUNG = "Hung"
    DIVERGED = "StateDiverged"
    REPLACED = "Replaced"
    """A newer attempt of the same replica said hello."""


# --- leader → coordinator -------------------------------------------------------------------------------------------


class Hello(_Model):
    """First message of a leader, and again after each reconnection."""

    kind: Literal["hello"] = "hello"
    replica: int
    attempt: int
    addresses: tuple[str, ...]
    state: MemberState = MemberState()


class Heartbeat(_Model):
    """Once per second: alive, and how far."""

    kind: Literal["heartbeat"] = "heartbeat"
    state: MemberState


class Connected(_Model):
    """All ranks of the replica have their rings of this announced epoch."""

    kind: Literal["connected"] = "connected"
    epoch: int


class Entered(_Model):
    """All ranks of the replica have begun this epoch, at this step."""

    kind: Literal["entered"] = "entered"
    epoch: int
    step: int


class Broken(_Model):
    """A ring of this epoch broke."""

    kind: Literal["broken"] = "broken"
    epoch: int
    suspects: tuple[int, ...] = ()
    """Replicas on the other side of the connections that failed."""
    reason: str = ""


class Report(_Model):
    """The answer to ``Break``."""

    kind: Literal["report"] = "report"
    state: MemberState


class Ready(_Model):
    """A shadow has the full state and can become active."""

    kind: Literal["ready"] = "ready"
    step: int


class Leaving(_Model):
    """The replica asks to leave at a boundary, and stays until then."""

    kind: Literal["leaving"] = "leaving"
    reason: str


class Records(_Model):
    """Final steps since the last message, and finished joins."""

    kind: Literal["records"] = "records"
    steps: tuple[StepRecord, ...] = ()
    joins: tuple[JoinRecord, ...] = ()


class Finished(_Model):
    """The last step is final."""

    kind: Literal["finished"] = "finished"
    step: int


# --- coordinator → leader -------------------------------------------------------------------------------------------


class Welcome(_Model):
    """The answer to ``Hello``."""

    kind: Literal["welcome"] = "welcome"
    silence_timeout: float


class RefusedMember(_Model):
    """The answer to a ``Hello`` that is turned away for good: exit."""

    kind: Literal["refused-member"] = "refused-member"
    reason: str


class Announce(_Model):
    """Connect the rings of this epoch in the background and say ``Connected``."""

    kind: Literal["announce"] = "announce"
    record: EpochRecord


class Go(_Model):
    """Everybody is connected: put this number into the next header, so that the rings agree where it begins."""

    kind: Literal["go"] = "go"
    epoch: int


class Break(_Model):
    """The fence: commit nothing in any epoch up to this number, and report."""

    kind: Literal["break"] = "break"
    epoch: int


class Install(_Model):
    """Enter this epoch as its outcome says."""

    kind: Literal["install"] = "install"
    record: EpochRecord


class Close(_Model):
    """Somebody saw that the last step is final: so it is for you."""

    kind: Literal["close"] = "close"
    step: int


class Bye(_Model):
    """Everybody has finished; exit 0."""

    kind: Literal["bye"] = "bye"


# --- operator (or local launcher) ↔ coordinator ----------------------------------------------------------------------


class Exited(_Model):
    """A pod or process of this replica's attempt is gone or going: do not wait for it."""

    kind: Literal["exited"] = "exited"
    replica: int
    attempt: int
    reason: str
    detected: float
    """Unix time in seconds."""


class StatusRequest(_Model):
    """Answered with ``Status``."""

    kind: Literal["status-request"] = "status-request"


class ReplicaStatus(_Model):
    """What the coordinator knows of one replica."""

    replica: int
    attempt: int
    role: Role | None
    """None: it said hello and is not yet a member."""
    step: int | None
    connected: bool


class Status(_Model):
    """What the coordinator knows of the job."""

    kind: Literal["status"] = "status"
    epoch: int
    paused: bool
    finished: bool
    step: int
    """Newest final step."""
    loss: float | None
    replicas: tuple[ReplicaStatus, ...]


ToCoordinator = Annotated[
    Hello | Heartbeat | Connected | Entered | Broken | Report | Ready | Leaving | Records | Finished | Exited
    | StatusRequest,
    Field(discriminator="kind"),
]
FromCoordinator = Annotated[
    Welcome | RefusedMember | Announce | Go | Break | Install | Close | Bye | Status, Field(discriminator="kind")
]
_to_coordinator: TypeAdapter[ToCoordinator] = TypeAdapter(ToCoordinator)
_from_coordinator: TypeAdapter[FromCoordinator] = TypeAdapter(FromCoordinator)


def parse_to_coordinator(frame: dict[str, Any]) -> ToCoordinator:
    """Validate a frame that the coordinator received; raises WireError."""
    return _parse(_to_coordinator, frame)


def parse_from_coordinator(frame: dict[str, Any]) -> FromCoordinator:
    """Validate a frame that a leader or the operator received; raises WireError."""
    return _parse(_from_coordinator, frame)


_T = TypeVar("_T")


def _parse(adapter: TypeAdapter[_T], frame: dict[str, Any]) -> _T:
    try:
        return adapter.validate_python(frame)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "message"
        raise WireError(f"not a message of this protocol: {where}: {first['msg']}") from error
