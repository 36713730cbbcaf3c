"""Whether the coordinator could hear the others: only then does their silence speak against them.

A coordinator that was stopped, whose machine slept, or whose node was cut off hears nobody, and that is nobody's
failure. Its store tells it whether it is connected. It is asked when somebody has been silent for half of the silence
timeout, again when for all of it, and before anybody is given up for not coming back: who is taken out for being away
was away while the store answered, in the middle of that time and at its end.

A store on the same machine always answers. So a coordinator that hears nobody at all waits for as long as one that was
restarted, whatever its store says: to take out everybody is the end of the run's state.

In doubt the clock by which others are judged stands still. After it they have the time that they need to come back,
unless it was so short that it may just have been the store's pace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median_low

from fthsdp.coordinator.facts import Peer
from fthsdp.timeouts import TIMEOUTS

__all__ = ["Doubt"]

PROMPT = 0.2
"""Seconds. An answer that came so soon was not lost on its way: kernels do not send again before that."""
ANSWERS = 5
"""Of so many the pace of a store is taken, so that one that was late does not count."""
ODD = 1.5 * TIMEOUTS["heartbeat_interval"].default
"""Seconds without a word of a leader that are no silence yet, however short the silence timeout is."""


@dataclass(slots=True, kw_only=True)
class Doubt:
    """Tells the time by which others are judged, and when they may be. Times are in seconds."""

    silence_timeout: float
    return_timeout: float
    """How long to hear nobody before that is believed, and how long to wait for the others after having been away."""
    real: float
    """The time at the newest event."""
    _lost: float = 0.0
    """How much of it does not count."""
    _since: float | None = None
    """The real time at which the present doubt began."""
    _deaf_since: float | None = None
    """The real time since when nobody is heard, and the store answers."""
    _asked: float = field(init=False)
    """When the store was asked last, by the time that counts."""
    _unanswered_since: float | None = None
    """The same by the real time, until it has answered."""
    _patient_until: float = field(init=False)
    """Until then, by the time that counts, nobody is judged for being away."""
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=ANSWERS))
    """How long the store took for its newest answers."""

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
        away = passed if stood_still else 0.0 if self._since is None else real - self._since
        if stood_still:
            self._deaf_since = None
        if away:
            self._lost += passed
        if away > self._prompt:
            self._be_patient(away)

    def look(self, peers: Collection[Peer]) -> bool:
        """Take in who is there; return whether the store is to be asked."""
        marks = {self._patient_until, *(mark for peer in peers for mark in self._marks(peer))}
        asks = self._unanswered_since is None and any(self._asked < mark <= self.now for mark in marks)
        if asks:
            self._asked, self._unanswered_since = self.now, self.real
        if self._waits_for_anybody(peers) or self._unanswered_since is not None:
            self._since = self.real if self._since is None else self._since
        else:
            self._since = None
        return asks

    def answered(self) -> None:
        """Take in that the store has answered."""
        if self._unanswered_since is not None:
            took = self.real - self._unanswered_since
            if took > self._prompt:
                self._deaf_since = None  # it could hear nobody until now
            self._took.append(took)
        self._unanswered_since = None

    def _marks(self, peer: Peer) -> tuple[float, ...]:
        """When it has to be known whether this one could be heard."""
        if peer.deadline is not None:
            return (peer.deadline,)
        return peer.heard + self._oddly_long, peer.heard + self.silence_timeout

    @property
    def _prompt(self) -> float:
        """Seconds within which an answer says nothing: that of a store that is always slow was not lost on its way."""
        pace = median_low(self._took) if self._took else 0.0
        return max(PROMPT, min(2 * pace, self.silence_timeout))

    @property
    def _oddly_long(self) -> float:
        return max(self.silence_timeout / 2, ODD)

    def _waits_for_anybody(self, peers: Collection[Peer]) -> bool:
        """Whether nobody is heard of those who were, and it is too early to believe that."""
        known = [peer for peer in peers if peer.greeted]
        heard = any(p.connection is not None and self.now - p.heard < self._oddly_long for p in known)
        if heard or all(peer.may_go for peer in known):
            self._deaf_since = None
            return False
        if self._deaf_since is None:
            self._deaf_since = self.real
        if self.real - self._deaf_since >= self.return_timeout:
            self._patient_until = self.now
            return False
        self._be_patient()
        return True

    def _be_patient(self, away: float = 0.0) -> None:
        """Give the others time. Who hears nothing for a silence timeout has to find the way again, like at a start."""
        patience = self.silence_timeout if away < self.silence_timeout else self.return_timeout
        self._patient_until = max(self._patient_until, self.now + patience)
