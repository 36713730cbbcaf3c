"""A job in simulated time: the real coordinator, leaders and step loops, and everything that can happen to them.

A run is a function of its seed and of the faults that are asked for: it can be replayed. The operator's part is played
here: it starts what ended, reports it, and ends what the coordinator has a verdict against.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.checks import Checks
from tests.simulation.clock import Clock
from tests.simulation.coordinator import SLOWNESS, Coordinator
from tests.simulation.replica import Rank, Replica
from tests.simulation.rings import SILENCE_TIMEOUT, Rings

from fthsdp.coordinator.events import MembershipSettings
from fthsdp.coordinator.ledger import Ledger
from fthsdp.data.policies import BatchPolicy, Policies
from fthsdp.data.sampler import SamplerState
from fthsdp.ranges import Range

__all__ = ["World"]

PATIENCE = 300.0
"""Simulated seconds in which a job has to finish once nothing breaks any more."""


STRAGGLERS = 20.0
"""Seconds after the end of the first replica that finished in which the others have to."""


class World:
    """One job, from its start to its end."""

    def __init__(
        self,
        seed: int,
        *,
        replicas: int = 3,
        spares: int = 0,
        ranks: int = 2,
        steps: int = 6,
        min_replicas: int = 1,
        policies: Policies | None = None,
        weights: Sequence[int] = (),
        unruly: float = 0.05,
        download_seconds: float = 0.2,
        checkpoint_every: int = 0,
    ) -> None:
        """``weights`` are the initial states of the replicas, where they are not all the same."""
        self.seed = seed
        self.clock = Clock(seed, unruly=unruly)
        self.ranks = ranks
        self.steps = steps
        self.batch_size = 2 * ranks
        self.policies = policies or Policies()
        self.constant_batch = self.policies.batch is BatchPolicy.CONSTANT
        self.compute_seconds = 0.05
        self.download_seconds = download_seconds
        self.checkpoint_every = checkpoint_every
        self.checkpoints: dict[int, dict[int, tuple[int, SamplerState]]] = {}
        """Of each step, the state and the sampler of each rank."""
        self.rails = [Rings(self.clock) for _ in range(ranks)]
        self.checks = Checks(self)
        self.connections = 0
        self.excuses: dict[tuple[int, int], float] = {}
        """When something last happened to an attempt that speaks against it."""
        self.links_cut: dict[tuple[int, int], float] = {}
        """When an attempt's link to the coordinator was last cut: evidence only together with a neighbour's word."""
        self.deafened = False
        """The coordinator could not be reached for a while: who looked for it just then may not be back in time."""
        self.flipped: set[int] = set()
        self.finished = False
        """Some replica has finished the run."""
        self._settings = MembershipSettings(
            replicas=replicas, spares=spares, min_replicas=min_replicas, start_timeout=30.0
        )
        self._store: list[Ledger] = []
        self._weights = [*weights, *[1] * (replicas + spares - len(weights))]
        self._returned: tuple[Range, ...] | None = None
        self.coordinator = Coordinator(self, self._settings, self._store)
        self.replicas: dict[int, Replica] = {}
        for number in range(replicas + spares):
            self._start(number, 0)
        self.clock.after(1.0, self._operate)

    # --- running it --------------------------------------------------------------------------------------------------

    def next(self) -> None:
        """Let the next thing happen."""
        self.clock.next()

    @property
    def over(self) -> bool:
        """Whether the run is finished and nobody is left."""
        return self.finished and not any(replica.alive for replica in self.replicas.values())

    def finish(self) -> None:
        """Heal everything, and run to the end: it must come."""
        self.heal()
        end = self.clock.now + PATIENCE
        while not self.over:
            if self.clock.now > end:
                self.checks.fail(f"nothing breaks any more, and yet the job does not finish: {self.describe()}")
            self.clock.next()
        self.checks.finished(self.steps)

    def fingerprint(self) -> int:
        """Return a number that is the same where the job stands in the same situation, whenever that is."""
        return hash(
            (
                tuple(replica.fingerprint() for replica in self.replicas.values()),
                self.coordinator.owner.alive,
                self.coordinator.membership.epoch,
            )
        )

    def describe(self) -> str:
        """Say where everybody stands."""
        lines = [
            f"\n  {rank.label}: step {rank.loop.step}, full {rank.loop.full}, waits for {rank.pending}"
            for replica in self.replicas.values()
            for rank in replica.ranks
            if replica.alive
        ]
        states = [f"\n  leader {n}: {r.leader.state}" for n, r in self.replicas.items() if r.alive]
        return "".join([*lines, *states])

    def returned(self) -> tuple[Range, ...]:
        """Return the samples that wait to be dealt again at the end of the run."""
        return self._returned or ()

    # --- what the operator does --------------------------------------------------------------------------------------

    def _start(self, number: int, attempt: int) -> None:
        self.checks.note(f"replica {number} attempt {attempt} starts")
        self.replicas[number] = Replica(self, number, attempt, weights=self._weights[number])

    def exited(self, replica: Replica) -> None:
        """An attempt has ended."""
        self.checks.note(f"replica {replica.number} attempt {replica.attempt} exits with {replica.exit_code}")
        ended = replica.exit_code == 0 and not replica.leader.state.leaving
        loop = replica.ranks[0].loop
        final = replica.leader.state.finished is not None
        if loop.full and loop.step >= self.steps and (final or self._returned is None):
            self._returned = loop.sampler.returned  # also of one that froze after the last step: nobody else may know
        if ended:
            if not self.finished:
                self.finished = True
                self.clock.after(STRAGGLERS, self._end_stragglers)
            return
        random = self.clock.random
        if random.random() < 0.7:
            self.clock.after(random.uniform(0.001, 0.3), lambda: self._report(replica))
        self.clock.after(random.uniform(0.3, 2.0), lambda: self._restart(replica))

    def _report(self, replica: Replica) -> None:
        coordinator = self.coordinator
        if not coordinator.answers:
            self.clock.after(0.5, lambda: self._report(replica))
            return
        coordinator.owner.soon(lambda: coordinator.exited(replica.number, replica.attempt))

    def _restart(self, replica: Replica) -> None:
        if not self.finished:
            self._start(replica.number, replica.attempt + 1)

    def _operate(self) -> None:
        """Once a second: end what the coordinator has a verdict against."""
        if self.coordinator.answers:
            for verdict in self.coordinator.membership.verdicts:
                replica = self.replicas[verdict.replica]
                if replica.attempt == verdict.attempt and replica.alive:
                    replica.exit(137)
        self.clock.after(1.0, self._operate)

    def _end_stragglers(self) -> None:
        for replica in self.replicas.values():
            replica.exit(137)

    def coordinator_died(self) -> None:
        """The coordinator is gone; another one starts after a while."""
        self.checks.note("the coordinator dies")
        self.clock.after(self.clock.random.uniform(0.1, 3.0), self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        if not self.coordinator.owner.alive:
            self.checks.note("a coordinator starts")
            self.coordinator = Coordinator(self, self._settings, self._store)

    def saved(self, rank: Rank, step: int, stored: tuple[int, SamplerState]) -> None:
        """A rank has written its part of the checkpoint of a final step."""
        self.checkpoints.setdefault(step, {})[rank.number] = stored

    def newest_checkpoint(self) -> tuple[int, str] | None:
        """Return step and digest of the newest whole checkpoint."""
        whole = [step for step, parts in self.checkpoints.items() if len(parts) == self.ranks]
        return (max(whole), f"checkpoint {max(whole)}") if whole else None

    def rank_at(self, address: str) -> Rank | None:
        """Return the rank that can be reached there, or None."""
        number, attempt, rank = map(int, address.split("."))
        replica = self.replicas.get(number)
        if replica is None or replica.attempt != attempt or not replica.alive:
            return None
        return replica.ranks[rank]

    # --- what can happen ---------------------------------------------------------------------------------------------

    def _blame(self, number: int) -> Replica | None:
        """Return this replica if it lives, and remember that something happened to it."""
        replica = self.replicas[number]
        if not replica.alive:
            return None
        self.excuses[number, replica.attempt] = self.clock.now
        return replica

    def kill(self, number: int) -> None:
        """SIGKILL all processes of a replica."""
        replica = self._blame(number)
        if replica is not None:
            self.checks.note(f"replica {number} is killed")
            replica.exit(137)

    def kill_rank(self, number: int, rank: int) -> None:
        """SIGKILL one process; the others of its replica end a little later."""
        replica = self._blame(number)
        if replica is not None:
            self.checks.note(f"rank {rank} of replica {number} is killed")
            replica.ranks[rank].owner.alive = False
            replica.ranks[rank].rings.die(replica.ranks[rank])
            if rank == 0 and replica.link is not None:
                replica.link.close()
            self.clock.after(self.clock.random.uniform(0.0, 0.2), lambda: replica.exit(1))

    def freeze(self, number: int, rank: int | None = None) -> None:
        """SIGSTOP a replica, or one of its ranks."""
        replica = self._blame(number)
        if replica is not None:
            self.checks.note(f"replica {number} rank {rank} freezes")
            replica.freeze(rank=rank)

    def thaw(self, number: int) -> None:
        """SIGCONT."""
        replica = self._blame(number)
        if replica is not None:
            self.checks.note(f"replica {number} goes on")
            replica.thaw()

    def cut_link(self, number: int) -> None:
        """Reset a leader's connection to the coordinator."""
        replica = self.replicas[number]
        if replica.alive and replica.link is not None:
            self.checks.note(f"the link of replica {number} is cut")
            self.links_cut[number, replica.attempt] = self.clock.now
            replica.link.close()

    def cut_ring(self, number: int, rail: int) -> None:
        """Reset a connection of the newest ring of a rank."""
        replica = self.replicas[number]
        if replica.alive:
            rank = replica.ranks[rail]
            self.checks.note(f"a ring of replica {number} rank {rail} is cut")
            rank.rings.cut(max(rank.records, default=0), rank.name)

    def partition(self, number: int, seconds: float) -> None:
        """Cut a leader off from the coordinator, without a word to either."""
        replica = self._blame(number)
        if replica is None or replica.partitioned:
            return
        self.checks.note(f"replica {number} is cut off from the coordinator for {seconds:.1f} s")
        replica.partitioned = True
        link = replica.link
        if link is not None:
            link.mute()
            self.clock.after(min(seconds, 5.0), link.close)
        self.clock.after(seconds, lambda: setattr(replica, "partitioned", False))

    def unplug_coordinator(self, seconds: float, *, beside: int | None) -> None:
        """Cut the coordinator's machine off from all others, its store included; one replica may be on it."""
        if not self.coordinator.cut_off(seconds, beside=beside, from_store=True):
            return
        self.checks.note(f"the machine of the coordinator, and of replica {beside}, is cut off for {seconds:.1f} s")
        if beside is not None and seconds > SILENCE_TIMEOUT:
            for rail in range(self.ranks):
                self.clock.after(SILENCE_TIMEOUT, lambda rail=rail: self.cut_ring(beside, rail))

    def deafen_coordinator(self, seconds: float) -> None:
        """Let no leader reach the coordinator, which reaches its store; not for so long that it has to believe that."""
        seconds = min(seconds, self._settings.return_timeout - SLOWNESS)
        if self.coordinator.cut_off(seconds, from_store=False):
            self.deafened = True
            self.checks.note(f"the coordinator hears nobody for {seconds:.1f} s")

    def freeze_coordinator(self, seconds: float) -> None:
        """SIGSTOP the coordinator, and SIGCONT it later."""
        if self.coordinator.owner.alive:
            self.checks.note(f"the coordinator freezes for {seconds:.1f} s")
            self.coordinator.stop(seconds)

    def crash_coordinator(self) -> None:
        """SIGKILL the coordinator."""
        if self.coordinator.owner.alive:
            self.coordinator.die()

    def crash_coordinator_at_persist(self, *, after: bool) -> None:
        """Let it die right before or right after it stores its next decision."""
        self.coordinator.dies_after_persist = after

    def leave(self, number: int) -> None:
        """SIGTERM a replica."""
        replica = self.replicas[number]
        if replica.alive:
            self.checks.note(f"replica {number} is told to leave")
            replica.leave()

    def flip_bit(self, number: int, rank: int) -> None:
        """Memory changes by itself."""
        replica = self._blame(number)
        if replica is not None and replica.ranks[rank].loop.full:
            self.checks.note(f"a bit flips at replica {number} rank {rank}")
            self.flipped.add(number)
            replica.ranks[rank].state ^= 1 << 17

    def heal(self) -> None:
        """Let nothing more break. A member that is frozen stays so: somebody has to notice."""
        self.coordinator.dies_after_persist = None
        for replica in self.replicas.values():
            replica.partitioned = False
            if replica.alive and not replica.leader.state.epoch:
                replica.thaw()
