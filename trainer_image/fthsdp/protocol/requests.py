"""What a rank's step loop asks of whoever runs it: requests that wait, and a body that does not.

``StepLoop`` yields a request wherever time may pass. Its runner answers with what the request's docstring names. What
takes no time (closing a header, applying an update, telling the leader) the loop does directly on its ``Body``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fthsdp.coordinator.messages import Assigned, EpochRecord
from fthsdp.data.sampler import SamplerState
from fthsdp.protocol.ballot import Ballot
from fthsdp.protocol.decision import Wanted
from fthsdp.protocol.header import Header, Opening
from fthsdp.protocol.leader import Effect, Leader

__all__ = [
    "Attempt",
    "AwaitDecision",
    "AwaitOpening",
    "AwaitRecord",
    "AwaitRing",
    "AwaitVote",
    "Body",
    "Download",
    "Downloaded",
    "Fetch",
    "KeptStep",
    "LoadCheckpoint",
    "Reduced",
    "Request",
    "Steps",
]

_T = TypeVar("_T")

# --- what is passed around ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What the ring of one rail made of a step."""

    step: int
    gradients: Any
    """As the body keeps them: one flat fp32 tensor per bucket."""
    headers: tuple[bytes, ...]
    assigned: Assigned


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """One committed step: what its update is computed from."""

    reduced: Reduced
    total_samples: int
    norm_squared: float
    epoch: int


class Downloaded(Protocol):
    """All stripes of one boundary."""

    @property
    def step(self) -> int:
        """The step after which the stripes were taken."""

    @property
    def sampler(self) -> Any:
        """The sampler's state there, as JSON."""

    @property
    def bytes(self) -> int:
        """How much was fetched."""


class Download(Protocol):
    """A download in the background."""

    def result(self) -> Any:
        """Return a ``Downloaded`` once everything is there, else None."""

    def cancel(self) -> None:
        """End it."""


class Attempt(Protocol):
    """This rank's gradients of one step on their way through the rings."""

    @property
    def step(self) -> int:
        """Number of the step."""

    @property
    def shadow(self) -> bool:
        """Whether this member only listens."""

    def close(self, header: Header) -> None:
        """Say that nothing more will come, and send the header."""

    def again(self, heard: int) -> None:
        """Submit the same gradients and header to the rings that are active now, with this newest epoch number."""

    def reopen(self) -> None:
        """Take further gradients of the same step, to be added to those at hand."""


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitRing:
    """The ring's result of an attempt → ``Reduced``, or None when the ring broke.

    ``spare_time`` is called while it waits; it returns whether it found something to do.
    """

    attempt: Attempt
    assigned: Assigned
    spare_time: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class AwaitOpening:
    """All members have entered the epoch that the body entered last → their openings, or None when its ring broke."""


@dataclass(frozen=True, slots=True)
class AwaitVote:
    """Every rank of the replica has said this much → ``Tally``."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class AwaitDecision:
    """The coordinator's decision → ``Decision``; an empty one after ``patience`` seconds (None: for ever)."""

    wanted: Wanted
    after: int
    patience: float | None = None


@dataclass(frozen=True, slots=True)
class AwaitRecord:
    """The record of an announced epoch whose number came round the ring → ``EpochRecord``.

    It is there already, unless this replica is one that leaves: whoever stays has connected an epoch before it begins.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """A step's outcome from the same rank of another replica → ``Reduced``, or None when it cannot be had there."""

    replica: int
    address: str
    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class LoadCheckpoint:
    """Make the checkpoint of this step the state → ``SamplerState``, as it was then."""

    step: int


Request = LoadCheckpoint | AwaitRing | AwaitOpening | AwaitVote | AwaitDecision | AwaitRecord | Fetch
Steps = Generator[Request, Any, _T]
"""A part of the loop: it yields requests, is sent their answers, and returns a value."""

# --- the body -------------------------------------------------------------------------------------------------------


class Body(Protocol):
    """What the loop works on at one rank. Nothing here waits."""

    # the leader, which lives at rank 0

    def tell(self, event: Callable[[Leader], list[Effect]]) -> None:
        """Give the leader an event and carry out its effects; nothing on the other ranks."""

    def begins_vote(self, epoch: int) -> tuple[bool, int]:
        """At rank 0: whether the leader may commit in this epoch, and its fence. Elsewhere (True, 0)."""

    # rings

    @property
    def heard(self) -> int:
        """Newest epoch that may begin at the next boundary; 0 for none."""

    def enter(self, record: EpochRecord, opening: Opening) -> None:
        """Move to the rings of this epoch, and say there where we stand."""

    def openings(self) -> tuple[Opening, ...] | None:
        """Return what all members said when this epoch opened; None while it is not known, or was never all said."""

    def attempt(self, step: int, *, shadow: bool) -> Attempt:
        """Begin to collect this rank's gradients of a step."""

    # the state

    def digest(self) -> int:
        """Return 64 bits over this rank's state."""

    def norm_squared(self, reduced: Reduced) -> float:
        """Return the squared norm of this rank's reduced gradients if the update wants it, else 0."""

    def update(self, kept: KeptStep, lr_factor: float) -> None:
        """Apply one step: the only place where the state moves, live and in replay."""

    def download(self, donors: Mapping[int, str], epoch: int) -> Download:
        """Begin to fetch the stripes of this epoch from these donors (replica to address of the same rank there)."""

    def load(self, downloaded: Any) -> None:
        """Make what was downloaded the state."""

    def recycle(self, reduced: Reduced) -> None:
        """Nobody needs these gradients any more."""

    # what others may fetch here, and what outlives all

    def offer_outcome(self, reduced: Reduced) -> None:
        """Offer the outcome of the newest step; it replaces that of the step before."""

    def offer_stripe(self, shadow: int, epoch: int, *, part: int, parts: int, step: int, sampler: SamplerState) -> None:
        """Have this donor's part of the state copied before the next update, and offer it to a shadow."""

    def keep_stripes_of(self, shadows: list[int], epoch: int) -> None:
        """Drop the stripes for all others."""

    def newest_checkpoint(self) -> tuple[int, str] | None:
        """Return step and digest of the newest whole checkpoint that can be read here; None when there is none."""

    def checkpoint(self, step: int, sampler: SamplerState) -> None:
        """This replica is the one that writes checkpoints: begin one of the state after ``step`` if one is due."""

    def last_checkpoint(self, step: int, sampler: SamplerState) -> None:
        """Nobody stays after ``step``, and this replica is the one that writes checkpoints: write one, due or not."""

    def final(self, step: int) -> None:
        """This step can no longer be undone."""
