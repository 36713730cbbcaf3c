"""Whether the coordinator could hear the others: only then does their silence speak against them.

A coordinator that was stopped, whose machine slept, or whose node was cut off hears nobody, and that is nobody's
failure. The store tells it whether it is connected: it is asked when somebody has been silent for half of the silence
timeout, again when for all of it, and before anybody is given up for not coming back. So nobody is taken out for being
away unless the store has answered in the middle of it and at its end.

A store on the same machine answers always. So a coordinator that hears nobody at all waits, whatever its store says,
for as long as one that was restarted: to take out everybody is the end of the run's state.

In doubt the clock by which others are judged stands still. After it everybody is given another silence timeout: who has
noticed that the connection is gone takes seconds to find the way back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from fthsdp.coordinator.facts import Peer

__all__ = ["Doubt"]

PROMPT = 0.5
"""Seconds within which a store that can be reached answers. A doubt that is over as soon is none."""


@dataclass(slots=True, kw_only=True)
class Doubt:
    """Tells the time by which others are judged, and when they may be. Times are in seconds."""

    silence_timeout: float
    return_timeout: float
    """For how long nobody at all may be heard until that is believed."""
    real: float
    """The time at the newest event."""
    _lost: float = 0.0
    """How much of it did not count."""
    _since: float | None = None
    """The real time at which the present doubt began."""
    _deaf_since: float | None = None
    """The real time since when nobody is heard."""
    _asked: float = field(init=False)
    """When the store was asked last, by the time that counts."""
    _unanswered: bool = False
    _patient_until: float = field(init=False)
    """Until then, by the time that counts, nobody is judged for being away."""

    def __post_init__(self) -> None:
        """Begin without a doubt."""
        self._asked = self._patient_until = self.real

    @property
    def now(self) -> float:
        """The time that counts."""
        return self.real - self._lost

    @property
    def over(self) -> bool:
        """Whether who is away may be judged for it now."""
        return self._since is None and self.now >= self._patient_until

    def pass_time(self, real: float) -> None:
        """Move the clock."""
        passed, self.real = real - self.real, real
        stood_still = passed > self.silence_timeout / 2
        if stood_still or self._since is not None:
            self._lost += passed
        if stood_still:
            self._deaf_since = None
        if stood_still or (self._since is not None and real - self._since > PROMPT):
            self._be_patient()

    def look(self, peers: Collection[Peer]) -> bool:
        """Take in who is there; return whether the store is to be asked."""
        marks = {self._patient_until, *(mark for peer in peers for mark in self._marks(peer))}
        asks = not self._unanswered and any(self._asked < mark <= self.now for mark in marks)
        if asks:
            self._asked, self._unanswered = self.now, True
        if not (self._is_deaf(peers) or self._unanswered):
            self._since = None
        elif self._since is None:
            self._since = self.real
        return asks

    def answered(self) -> None:
        """Take in that the store has answered."""
        self._unanswered = False

    def _marks(self, peer: Peer) -> tuple[float, ...]:
        """When it has to be known whether this one could be heard."""
        if peer.deadline is not None:
            return (peer.deadline,)
        return peer.heard + self.silence_timeout / 2, peer.heard + self.silence_timeout

    def _is_deaf(self, peers: Collection[Peer]) -> bool:
        """Whether nobody is heard of those who were, and it is too early to believe that."""
        known = [peer for peer in peers if peer.greeted]
        heard = any(p.connection is not None and self.now - p.heard < self.silence_timeout / 2 for p in known)
        if heard or all(peer.may_go for peer in known):
            self._deaf_since = None
            return False
        if self._deaf_since is None:
            self._deaf_since = self.real
        if self.real - self._deaf_since >= self.return_timeout:
            return False
        if all(peer.connection is None for peer in known):
            self._be_patient()  # all at once: it is rather the coordinator that was away
        return True

    def _be_patient(self) -> None:
        self._patient_until = self.now + self.silence_timeout
