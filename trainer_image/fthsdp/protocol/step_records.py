"""What a leader publishes: a record of each step once it is final, and of each finished catch-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fthsdp.coordinator.messages import JoinRecord, Role, StepRecord
from fthsdp.environment import Identity
from fthsdp.protocol.ballot import Tally
from fthsdp.protocol.header import Flag, Header
from fthsdp.protocol.requests import KeptStep
from fthsdp.ranges import Range

__all__ = ["Ending", "Recorder", "Trained"]

Ending = Literal["normal", "retried", "rolled-forward"]
Publish = Callable[[StepRecord | JoinRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a step did to the samples."""

    own: tuple[Range, ...]
    """This replica's."""
    all: tuple[Range, ...]
    """Of all contributors."""
    returned: tuple[Range, ...]
    """Waiting to be dealt again after it."""


class Recorder:
    """Holds each step's record back until the step after it is prepared: then it is final."""

    def __init__(
        self, identity: Identity, *, started: float, publish: Publish | None, clock: Callable[[], float]
    ) -> None:
        """``started`` is the Unix time of this process's start; ``publish`` is None on all ranks but the leader."""
        self._identity = identity
        self._clock = clock
        self._started = started
        self._publish = publish
        self._began = started
        self._pending: StepRecord | None = None
        self._bytes = 0
        self._replayed = 0
        self.on_final: Callable[[StepRecord], None] | None = None
        """Called on the leader, in the training thread, with each final step."""

    def began(self) -> None:
        """The body of the next step begins (or a shadow joins its collective)."""
        self._began = self._clock()

    def committed(self, kept: KeptStep, tally: Tally, ending: Ending, *, role: Role, trained: Trained | None) -> None:
        """A step was committed, so the one before it is final. ``trained`` is not known while catching up."""
        if self._publish is None:
            return
        headers = [Header.unpack(data) for data in kept.reduced.headers]
        self._publish_pending(tally, before=kept.reduced.step)
        self._pending = StepRecord(
            replica=self._identity.replica,
            attempt=self._identity.attempt,
            step=kept.reduced.step,
            epoch=kept.epoch,
            role=role,
            began=self._began,
            ended=self._clock(),
            samples=trained.own if trained else (),
            trained=trained.all if trained else (),
            returned=trained.returned if trained else (),
            contributors=tuple(h.replica for h in headers if Flag.CONTRIBUTES in h.flags),
            total_samples=kept.total_samples,
            loss=tally.sum("loss_sum") / kept.total_samples if kept.total_samples else None,
            digest="",
            outcome=ending,
        )

    def closed(self, tally: Tally, *, step: int) -> None:
        """The round after the last step was committed."""
        self._publish_pending(tally, before=step)

    def left(self, *, step: int) -> None:
        """All leave after ``step``: it is final, although no step after it says so."""
        self._publish_pending(None, before=step + 1)

    def _publish_pending(self, tally: Tally | None, *, before: int) -> None:
        record, self._pending = self._pending, None
        if self._publish is None or record is None or record.step != before - 1:
            return
        # The digest of the state after a step rides in the headers of the step after it.
        if tally is not None and all(ballot.digest for ballot in tally.ballots):
            record = record.model_copy(update={"digest": tally.digest})
        self._publish(record)
        if self.on_final is not None:
            self.on_final(record)

    def caught_up(self, downloaded: int, replayed: int) -> None:
        """This replica has the state of the others; it can become active."""
        self._bytes, self._replayed = downloaded, replayed

    def promoted(self, step: int) -> None:
        """This replica becomes active at the boundary after ``step``."""
        if self._publish is not None:
            self._publish(
                JoinRecord(
                    replica=self._identity.replica,
                    attempt=self._identity.attempt,
                    started=self._started,
                    active=self._clock(),
                    first_step=step + 1,
                    bytes=self._bytes,
                    replayed_steps=self._replayed,
                )
            )
