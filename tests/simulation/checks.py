"""What must hold in every run, whatever happens in it; each violation says what was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fthsdp.coordinator.events import Decided, Effect, Removed, Started
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.messages import Cause, EpochRecord, MemberState, Role
from fthsdp.errors import ReplicaLost, StateDiverged
from fthsdp.protocol.requests import KeptStep
from fthsdp.protocol.step_records import Ending
from fthsdp.ranges import Range, count, subtract, union

if TYPE_CHECKING:
    from tests.simulation.replica import Gradients, Rank, Replica
    from tests.simulation.world import World

__all__ = ["Checks", "Violation"]

EXCUSED = 80.0
"""Seconds for which something that happened to a replica is evidence against it."""


class Violation(AssertionError):
    """Something that must never happen."""


class Checks:
    """Looks at everything that happens."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._records: dict[int, EpochRecord] = {}
        self._entered: dict[str, int] = {}
        self._outcomes: dict[int, Gradients] = {}
        self._committed: dict[int, Gradients] = {}
        """The newest commit of each step, final or not."""
        self._states: dict[tuple[int, int], int] = {}
        """By step and rail."""
        self._computed: Counter[tuple[str, int]] = Counter()
        self._undone: set[tuple[int, int]] = set()
        """Attempts that were taken out before the run began again: they mean one that never was."""
        self._over = False
        """A replica finished without the coordinator's knowledge, and who is left begins anew until it is ended."""
        self.history: list[str] = []
        """What happened, in words."""
        self.steps = 0
        """Steps committed, all ranks together."""
        self.endings: Counter[str] = Counter()
        self.removed: list[Removed] = []
        self.states: set[int] = set()
        """Fingerprints of the whole job, one for each commit."""

    def note(self, text: str) -> None:
        """Remember this for whoever reads a counterexample."""
        self.history.append(f"{self._world.clock.now:9.4f}  {text}")

    def fail(self, text: str) -> None:
        """Report a violation."""
        story = "\n".join(self.history[-60:])
        raise Violation(f"{text}\nat {self._world.clock.now:.4f} s of seed {self._world.seed}; before that:\n{story}")

    # --- epochs only grow, and one number means one epoch ------------------------------------------------------------

    def persists(self, store: Sequence[Ledger], ledger: Ledger, expected: int) -> None:
        """An epoch is stored before anybody hears of it, and over nothing that is newer."""
        newest = store[-1].number if store else 0
        if newest != expected:
            self.fail(f"epoch {ledger.number} is stored over {newest}, and its writer knew only {expected}")
        if ledger.number <= newest:
            self.fail(f"epoch number {ledger.number} follows {newest}")

    def enters(self, rank: Rank, record: EpochRecord) -> None:
        """A rank moves to the rings of an epoch."""
        self.note(f"{rank.label} enters epoch {record.number} at step {rank.loop.step}")
        known = self._records.setdefault(record.number, record)
        if known != record:
            self.fail(f"epoch {record.number} is two: {known} and {record}")
        before = self._entered.get(rank.label, 0)
        if record.number <= before:
            self.fail(f"{rank.label} enters epoch {record.number} after {before}")
        self._entered[rank.label] = record.number

    # --- one outcome for each step -----------------------------------------------------------------------------------

    def committed(self, rank: Rank, kept: KeptStep, ending: Ending, role: Role) -> None:
        """A rank has committed a step."""
        self.steps += 1
        self.endings[ending] += 1
        self.states.add(self._world.fingerprint())
        if not self._over and rank.name not in self._undone:
            self._committed[kept.reduced.step] = kept.reduced.gradients
        who = [replica for replica, _ in kept.reduced.gradients]
        self.note(f"{rank.label} ({role}) commits step {kept.reduced.step}, {ending}, of {who}")

    def final(self, rank: Rank, step: int) -> None:
        """This rank holds that a step can no longer be undone: all who do must mean the same."""
        if self._over or rank.name in self._undone:
            return
        reduced, state = rank.offers.get(step), rank.states.get(step)
        if reduced is not None:
            known = self._outcomes.setdefault(step, reduced.gradients)
            if known != reduced.gradients:
                self.fail(f"step {step} has two outcomes: {known}, and {reduced.gradients} at {rank.label}")
        if state is not None and self._states.setdefault((step, rank.number), state) != state:
            self.fail(f"the state after step {step} at {rank.label} is not that of the others")

    def keeps_promise(self, replica: Replica, before: MemberState) -> None:
        """Who has answered a fence stands where it said until it enters an epoch beyond it."""
        after = replica.leader.state
        if before.fence < before.epoch or after.epoch != before.epoch:
            return
        stood, stands = ((s.step, s.base, s.catching_up, s.begun) for s in (before, after))
        if stood != stands:
            who = f"replica {replica.number} attempt {replica.attempt}"
            self.fail(f"{who} answered fence {before.fence} with {stood}, and then moves to {stands}")

    def same_step(self, rank: Rank, steps: set[int]) -> None:
        """All who took part in a ring meant the same step."""
        if len(steps - {rank.loop.step + 1}) > 0 and rank.loop.full:
            self.fail(f"{rank.label} is in step {rank.loop.step + 1}, and its ring reduced steps {sorted(steps)}")

    def stripes_fit(self, rank: Rank, told: set[tuple[int, int]]) -> None:
        """The stripes that a joiner combines are of one state."""
        if len(told) != 1 and not self._world.flipped:
            self.fail(f"{rank.label} combines stripes of different states: {sorted(told)}")

    def lockstep(self, rank: Rank, kind: str, other: str) -> None:
        """All ranks of a replica come to the same collective."""
        if kind != other:
            self.fail(f"{rank.label} comes to a {other} where another rank of its replica came to a {kind}")

    # --- what survivors pay ------------------------------------------------------------------------------------------

    def computed(self, rank: Rank, samples: tuple[Range, ...]) -> None:
        """A rank runs forward and backward: never again for what it has gradients of."""
        if not samples:
            return
        self._computed[rank.label, rank.loop.step + 1] += 1
        if self._computed[rank.label, rank.loop.step + 1] > 1 and not self._world.constant_batch:
            self.fail(f"{rank.label} computes step {rank.loop.step + 1} again")

    # --- who is taken out --------------------------------------------------------------------------------------------

    def noted(self, effect: Effect) -> None:
        """The coordinator says what it did."""
        self.note(f"coordinator: {effect}")
        if isinstance(effect, Removed):
            self.removed.append(effect)
        if isinstance(effect, Removed) and effect.cause is not Cause.ORPHANED:
            self._excused(effect)
        if isinstance(effect, Decided) and effect.record is None and not self._world.finished:
            self._nothing_lost()
        if isinstance(effect, Started):
            self._start_again(effect.step)

    def _excused(self, removed: Removed) -> None:
        world = self._world
        replica = world.replicas.get(removed.replica)
        if replica is None or replica.attempt != removed.attempt or not replica.alive:
            return
        if any(rank.owner.frozen for rank in replica.ranks):
            return
        since = world.excuses.get((removed.replica, removed.attempt))
        if since is None and ("reports" in removed.reason or world.deafened):
            since = world.links_cut.get((removed.replica, removed.attempt))
        if since is None or world.clock.now - since > EXCUSED:
            self.fail(f"a healthy replica is taken out: {removed}")

    def _nothing_lost(self) -> None:
        """The job starts from its beginning only when nobody is left who could go on, or everybody wanted to leave."""
        excused = self._world.excuses.keys() | self._world.links_cut.keys()
        alive = [replica for replica in self._world.replicas.values() if replica.alive]
        known = {r.number: r.leader.state for r in alive if (r.number, r.attempt) not in excused}
        if all(state.leaving for state in known.values()):
            return
        for replica, state in known.items():
            if state.step is not None and state.epoch:
                self.fail(f"the job starts again, although replica {replica} has the state")

    def _start_again(self, step: int) -> None:
        """What came after the checkpoint from which the run begins again never was."""
        if self._world.finished:
            self._over = True
            return
        self._undone |= {(removed.replica, removed.attempt) for removed in self.removed}
        newest = self._world.newest_checkpoint()
        if newest is not None and step != newest[0] and not self._world.excuses:
            self.fail(f"the run begins from step {step}, and there is a checkpoint of {newest[0]}")
        self._outcomes = {n: outcome for n, outcome in self._outcomes.items() if n <= step}
        self._committed = {n: outcome for n, outcome in self._committed.items() if n <= step}
        self._states = {(n, rail): state for (n, rail), state in self._states.items() if n <= step}

    def gave_up(self, rank: Rank, error: Exception) -> None:
        """A rank ends its replica."""
        self.note(f"{rank.label} gives up: {error}")
        excused = (rank.replica.number, rank.replica.attempt) in self._world.excuses
        if isinstance(error, ReplicaLost) and not excused:
            self.fail(f"{rank.label} has to start again although nothing happened to it: {error}")
        if isinstance(error, StateDiverged) and not self._world.flipped:
            self.fail(f"{rank.label} diverged although nobody touched its state: {error}")

    def joined(self, rank: Rank, step: int) -> None:
        """A shadow becomes active."""
        self.note(f"{rank.label} becomes active after step {step}")
        self.endings["joined"] += rank.number == 0

    # --- at the end --------------------------------------------------------------------------------------------------

    def finished(self, last: int) -> None:
        """Each sample was trained in exactly one step, and none is missing."""
        parts: list[Range] = []
        for step in range(1, last + 1):
            # Who saw it become final may have come with a download, and not know what it was made of.
            outcome = self._outcomes.get(step, self._committed.get(step))
            if outcome is None:
                self.fail(f"step {step} of {last} has no outcome")
            parts += [part for _, samples in outcome or () for part in samples]
        if not parts:
            self.fail("nothing was trained")
        whole = union(parts)
        if count(whole) != count(parts):
            self.fail(f"samples were trained twice: {parts}")
        waiting = self._world.returned()
        missing = subtract([(0, max(stop for _, stop in whole))], [*whole, *waiting])
        if missing:
            self.fail(f"samples {missing} were never trained, and do not wait to be")
