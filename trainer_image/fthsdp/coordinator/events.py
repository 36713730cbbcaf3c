"""What goes into the membership state machine and what comes out of it.

Events in: ``Received``, ``Disconnected``, ``messages.Exited``, ``StoreAnswered``, ``Tick``. Effects out, to be
executed in their order; what follows a ``Persist`` waits until the store has it. The effects from ``Fenced`` on change
nothing outside: they tell the log and the run record what happened.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fthsdp import timeouts
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.messages import Cause, EpochRecord, Exited, FromCoordinator, Hello, State
from fthsdp.errors import ConfigError

__all__ = [
    "AskStore",
    "Decided",
    "Disconnected",
    "Drop",
    "Effect",
    "Event",
    "Fenced",
    "Finished",
    "Left",
    "MembershipSettings",
    "Persist",
    "Proposed",
    "Received",
    "Removed",
    "Send",
    "Stalled",
    "Started",
    "StoreAnswered",
    "Tick",
    "Withdrawn",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    """Sizes and patience of one job's membership. All times are in seconds."""

    replicas: int
    """Active replicas to aim at."""
    min_replicas: int
    """Active replicas below which no step is begun."""
    spares: int = 0
    """Replicas beyond these that are kept as shadows, ready to step in."""
    start_timeout: float = 600.0
    """How long the first epoch waits for all replicas before min_replicas suffice. Image pulls take minutes."""
    silence_timeout: float = 5.0
    """A leader says something each second; after this long without a word it is taken out."""
    return_timeout: float = 30.0
    """How long a coordinator that was restarted or cut off waits for the members it knows, one that hears nobody for
    anybody; never less than silence_timeout. Its pod may be another one, and its name lead to the address of the old
    one for some seconds; to give up all who look for it there would be the end of the run."""
    reconnect_grace: float = 1.0
    """How long a leader whose connection closed may take to come back: a hiccup is no reason to lose a replica."""
    answer_timeout: float = 10.0
    """How long a member that talks may leave a fence unanswered. Only a rank that hangs takes longer than seconds."""
    connect_timeout: float = 60.0
    """How long a planned epoch waits for its rings. Covers several attempts of 10 s to connect one."""
    stall_timeout: float = 300.0
    """After so long without the end of any step, the ranks are asked where they are. Who has kept the others waiting
    for half of it is taken out."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}: a job has at least 1")
        if not 1 <= self.min_replicas <= self.replicas:
            raise ConfigError(
                f"min-replicas is {self.min_replicas}: it must be between 1 and replicas ({self.replicas})"
            )
        if self.spares < 0:
            raise ConfigError(f"spares is {self.spares}: it cannot be negative")
        for name, seconds in self.times.items():
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"{name.replace('_', '-')} is {seconds:g} s: it must be a number and not negative")
        timeouts.check(self.times)

    @property
    def longest_return(self) -> float:
        """How long a member is waited for while it may be the coordinator that was away."""
        return max(self.return_timeout, self.silence_timeout)

    @property
    def times(self) -> dict[str, float]:
        """All times, by their names in ``fthsdp.timeouts``."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in timeouts.TIMEOUTS}


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A leader said something on this connection."""

    connection: int
    replica: int
    attempt: int
    message: Hello | State


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """A connection on which a leader had said hello is closed."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswered:
    """The store has answered what was asked last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Nothing happened but time. Wanted at least once a second."""


Event = Received | Disconnected | Exited | StoreAnswered | Tick


# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Store this before doing anything that follows, if the stored number is still ``expected`` (0: nothing stored)."""

    ledger: Ledger
    expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStore:
    """Find out, beside everything else, whether the store can be reached; ``StoreAnswered`` says so when it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Say this to a leader on this connection, if that is still open."""

    connection: int
    replica: int
    attempt: int
    message: FromCoordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Close this connection after what was sent on it."""

    connection: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A decision is needed; everything up to this epoch is fenced."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A replica was taken out, with this evidence."""

    replica: int
    attempt: int
    cause: Cause
    reason: str
    member: bool
    """False: it was not part of any epoch yet, so nobody was disturbed."""
    detected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """No step ends, and this is where everybody is."""

    step: int
    """The one that does not end."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A replica left as it had asked."""

    replica: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """This epoch follows, with an outcome; None: nobody with a state is left, the job starts again."""

    record: EpochRecord | None
    stepped_in: tuple[int, ...] = ()
    """Shadows that are active from this decision on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The epoch just decided is the run's first one, or the first one after everything was lost."""

    epoch: int
    step: int
    """Of the checkpoint that the run begins from; 0 when it begins from the initial weights."""
    replicas: tuple[int, ...]
    """Those who train in it. The state of the lowest is everybody's."""
    replaced: tuple[int, ...]
    """Whose own state was another one: other initial weights, or an older checkpoint or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """This planned epoch was announced."""

    record: EpochRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """A planned epoch was dropped before it could begin; nobody was disturbed."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All members have finished the run, whose last step this is."""

    step: int


Effect = (
    Persist
    | AskStore
    | Send
    | Drop
    | Fenced
    | Removed
    | Stalled
    | Left
    | Decided
    | Started
    | Proposed
    | Withdrawn
    | Finished
)
