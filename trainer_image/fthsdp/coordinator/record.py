"""What a run leaves behind: a line per final step, and the report. Pure: records and events in, JSON out.

Words of the report. The run's clock is 0 when the first epoch began. A step of a replica is *disturbed* when it
overlaps a failure (from its detection to the decision), when it was retried or rolled forward, or when a replica was on
its way in meanwhile (from the start of its process until it was active). What a step costs normally is the median of a
replica's undisturbed steps.

A run may go on for months, and nobody waits longer for a decision because of it. So only the newest steps and events
are kept one by one; of the older ones there are sums. Where a run goes back to a step that is older than what is kept,
the samples are counted anew from there.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from fthsdp.coordinator.events import Decided, Effect, Finished, Left, Removed, Stalled, Started
from fthsdp.coordinator.messages import Cause, JoinRecord, Records, Role, StepRecord
from fthsdp.data.lanes import POSITIONS, below_first, below_last
from fthsdp.ranges import Range, count, subtract, union

__all__ = ["RunEvent", "RunRecord", "event_of"]

_T = TypeVar("_T")

FEWEST_STEPS = 3
"""Fewer steps than this have no median worth reporting."""
PACE_STEPS = 20
"""The newest steps over which the samples per second are taken."""
PACE_LOST = 5.0
"""When no step has ended for as long as this many usually take, nothing is trained."""
KEPT_LAPS = 20_000
"""Steps of replicas that are kept one by one: a report of them takes some 20 ms."""
FEWEST_KEPT = 200
"""Steps that are kept one by one, however many replicas there are."""
KEPT_EVENTS = 100
"""Failures, joins, leaves, starts and stalls of which a report tells, the newest of each."""


class RunEvent(BaseModel):
    """Something that happened to the membership."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["decided", "started", "lost-everything", "removed", "stalled", "left", "finished"]
    at: float
    """Unix time in seconds."""
    epoch: int | None = None
    step: int | None = None
    """decided: the last step that counts; started: of the checkpoint it begins from; stalled: the one that does not
    end; finished: the last step."""
    replica: int | None = None
    attempt: int | None = None
    cause: Cause | None = None
    reason: str = ""
    member: bool = True
    replicas: tuple[int, ...] = ()
    """started: those who train in the first epoch; decided: shadows that are active from then on."""
    replaced: tuple[int, ...] = ()
    """started: whose own state was not the one that the run begins from."""


def event_of(effect: Effect, at: float) -> RunEvent | None:
    """Return what of an effect belongs into the run's record; None for the rest."""
    match effect:
        case Decided(record=None):
            return RunEvent(kind="lost-everything", at=at)
        case Decided(record=record) if record is not None and record.outcome is not None:
            return RunEvent(
                kind="decided", at=at, epoch=record.number, step=record.outcome.step, replicas=effect.stepped_in
            )
        case Started():
            return RunEvent(
                kind="started",
                at=at,
                epoch=effect.epoch,
                step=effect.step,
                replicas=effect.replicas,
                replaced=effect.replaced,
            )
        case Removed():
            return RunEvent(
                kind="removed",
                at=effect.detected,
                replica=effect.replica,
                attempt=effect.attempt,
                cause=effect.cause,
                reason=effect.reason,
                member=effect.member,
            )
        case Stalled():
            return RunEvent(kind="stalled", at=at, step=effect.step, reason=effect.reason)
        case Left():
            return RunEvent(kind="left", at=at, replica=effect.replica, attempt=effect.attempt, reason=effect.reason)
        case Finished():
            return RunEvent(kind="finished", at=at, step=effect.step)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lap:
    """One step of one replica, as far as its duration matters."""

    step: int
    began: float
    ended: float
    outcome: str
    counts: bool = True
    """False: the run has started again from an earlier step since."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def overlaps(self, span: tuple[float, float]) -> bool:
        return self.began <= span[1] and self.ended >= span[0]


@dataclass(slots=True)
class _Step:
    """What is known of one final step."""

    contributors: tuple[int, ...]
    total_samples: int
    digest: str = ""
    trained: tuple[Range, ...] = ()
    """Its samples, as far as anybody told."""
    returned: tuple[Range, ...] = ()
    """Those that waited to be dealt again after it; known when ``trained`` is."""


@dataclass(slots=True, kw_only=True)
class _Past:
    """Sums of the steps that are not kept one by one any more."""

    until: int = 0
    """The newest of them."""
    steps: int = 0
    trained: tuple[Range, ...] = ()
    dealt: int = 0
    untold: int = 0
    returned: tuple[Range, ...] = ()
    """After the newest of them that told."""
    whole: bool = False
    """Step 1 is among them."""
    first: _Step | None = None
    """The oldest that told, where step 1 is not among them."""
    useful: float = 0.0
    """Seconds of all replicas that went into final steps."""
    began: float = math.inf
    """Unix time at which the oldest of them began."""


@dataclass(slots=True, kw_only=True)
class _Join:
    record: JoinRecord
    told: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class _Failure:
    event: RunEvent
    decided: RunEvent | None = None
    told: dict[str, Any] | None = None
    """What the report says, once the steps around it are gone."""

    @property
    def settled(self) -> bool:
        return self.decided is not None or not self.event.member

    @property
    def span(self) -> tuple[float, float]:
        return self.event.at, self.decided.at if self.decided else self.event.at


class RunRecord:
    """Collects the records of one run."""

    def __init__(self, *, replicas: int, spares: int = 0) -> None:
        self._replicas = replicas
        self._spares = spares
        self._kept = max(FEWEST_KEPT, KEPT_LAPS // (replicas + spares))
        """Steps."""
        self._past = _Past()
        self._totals: Counter[str] = Counter()
        """Failures, joins, leaves, starts and stalls so far."""
        self._began: float | None = None
        self._finished: int | None = None
        self._steps: dict[int, _Step] = {}
        self._laps: dict[tuple[int, int], list[_Lap]] = defaultdict(list)
        """Steps by incarnation, in order, in the role of an active."""
        self._newest: dict[tuple[int, int], int] = {}
        self._joins: list[_Join] = []
        self._failures: list[_Failure] = []
        self._leaves: list[RunEvent] = []
        self._starts: list[RunEvent] = []
        self._stalls: list[RunEvent] = []
        self._pace: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)
        """When each of the newest steps ended, by the clock of the first who told, and its samples."""
        self._lines: dict[int, dict[str, Any]] = {}
        self._printed: int | None = None
        self._trained: tuple[Range, ...] = ()
        """Samples of the steps that have told theirs."""
        self._dealt = 0
        """Their number, repetitions included."""
        self._untold = 0
        """Samples of the other steps: nobody has recorded them but replicas that were catching up."""
        self._compared = self._mismatched = self._outcomes_differ = 0
        self.step = 0
        """Newest final step."""
        self.loss: float | None = None
        """Loss of the newest final step that has one."""

    # --- in ---------------------------------------------------------------------------------------------------------

    def note(self, event: RunEvent) -> None:
        """Take in an event."""
        match event.kind:
            case "decided":
                self._began = event.at if self._began is None else self._began
                for failure in self._failures:
                    if failure.decided is None and failure.event.member:
                        failure.decided = event
            case "removed":
                self._remember("failures", self._failures, _Failure(event=event))
            case "stalled":
                self._remember("stalls", self._stalls, event)
            case "left" if (event.replica, event.attempt) not in {(e.replica, e.attempt) for e in self._leaves}:
                # A restarted coordinator may see once more that somebody has left.
                self._remember("leaves", self._leaves, event)
            case "finished":
                self._finished = event.step
            case "started" if event.epoch not in {e.epoch for e in self._starts}:
                # A restarted coordinator tells it again as long as nobody may have heard of it.
                assert event.step is not None
                self._remember("starts", self._starts, event)
                self._forget_steps_after(event.step)

    def _remember(self, kind: str, kept: list[_T], one: _T) -> None:
        self._totals[kind] += 1
        kept.append(one)
        del kept[:-KEPT_EVENTS]

    def add(self, records: Records) -> Records:
        """Take in what a leader recorded and return what of it is new: records are sent again until confirmed."""
        steps = tuple(s for s in records.steps if self._is_new(s))
        known = [join.record for join in self._joins]
        joins = tuple(join for join in records.joins if join not in known)
        for join in joins:
            self._remember("joins", self._joins, _Join(record=join))
        return Records(steps=steps, joins=joins)

    def _is_new(self, record: StepRecord) -> bool:
        incarnation = (record.replica, record.attempt)
        if record.step <= self._newest.get(incarnation, -1):
            return False
        self._newest[incarnation] = record.step
        self._take(record)
        return True

    def _take(self, record: StepRecord) -> None:
        if record.step <= self._past.until:
            return
        if len(self._steps) >= 2 * self._kept:
            self._fold()
        step = self._steps.get(record.step)
        if step is None:
            step = self._steps[record.step] = _Step(record.contributors, record.total_samples)
            self._untold += record.total_samples
        elif (step.contributors, step.total_samples) != (record.contributors, record.total_samples):
            self._outcomes_differ += 1
        self._compare(step, record)
        self._count_samples(step, record)
        if record.role is Role.ACTIVE:
            self._laps[record.replica, record.attempt].append(
                _Lap(step=record.step, began=record.began, ended=record.ended, outcome=record.outcome)
            )
            self._lines.setdefault(record.step, _line(record))
        if record.step > self.step:
            self.step = record.step
            self._pace.append((record.ended, record.total_samples))
            self.loss = self.loss if record.loss is None else record.loss
        if self._printed is None:
            self._printed = record.step - 1

    def _compare(self, step: _Step, record: StepRecord) -> None:
        if record.digest and step.digest:
            self._compared += 1
            self._mismatched += record.digest != step.digest
        step.digest = step.digest or record.digest

    def _count_samples(self, step: _Step, record: StepRecord) -> None:
        if step.trained or not record.trained:
            return
        step.trained, step.returned = record.trained, record.returned
        self._dealt += count(record.trained)
        self._untold -= step.total_samples
        self._trained = union((*self._trained, *record.trained))

    # --- what is not kept one by one --------------------------------------------------------------------------------

    def _fold(self) -> None:
        """Add up all but the newest steps."""
        normal, past = self._undisturbed(), self._past
        numbers = sorted(self._steps)
        old, kept_from = numbers[: -self._kept], numbers[-self._kept]
        laps = [lap for lap in self._all_laps() if lap.step < kept_from]
        past.useful += _useful(laps, normal)
        past.began = min([past.began, *(lap.began for lap in laps)])
        self._tell(max((lap.ended for lap in laps), default=-math.inf), normal)
        for who, each in list(self._laps.items()):
            self._laps[who] = [lap for lap in each if lap.step >= kept_from]
            if not self._laps[who]:
                del self._laps[who]
        self._add_up([self._steps.pop(number) for number in old], whole=1 in old)
        past.until = old[-1]
        self._newest = {who: step for who, step in self._newest.items() if step > past.until}

    def _add_up(self, steps: list[_Step], *, whole: bool) -> None:
        past, told = self._past, [step for step in steps if step.trained]
        past.steps += len(steps)
        past.untold += sum(step.total_samples for step in steps if not step.trained)
        past.dealt += sum(count(step.trained) for step in told)
        past.trained = union((*past.trained, *(r for step in told for r in step.trained)))
        past.whole = past.whole or whole
        if told:
            past.returned = told[-1].returned
            past.first = None if past.whole else past.first or told[0]

    def _tell(self, until: float, normal: dict[tuple[int, int], float]) -> None:
        """Say what there is to say of the failures and joins that lie before this time."""
        for failure in self._failures:
            if failure.told is None and failure.settled and failure.span[1] <= until:
                failure.told = self._failure(failure, normal)
        for join in self._joins:
            if join.told is None and join.record.active <= until:
                join.told = self._join(join.record)

    def _all_laps(self) -> list[_Lap]:
        return [lap for each in self._laps.values() for lap in each]

    def _forget_steps_after(self, last: int) -> None:
        """The run begins from this step: what was trained after it does not count."""
        if last < self._past.until:
            self._past = self._past_until(last)
        self._steps = {number: step for number, step in self._steps.items() if number <= last}
        self._lines = {number: line for number, line in self._lines.items() if number <= last}
        self._laps = defaultdict(
            list,
            {
                who: [lap if lap.step <= last else replace(lap, counts=False) for lap in laps]
                for who, laps in self._laps.items()
            },
        )
        told = [r for step in self._steps.values() for r in step.trained]
        self._trained, self._dealt = union((*self._past.trained, *told)), self._past.dealt + count(told)
        self._untold = self._past.untold + sum(s.total_samples for s in self._steps.values() if not s.trained)
        self._pace.clear()
        self.step, self.loss, self._printed = last, self.loss if self.step == last else None, last

    def _past_until(self, last: int) -> _Past:
        """What is left of the sums when the newer ones of their steps do not count: nothing is known of their samples.

        What they took is taken for an even share of what all of them did.
        """
        past = self._past
        steps = max(past.steps - (past.until - last), 0)
        return _Past(until=last, steps=steps, useful=past.useful * steps / max(past.steps, 1), began=past.began)

    # --- out --------------------------------------------------------------------------------------------------------

    def take_lines(self) -> list[dict[str, Any]]:
        """Return the lines of steps that became final since the last call, each step once, in order."""
        if len(self._lines) > self._kept:  # somebody who has trained a step did not live to tell of it
            self._printed = min(self._lines) - 1
        lines: list[dict[str, Any]] = []
        while self._printed is not None and self._printed + 1 in self._lines:
            self._printed += 1
            lines.append(self._lines.pop(self._printed))
        return lines

    def samples_per_second(self, now: float) -> float | None:
        """Return it over the newest steps; 0 while no step ends, None before there are two. ``now`` is Unix time."""
        if len(self._pace) < 2:
            return None
        first, last = self._pace[0][0], self._pace[-1][0]
        usual = (last - first) / (len(self._pace) - 1)
        if usual <= 0:
            return None
        samples = sum(samples for _, samples in self._pace) - self._pace[0][1]
        return 0.0 if now - last > max(PACE_LOST * usual, 1.0) else samples / (last - first)

    def report(self) -> dict[str, Any]:
        """Return the report as it stands. Times are in seconds."""
        normal = self._undisturbed()
        seconds, steps = sorted(lap.seconds for lap in self._all_laps()), self._past.steps + len(self._steps)
        return {
            "outcome": "running" if self._finished is None else "complete",
            "replicas": self._replicas,
            "spares": self._spares,
            "started": self._began,
            "starts": [
                {
                    "epoch": e.epoch,
                    "step": e.step,
                    "replicas": list(e.replicas),
                    "replaced": list(e.replaced),
                    "started_s": self._clock(e.at),
                }
                for e in self._starts
            ],
            "steps_final": steps,
            "effective_training_time": self._effective(normal),
            "step_seconds": {"p50": _quantile(seconds, 0.50), "p99": _quantile(seconds, 0.99)},
            "failures": [f.told or self._failure(f, normal) for f in self._failures],
            "joins": [j.told or self._join(j.record) for j in self._joins],
            "leaves": [
                {"replica": e.replica, "attempt": e.attempt, "reason": e.reason, "left_s": self._clock(e.at)}
                for e in self._leaves
            ],
            "stalls": [{"step": e.step, "reason": e.reason, "noticed_s": self._clock(e.at)} for e in self._stalls],
            "samples": self._samples(),
            "digests": {"compared": self._compared, "mismatched": self._mismatched},
            "outcomes": {"compared": steps, "mismatched": self._outcomes_differ},
            "totals": {kind: self._totals[kind] for kind in ("failures", "joins", "leaves", "starts", "stalls")},
        }

    def _clock(self, at: float) -> float | None:
        return None if self._began is None else round(at - self._began, 6)

    def _samples(self) -> dict[str, int]:
        """Samples of steps that nobody told the ranges of are taken for those that fill the holes."""
        told = [number for number, step in self._steps.items() if step.trained]
        holes = subtract(below_last(self._trained), (*self._trained, *self._trained_before(told)))
        returned = self._steps[max(told)].returned if told else self._past.returned
        pending = count(holes) - count(subtract(holes, returned))
        return {
            "trained": count(self._trained) + self._untold,
            "duplicated": self._dealt - count(self._trained),
            "missing": max(count(holes) - pending - self._untold, 0),
            "pending": pending,
        }

    def _trained_before(self, told: Sequence[int]) -> tuple[Range, ...]:
        """Samples of steps before those on record: neither trained nor waiting where the record begins."""
        first = self._past.first or (self._steps[min(told)] if told else None)
        if first is None or self._past.whole or 1 in self._steps:
            return ()
        known = (*first.trained, *first.returned)
        before = below_last(known)
        if self._trained[-1][1] > POSITIONS:  # where the other lanes of a stream were left shows when they go on
            before += below_first(subtract(self._trained, known))
        return subtract(before, known)

    def _spans(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        failures = [f.span for f in self._failures if f.event.member]
        return failures, [(join.record.started, join.record.active) for join in self._joins]

    def _undisturbed(self) -> dict[tuple[int, int], float]:
        """By incarnation, the median of its undisturbed steps; those without enough of them are missing."""
        failures, joins = self._spans()
        medians = {}
        for incarnation, laps in self._laps.items():
            quiet = _outside(_outside(laps, failures), joins)
            if len(quiet) < FEWEST_STEPS:
                quiet = _outside(laps, failures)
            if len(quiet) >= FEWEST_STEPS:
                medians[incarnation] = statistics.median(lap.seconds for lap in quiet)
        return medians

    def _failure(self, failure: _Failure, normal: dict[tuple[int, int], float]) -> dict[str, Any]:
        event = failure.event
        hit = self._laps_in_flight(failure) if event.member else {}
        stalls = [
            max(sum(lap.seconds - normal[who] for lap in laps), 0.0) for who, laps in hit.items() if who in normal
        ]
        outcomes = {lap.outcome for laps in hit.values() for lap in laps}
        return {
            "replica": event.replica,
            "attempt": event.attempt,
            "cause": str(event.cause),
            "reason": event.reason,
            "member": event.member,
            "detected_s": self._clock(event.at),
            "decided_s": self._clock(failure.decided.at) if failure.decided else None,
            "stall_s": round(statistics.median(stalls), 6) if stalls else None,
            "step_outcome": _worst(outcomes) if failure.decided else None,
            "stepped_in": list(failure.decided.replicas) if failure.decided else [],
        }

    def _laps_in_flight(self, failure: _Failure) -> dict[tuple[int, int], list[_Lap]]:
        """By survivor, the steps that were under way between detection and decision."""
        dead = (failure.event.replica, failure.event.attempt)
        return {
            who: found
            for who, laps in self._laps.items()
            if who != dead and (found := [lap for lap in laps if lap.overlaps(failure.span)])
        }

    def _join(self, join: JoinRecord) -> dict[str, Any]:
        return {
            "replica": join.replica,
            "attempt": join.attempt,
            "latency_s": round(join.active - join.started, 6),
            "active_s": self._clock(join.active),
            "first_step": join.first_step,
            "bytes": join.bytes,
            "replayed_steps": join.replayed_steps,
            "survivor_slowdown": self._slowdown(join),
        }

    def _slowdown(self, join: JoinRecord) -> float | None:
        """The survivors' median step while this replica caught up, against their median otherwise, minus one."""
        failures, joins = self._spans()
        others = [lap for who, laps in self._laps.items() if who[0] != join.replica for lap in _outside(laps, failures)]
        during = [lap.seconds for lap in others if lap.began >= join.started and lap.ended <= join.active]
        quiet = [lap.seconds for lap in _outside(others, joins)]
        if min(len(during), len(quiet)) < FEWEST_STEPS:
            return None
        return round(statistics.median(during) / statistics.median(quiet) - 1, 4)

    def _effective(self, normal: dict[tuple[int, int], float]) -> float | None:
        """The share of all replicas' time that went into final steps at the undisturbed pace."""
        laps = self._all_laps()
        if not laps or not normal or self._began is None:
            return None
        began = min(self._past.began, *(lap.began for lap in laps))
        whole = self._replicas * (max(lap.ended for lap in laps) - began)
        return round((self._past.useful + _useful(laps, normal)) / whole, 4) if whole > 0 else None


def _useful(laps: Iterable[_Lap], normal: Mapping[tuple[int, int], float]) -> float:
    """Seconds that went into steps that count, at the undisturbed pace; of a step that took longer, that part."""
    pace = statistics.median(normal.values()) if normal else math.inf
    return sum(min(lap.seconds, pace) for lap in laps if lap.counts)


def _line(record: StepRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "loss": record.loss,
        "active": len(record.contributors),
        "contributors": list(record.contributors),
        "seconds": round(record.ended - record.began, 6),
        "samples": record.total_samples,
        "epoch": record.epoch,
        "outcome": record.outcome,
    }


def _outside(laps: Iterable[_Lap], spans: Sequence[tuple[float, float]]) -> list[_Lap]:
    return [lap for lap in laps if lap.outcome == "normal" and not any(lap.overlaps(span) for span in spans)]


def _worst(outcomes: set[str]) -> str:
    return next((o for o in ("rolled-forward", "retried") if o in outcomes), "untouched")


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed (nearest rank)."""
    if not ordered:
        return None
    return round(ordered[max(0, -int(-share * len(ordered) // 1) - 1)], 6)
