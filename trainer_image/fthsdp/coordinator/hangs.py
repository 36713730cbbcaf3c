"""Who holds up a step that does not end, although everybody is alive.

``diagnose`` is a function of what the ranks say about themselves. A replica *waits* when all its ranks have handed over
everything of the step. Evidence against a replica is one of

- a rank of it that is elsewhere (in the body, in an update, or gives no answer) while others have waited for it for a
  long time: it *never joined* the collective;
- a rank that has not followed the others into the epoch that was decided: it *did not move*;
- no answer to a probe at all, where others answered.

When everybody is in the body, the step is just long. When all who have not got beyond a step wait in it, nobody is to
blame: new rings cost nothing.

``HangWatch`` knows when to ask, and when the answers are complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fthsdp.coordinator.messages import EpochRecord, Member, MemberState, Phase, RankReport
from fthsdp.coordinator.stacks import place, waits_for_others

__all__ = ["Diagnosis", "HangWatch", "diagnose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the answers to a probe show."""

    step: int
    """The step that does not end."""
    hung: Mapping[int, str]
    """By replica, the evidence against it."""
    joined: bool
    """Everybody has joined the step or got beyond it, and nobody is to blame."""
    summary: str
    """Where everybody is."""


def diagnose(
    states: Mapping[int, MemberState],
    *,
    members: Mapping[int, Member],
    record: EpochRecord,
    probe: int,
    patience: float,
) -> Diagnosis:
    """Judge the answers to ``probe``: all there are once everybody had the time to answer.

    ``members`` are those in the rings, ``record`` is the current epoch; who has made others wait for less than
    ``patience`` seconds may still be on its way.
    """
    reports = {r: _reports(members[r], states[r]) for r in members if states[r].probe >= probe}
    mute = [r for r in members if r not in reports]
    joined = {r: ranks for r, ranks in reports.items() if all(rank.phase.waits for rank in ranks)}
    hung = {r: f"replica {r} does not answer where its ranks are" for r in mute if reports}
    awaited = _awaited_step({r: joined[r] for r in joined if _is_witness(r, states[r], record, joined[r], patience)})
    for replica, ranks in reports.items():
        absent = [rank for rank in ranks if not rank.phase.waits and awaited is not None and rank.step <= awaited]
        told = record.member(replica) is not None
        behind = [rank for rank in ranks if told and rank.phase.waits and _is_behind(rank, record, reports)]
        for guilty, words in ((absent, _absent), (behind, _behind)):
            if guilty and replica not in hung:
                # In a forward that hangs in one rank the others wait for it, in the body as well.
                guilty.sort(key=lambda rank: waits_for_others(rank.stack))
                hung[replica] = _evidence(replica, guilty, words(guilty[0]))
    step = min((rank.step for ranks in reports.values() for rank in ranks), default=0)
    lagging = [rank for ranks in reports.values() for rank in ranks if rank.step == step]
    return Diagnosis(
        step=step,
        hung=hung,
        joined=not (hung or mute) and all(r.phase.waits and r.seconds >= patience for r in lagging),
        summary="; ".join(_where(r, reports.get(r, ())) for r in sorted(members)),
    )


def _reports(member: Member, state: MemberState) -> tuple[RankReport, ...]:
    """One report of each rank; those that are missing are unknown."""
    told = {report.rank: report for report in state.ranks}
    step = 0 if state.step is None else state.step + 1
    unknown = RankReport(rank=0, epoch=state.epoch, step=step, phase=Phase.UNKNOWN, seconds=0.0)
    return tuple(told.get(rank, unknown.model_copy(update={"rank": rank})) for rank in range(len(member.addresses)))


def _is_witness(
    replica: int, state: MemberState, record: EpochRecord, ranks: tuple[RankReport, ...], patience: float
) -> bool:
    """Whether its waiting says something about those it waits for.

    A shadow, and an active without samples in this step, have no body to run through and wait for as long as it takes.
    """
    has_body = replica in record.active and (state.begun is None or replica in state.begun.replicas)
    return has_body and min(rank.seconds for rank in ranks) >= patience


def _awaited_step(witnesses: Mapping[int, tuple[RankReport, ...]]) -> int | None:
    """The step that all witnesses wait for at least."""
    return min((rank.step for ranks in witnesses.values() for rank in ranks), default=None)


def _is_behind(rank: RankReport, record: EpochRecord, reports: Mapping[int, tuple[RankReport, ...]]) -> bool:
    """Whether it still waits in an epoch that was replaced by a decision, while somebody has entered the new one."""
    entered = any(other.epoch >= record.number for ranks in reports.values() for other in ranks)
    return record.outcome is not None and rank.epoch < record.number and entered


def _absent(rank: RankReport) -> str:
    match rank.phase:
        case Phase.BODY:
            return f"never joined the collective of step {rank.step}: it has been in the body for {rank.seconds:.0f} s"
        case Phase.UPDATE:
            where = f"in the update of step {rank.step} for {rank.seconds:.0f} s"
            return f"never joined the next collective: it has been {where}"
        case _:
            return "never joined the collective: it does not answer its leader"


def _behind(rank: RankReport) -> str:
    return f"did not move: it still waits in epoch {rank.epoch} ({rank.phase} of step {rank.step})"


def _evidence(replica: int, guilty: list[RankReport], words: str) -> str:
    more = f" (and {len(guilty) - 1} more of its ranks)" if len(guilty) > 1 else ""
    where = place(guilty[0].stack)
    stack = f", at {where}" if where else ""
    return f"replica {replica} rank {guilty[0].rank}{more} {words}{stack}"


def _where(replica: int, ranks: tuple[RankReport, ...]) -> str:
    places = Counter((rank.phase, rank.step) for rank in ranks)
    words = [f"{count} in {phase} of step {step}" for (phase, step), count in sorted(places.items())]
    return f"replica {replica}: {', '.join(words) or 'no answer'}"


# --- when to ask ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class HangWatch:
    """Watches whether steps end. Times are in seconds, on the clock that ``look`` is given."""

    stall_timeout: float
    answer_timeout: float
    now: float
    number: int = 0
    """Newest probe."""
    _marks: object = None
    _moved: float = field(init=False)
    """When something moved last."""
    _asked: float | None = None
    """When the newest probe was sent, while its answers are awaited."""
    _again: float = 0.0
    """Not before this is there to be another probe."""

    def __post_init__(self) -> None:
        """Begin to watch."""
        self._moved = self.now

    @property
    def asking(self) -> bool:
        """Whether answers to the newest probe are awaited."""
        return self._asked is not None

    def rest(self, now: float) -> None:
        """Nothing is expected to move: there is no epoch, it is paused, or the coordinator decides."""
        self._marks, self._moved, self._asked, self._again = None, now, None, now

    def look(
        self,
        states: Mapping[int, MemberState],
        *,
        members: Mapping[int, Member],
        connected: Mapping[int, float],
        record: EpochRecord,
        now: float,
    ) -> Diagnosis | None:
        """Begin a probe when it is time for one, and return what it has shown once everybody could answer it.

        ``connected`` says since when each member has its connection.
        """
        marks = record.number, tuple((r, m.attempt, states[r].step, states[r].epoch) for r, m in members.items())
        if marks != self._marks:
            self.rest(now)
            self._marks = marks
        elif self._asked is not None:
            missing = [r for r in members if states[r].probe < self.number]
            # Who came back in between has to be given its time, too.
            if all(now - max(self._asked, connected.get(r, now)) >= self.answer_timeout for r in missing):
                patience = self.stall_timeout / 2
                self._asked, self._again = None, now + patience
                return diagnose(states, members=members, record=record, probe=self.number, patience=patience)
        elif now >= max(self._moved + self.stall_timeout, self._again):
            self.number = max(self.number, *(s.probe for s in states.values())) + 1
            self._asked = now
        return None
