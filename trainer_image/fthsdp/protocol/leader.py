"""What the leader of a replica knows and promises: a pure state machine.

A leader (rank 0) stands between the coordinator and the ranks of its replica. Events come from three sides: messages
of the coordinator, notices of the ranks, and the training thread at the seams of a step. Each returns effects for the
shell to carry out; nothing here does I/O, reads a clock or waits.

The one promise that everything rests on is the fence. After ``Break(E)`` is answered, this replica commits nothing in
any epoch up to E and enters none of them. The answer is given between votes, never during one: a vote that has begun
may still commit, so the answer waits for its end. In the meantime the ranks cancel their rings, so that the vote does
end. Nor is it given before every rank has said that it did cancel: a replica of which a rank does not move has nothing
to promise, and is taken out for its silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fthsdp.coordinator.messages import (
    Announce,
    Break,
    Bye,
    Close,
    EpochRecord,
    FromCoordinator,
    Go,
    Install,
    MemberState,
    Probe,
    RankReport,
    RefusedMember,
)
from fthsdp.coordinator.stacks import waits_for_others

__all__ = ["AskRanks", "Cancel", "Connect", "Effect", "Heard", "Leader", "TellCoordinator"]


@dataclass(frozen=True, slots=True)
class TellCoordinator:
    """Send the newest state now."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Let every rank connect its ring of this epoch in the background."""

    record: EpochRecord


@dataclass(frozen=True, slots=True)
class Heard:
    """Let every rank put this epoch number into its next header."""

    epoch: int


@dataclass(frozen=True, slots=True)
class AskRanks:
    """Ask every rank where it is, and call ``probe_over`` a little later, whoever has answered by then."""

    probe: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Let every rank close its rings of all epochs up to this one."""

    up_to: int


_PATIENCE = 3
"""Silence timeouts after which a rank is frozen although nobody waits for it: a long import can hold up all threads."""
_STACKS = 4
"""Stacks that go to the coordinator: of thousands of ranks, the first that do not wait tell enough."""

Effect = TellCoordinator | Connect | Heard | Cancel | AskRanks


class Leader:
    """The leader's side of the step protocol."""

    def __init__(self, *, replica: int, world_size: int) -> None:
        self.replica = replica
        self.world_size = world_size
        self.state = MemberState()
        self.announced: dict[int, EpochRecord] = {}
        """Announced epochs that may still begin, by number."""
        self.install: EpochRecord | None = None
        """Newest epoch to enter after a broken ring (or at the start)."""
        self.closed: int | None = None
        """The last step of the run, once somebody saw that it is final."""
        self.bye = False
        self.refused: str | None = None
        self._connected: dict[int, set[int]] = {}
        self._voting = False
        self._asked = 0
        self._cancelled = 0
        self._cancelled_by = dict.fromkeys(range(world_size), 0)
        self._owing: set[int] = set()
        """Ranks that have not yet cancelled what the newest fence asks for."""
        self._broken_ahead: dict[int, tuple[int | None, str]] = {}
        """Breaks of epochs that the ranks entered before the leader did, by epoch."""
        self._asking = 0
        self._reports: dict[int, RankReport] = {}

    # --- the coordinator speaks

    def hear(self, message: FromCoordinator) -> list[Effect]:
        """Take in a message of the coordinator."""
        match message:
            case Announce(record=record):
                return self._announce(record)
            case Go(epoch=epoch):
                return [Heard(epoch)] if epoch in self.announced and epoch > self._asked else []
            case Break(epoch=epoch):
                return self._break(epoch)
            case Install(record=record):
                return self._install(record)
            case Probe(number=number):
                return self._probe(number)
            case Close(step=step):
                self.closed = step
            case Bye():
                self.bye = True
            case RefusedMember(reason=reason):
                self.refused = reason
        return []

    def _announce(self, record: EpochRecord) -> list[Effect]:
        number = record.number
        if number <= max(self.state.epoch, self._asked) or number in self.announced:
            return [TellCoordinator()]
        effects: list[Effect] = []
        if not self.state.epoch and self.announced:
            # A joiner waits in the ring of the proposal that this one replaces: let go of it.
            effects.append(self._cancel(max(self.announced)))
        self.announced = {n: r for n, r in self.announced.items() if n > self.state.epoch} | {number: record}
        return [*effects, Connect(record)]

    def _break(self, epoch: int) -> list[Effect]:
        self._asked = max(self._asked, epoch)
        self._owing = {rank for rank, up_to in self._cancelled_by.items() if up_to < self._asked}
        self.announced = {n: r for n, r in self.announced.items() if n > self._asked}
        return [self._cancel(self._asked)]

    def _install(self, record: EpochRecord) -> list[Effect]:
        if record.number <= max(self.state.epoch, self._asked) or record.member(self.replica) is None:
            return []
        if self.install is not None and record.number <= self.install.number:
            return []
        self.install = record
        return [Connect(record)]

    # --- the ranks speak

    def ring_connected(self, rank: int, epoch: int) -> list[Effect]:
        """A rank has both neighbours of this epoch's ring."""
        ranks = self._connected.setdefault(epoch, set())
        ranks.add(rank)
        if len(ranks) < self.world_size or epoch <= self.state.connected:
            return []
        self._connected = {n: r for n, r in self._connected.items() if n > epoch}
        return self._change(connected=epoch)

    def ring_broken(self, epoch: int, suspect: int | None, reason: str) -> list[Effect]:
        """A ring of this epoch broke at a rank, for another reason than our own cancelling.

        The break of the epoch that is being trained in counts for more than that of one still to come.
        """
        current, broken = self.state.epoch, self.state.broken
        if epoch <= self._cancelled or epoch < current:
            return []
        if broken and epoch != current and (broken == current or epoch < broken):
            self._broken_ahead.setdefault(epoch, (suspect, reason))
            return []
        known = self.state.suspects if epoch == self.state.broken else ()
        suspects = known if suspect is None or suspect in known else (*known, suspect)
        if epoch == self.state.broken and suspects == known:
            return []
        reasons = f"{self.state.reason}; {reason}" if known else reason
        return self._change(broken=epoch, suspects=suspects, reason=reasons)

    def rings_cancelled(self, rank: int, up_to: int) -> list[Effect]:
        """A rank has cancelled its rings of all epochs up to this one."""
        self._cancelled_by[rank] = max(self._cancelled_by[rank], up_to)
        if self._cancelled_by[rank] >= self._asked:
            self._owing.discard(rank)
        return self._answer_fence()

    def reports(self, probe: int, report: RankReport) -> list[Effect]:
        """A rank says where it is."""
        if probe != self._asking or probe <= self.state.probe:
            return []
        self._reports[report.rank] = report
        return self._answer_probe() if len(self._reports) == self.world_size else []

    def probe_over(self, probe: int) -> list[Effect]:
        """Who has not said by now where it is does not say it."""
        return self._answer_probe() if probe == self._asking > self.state.probe else []

    def ranks_silent(self, seconds: Mapping[int, float], *, timeout: float) -> list[Effect]:
        """Ranks have given no sign of life for so long: end this replica when one of them stands still.

        One that owes the answer to a fence is accused by its ring's neighbours as well; else there is more patience.
        """
        for rank, silent in seconds.items():
            if silent >= timeout * (1 if rank in self._owing else _PATIENCE) and not self.state.failed:
                return self._change(failed=f"Frozen: rank {rank} gave no sign of life for {silent:.1f} s")
        return []

    def asks_to_leave(self, reason: str) -> list[Effect]:
        """A rank was told to stop."""
        return [] if self.state.leaving else self._change(leaving=reason)

    # --- the training thread speaks

    def vote_begins(self, epoch: int) -> tuple[bool, int]:
        """Return whether this replica may commit in ``epoch``, and the fence; until ``vote_ends`` a new fence waits."""
        self._voting = True
        fence = max(self._asked, self.state.fence)
        return epoch > fence, fence

    def vote_ends(self, **changes: object) -> list[Effect]:
        """Record in one go what the vote decided (fields of MemberState), and answer a fence that came meanwhile.

        A boundary at which the next epoch begins is crossed here too: the answer to the fence then says so.
        """
        self._voting = False
        if "epoch" in changes:
            self._entered(int(str(changes["epoch"])))
        turns_full = self.state.step is None and "step" in changes
        if changes:
            self.state = self.state.model_copy(update=changes)
        self._catch_up_on_breaks()
        if changes and self.state.ranks:
            self.state = self.state.model_copy(update={"ranks": ()})  # a step has ended: nobody hangs
        news = turns_full or changes.keys() & {"epoch", "finished"}
        return self._answer_fence() or ([TellCoordinator()] if news else [])

    def enters(self, epoch: int, **changes: object) -> list[Effect]:
        """All ranks have entered this epoch as its outcome says."""
        self._entered(epoch)
        effects = self._change(epoch=epoch, **changes)
        self._catch_up_on_breaks()
        return effects

    def starts_from(self, origin: str, checkpoint: int) -> list[Effect]:
        """A newcomer could start a run from this state: of a checkpoint, or its initial weights (step 0)."""
        told = (self.state.origin, self.state.checkpoint) == (origin, checkpoint)
        return [] if told else self._change(origin=origin, checkpoint=checkpoint)

    def changes(self, **changes: object) -> list[Effect]:
        """Record a change of the member's state that is worth telling."""
        return self._change(**changes)

    # --- decisions that the training thread waits for

    def to_install(self, after: int) -> EpochRecord | None:
        """Return the epoch to enter after ``after`` by decision of the coordinator, or None."""
        record = self.install
        return record if record is not None and record.number > max(after, self._asked) else None

    def to_join(self, after: int) -> EpochRecord | None:
        """Return the epoch that a newcomer can try to join, or None."""
        record = self.to_install(after)
        newest = max((n for n in self.announced if n > after), default=0)
        return record if record is not None and record.number > newest else self.announced.get(newest)

    # --- inside

    def _probe(self, number: int) -> list[Effect]:
        if number <= self._asking:
            return [TellCoordinator()]
        self._asking, self._reports = number, {}
        return [AskRanks(number)]

    def _answer_probe(self) -> list[Effect]:
        stacks = [r for _, r in sorted(self._reports.items()) if r.stack and not r.phase.waits]
        stacks.sort(key=lambda report: waits_for_others(report.stack))
        tell = {report.rank for report in stacks[:_STACKS]}
        ranks = [r if r.rank in tell else r.model_copy(update={"stack": ""}) for _, r in sorted(self._reports.items())]
        return self._change(probe=self._asking, ranks=tuple(ranks))

    def _entered(self, epoch: int) -> None:
        self.announced = {n: r for n, r in self.announced.items() if n > epoch}
        if self.install is not None and self.install.number <= epoch:
            self.install = None

    def _catch_up_on_breaks(self) -> None:
        """The leader is the last of its ranks to enter an epoch, and one of them may have seen it break already."""
        found = self._broken_ahead.pop(self.state.epoch, None)
        if found is not None:
            self.ring_broken(self.state.epoch, *found)
        self._broken_ahead = {n: broken for n, broken in self._broken_ahead.items() if n > self.state.epoch}

    def _answer_fence(self) -> list[Effect]:
        if self._voting or self.state.fence >= self._asked or self._owing:
            return []
        return self._change(fence=self._asked)

    def _cancel(self, up_to: int) -> Cancel:
        self._cancelled = max(self._cancelled, up_to)
        return Cancel(up_to)

    def _change(self, **changes: object) -> list[Effect]:
        self.state = self.state.model_copy(update=changes)
        return [TellCoordinator()]
