"""What the coordinator and the leaders (and the operator) say to each other, and the epoch record.

Every message is a frozen pydantic model with a literal ``kind``; ``parse_…`` turns a received frame into one of them
and refuses everything else. Step numbers count applied updates: "at step n" means that updates 1 … n are in the state.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fthsdp.errors import WireError

__all__ = [
    "LONGEST_STACK",
    "Announce",
    "Assigned",
    "Break",
    "Bye",
    "CatchingUp",
    "Cause",
    "Close",
    "Crash",
    "EpochRecord",
    "Exited",
    "FromCoordinator",
    "Go",
    "Hello",
    "Install",
    "JoinRecord",
    "Member",
    "MemberState",
    "Outcome",
    "Phase",
    "Probe",
    "RankReport",
    "Recorded",
    "Records",
    "RefusedMember",
    "ReplicaStatus",
    "Role",
    "State",
    "Status",
    "StatusRequest",
    "StepRecord",
    "ToCoordinator",
    "Verdict",
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
    addresses: tuple[str, ...] = ()
    """host:port of each rank's endpoint, by rank; empty where they are known from elsewhere (``AddressBook``)."""


class Assigned(_Model):
    """The active replicas, in order, among which the samples of ``step`` were dealt where the step first began."""

    step: int
    replicas: tuple[int, ...]
    wanted: int = 0
    """``EpochRecord.wanted`` of the epoch in which the step first began."""
    survivors: tuple[tuple[int, ...], ...] = ()
    """After each retry that lost somebody: who of ``replicas`` was left, oldest first. With a constant batch those
    take over what the others would have contributed."""


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
    wanted: int = 0
    """Active replicas to aim at when it was made."""
    paused: bool = False
    """Fewer active members than minReplicas: settle the outcome, keep the state, begin no step, wait for the next."""
    outcome: Outcome | None = None
    """None: planned, it begins at the boundary that the rings agree on. Else it begins at ``outcome.step``."""
    snapshots: tuple[int, ...] = ()
    """Shadows for which every donor copies its stripe at the boundary where this epoch begins for all."""

    def member(self, replica: int) -> Member | None:
        """Return the entry of a replica, or None."""
        return next((m for m in self.members if m.replica == replica), None)

    def with_addresses(self, addresses_of: Callable[[Member], tuple[str, ...]]) -> EpochRecord:
        """Return the same epoch with other addresses of its members."""
        members = tuple(m.model_copy(update={"addresses": addresses_of(m)}) for m in self.members)
        return self.model_copy(update={"members": members})

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of the active replicas, in ring order."""
        return tuple(m.replica for m in self.members if m.role is Role.ACTIVE)


class Phase(StrEnum):
    """Where a rank's training thread is."""

    BODY = "body"
    """In the user's code of a step: forward, backward, loading data."""
    COLLECTIVE = "collective"
    """It has handed over everything of the step and waits for its rail's ring."""
    VOTE = "vote"
    """It waits for the other ranks of its replica."""
    UPDATE = "update"
    """It applies a step, loads a state or replays."""
    WAITING = "waiting"
    """It waits for a decision of the coordinator, or for what it fetches from another replica."""
    UNKNOWN = "unknown"
    """It did not tell its leader."""

    @property
    def waits(self) -> bool:
        """Whether it has done its part, and others have to do theirs."""
        return self in (Phase.COLLECTIVE, Phase.VOTE, Phase.WAITING)


LONGEST_STACK = 4096
"""Characters of a stack that travel."""


class RankReport(_Model):
    """Where one rank is, as it answers a probe."""

    rank: int
    epoch: int
    """Newest epoch whose rings it has entered; 0 for none."""
    step: int
    """The step that it works on: the one after the last that it applied, or the one that it applies."""
    phase: Phase
    seconds: float
    """For how long it has been in this phase."""
    stack: str = Field(default="", max_length=LONGEST_STACK)
    """Of its training thread, the innermost frame last; empty where nobody could tell. A leader sends those of the
    first few ranks that do not wait: a replica can have thousands."""


class CatchingUp(_Model):
    """How far a shadow is on its way to the present."""

    since: int
    """The step after which its stripes are taken."""
    at: int
    """The last step that it keeps, or has replayed."""
    donors: tuple[int, ...]
    """Replicas that it still downloads from; none once every rank has its stripes."""


class MemberState(_Model):
    """Everything that a decision needs to know of a member.

    A leader sends all of it whenever something in it changes, and once per second. Nothing is an event that could be
    lost with a connection: what counts is the newest state.
    """

    epoch: int = 0
    """Newest epoch that all its ranks have entered; 0 for none."""
    connected: int = 0
    """Newest announced epoch whose rings all its ranks have; 0 for none."""
    fence: int = 0
    """It commits nothing in any epoch up to this number."""
    step: int | None = None
    """Last step applied; None while it has no full state (a shadow that still downloads or replays)."""
    begun: Assigned | None = None
    """The step it is in, and under which list that step began; None between steps and in a shadow."""
    serves: bool = False
    """It holds the reduced gradients of ``step`` (or ``step`` is 0) and can be the source of a roll-forward."""
    base: int = 0
    """Epoch at whose beginning the stripes were taken that a shadow downloads or has; 0 for none."""
    catching_up: CatchingUp | None = None
    """How far it is with them; None in a member with a full state."""
    broken: int = 0
    """Newest epoch of which one of its rings broke; 0 for none."""
    suspects: tuple[int, ...] = ()
    """Replicas on the other side of the connections that broke in that epoch."""
    reason: str = ""
    """What broke, in words."""
    leaving: str = ""
    """Why it asks to leave at the next boundary; empty when it does not."""
    finished: int | None = None
    """The last step of the run, once it is final."""
    origin: str = ""
    """Hex digest, over all ranks, of the state from which a newcomer could start a run; empty while it is not known."""
    checkpoint: int = 0
    """Step of that state: the newest whole checkpoint that it can read; 0 when there is none."""
    failed: str = ""
    """Why this replica ends itself, the cause first (``StateDiverged: …``); empty when it does not."""
    probe: int = 0
    """Newest probe that is answered by ``ranks``; 0 for none."""
    ranks: tuple[RankReport, ...] = ()
    """Where each rank was then, those that did not tell as ``unknown``; empty again once a step has ended."""


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
    outcome: Literal["normal", "retried", "rolled-forward"]
    trained: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of all samples of the step, of every contributor: the others may not live to tell. Empty where
    they are not known (a shadow)."""
    returned: tuple[tuple[int, int], ...] = ()
    """Half-open ranges that wait to be dealt again after this step; as ``trained``."""


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
    """It talks, but a rank of it does not take part: it does not answer, does not connect, or never joined a step."""
    REPLACED = "Replaced"
    """A newer attempt of the same replica said hello."""
    STATE_DIVERGED = "StateDiverged"
    """It said that its state is not that of the others, and ends itself."""
    FROZEN = "Frozen"
    """Its leader said that one of its ranks gives no sign of life."""
    FAILED = "Failed"
    """It said why it ends itself, and it is none of the causes that have a name here."""
    ORPHANED = "Orphaned"
    """Nobody with a state was left from whom it could catch up."""


# --- leader → coordinator -------------------------------------------------------------------------------------------


class Hello(_Model):
    """First message of a leader, and again after each reconnection."""

    kind: Literal["hello"] = "hello"
    replica: int
    attempt: int
    addresses: tuple[str, ...]
    state: MemberState = MemberState()
    times: dict[str, float] = {}
    """The times in seconds that its ranks go by, named as in ``fthsdp.timeouts``, as far as they can be set."""


class State(_Model):
    """Where the member stands now."""

    kind: Literal["state"] = "state"
    state: MemberState


class Records(_Model):
    """Final steps and finished joins, oldest first; sent again after a reconnection until ``Recorded`` answers."""

    kind: Literal["records"] = "records"
    steps: tuple[StepRecord, ...] = ()
    joins: tuple[JoinRecord, ...] = ()


# --- coordinator → leader -------------------------------------------------------------------------------------------


class Welcome(_Model):
    """The answer to ``Hello``."""

    kind: Literal["welcome"] = "welcome"


class RefusedMember(_Model):
    """The answer to a ``Hello`` that is turned away for good: exit."""

    kind: Literal["refused-member"] = "refused-member"
    reason: str


class Recorded(_Model):
    """One ``Records`` has arrived: its newest step (0 without any) and its number of joins."""

    kind: Literal["recorded"] = "recorded"
    step: int
    joins: int


class Announce(_Model):
    """Connect the rings of this epoch in the background and say so in ``MemberState.connected``."""

    kind: Literal["announce"] = "announce"
    record: EpochRecord


class Go(_Model):
    """Everybody is connected: put this number into the next header, so that the rings agree where it begins."""

    kind: Literal["go"] = "go"
    epoch: int


class Break(_Model):
    """The fence: commit nothing in any epoch up to this number, and answer with a state that has this fence."""

    kind: Literal["break"] = "break"
    epoch: int


class Probe(_Model):
    """No step ends: answer soon, with a state that has this number, where each of your ranks is."""

    kind: Literal["probe"] = "probe"
    number: int


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


class Crash(_Model):
    """How the command of a pod ended whose container still runs: its launcher says so."""

    pod: int
    """Index of the pod inside its replica."""
    exit_code: int
    """128 + n for signal n."""
    words: str = Field(default="", max_length=LONGEST_STACK)
    """The last ones on its standard error."""
    oom_killed: bool = False
    """The kernel has killed it, since the container had no memory left."""


class Exited(_Model):
    """A pod or process of this replica's attempt is gone or going: do not wait for it."""

    kind: Literal["exited"] = "exited"
    replica: int
    attempt: int
    reason: str
    detected: float
    """Unix time in seconds."""
    final: bool = False
    """No other attempt of this replica follows: a run that begins does not wait for one."""
    crash: Crash | None = None
    """From a launcher: what it has to say to the operator, which asks for verdicts."""


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
    """Last step applied; None while it has no full state."""


class Verdict(_Model):
    """An attempt that was taken out although its processes may still be there: whoever started it has to end it."""

    replica: int
    attempt: int
    cause: Cause
    reason: str
    crash: Crash | None = None
    """With the cause ``Exited``: the pod's container waits to be told what to run next."""


class Status(_Model):
    """What the coordinator knows of the job. Fields that a newer one has are passed over."""

    model_config = ConfigDict(extra="ignore")

    kind: Literal["status"] = "status"
    epoch: int
    paused: bool
    finished: bool
    step: int
    """Newest final step."""
    loss: float | None
    samples_per_second: float | None = None
    """Over the newest steps; 0 while none ends, None before there are two."""
    effective_training_time: float | None = None
    """As the newest report has it."""
    replicas: tuple[ReplicaStatus, ...]
    verdicts: tuple[Verdict, ...] = ()
    """The newest of each replica: silent, hung, frozen, or out because it said so."""
    abandoned: tuple[int, ...] = ()
    """Replicas of which no other attempt is expected."""


ToCoordinator = Annotated[Hello | State | Records | Exited | StatusRequest, Field(discriminator="kind")]
FromCoordinator = Annotated[
    Welcome | RefusedMember | Recorded | Announce | Go | Break | Probe | Install | Close | Bye | Status,
    Field(discriminator="kind"),
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
