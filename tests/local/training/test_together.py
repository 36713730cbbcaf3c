"""Faults that meet: the coordinator and a replica at once, everybody at once, and twenty in a row."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.local.training.job import Job, assert_computed_once, assert_sound, brief, running, wait_for

pytestmark = pytest.mark.local


def test_the_coordinator_and_a_replica_die_together_and_both_come_back(tmp_path: Path) -> None:
    with running(Job(tmp_path, arguments=brief(steps=36, compute=0.02), lingers_after=5)) as job:
        job.wait_for_step(3)
        job.kill_coordinator()
        job.kill(1)
        job.start_coordinator()
        job.start_replica(1, attempt=1)
        job.wait_for_active(1, attempt=1)
        report = job.finish()
        assert_sound(report, steps=36)
        assert_computed_once(job, (0, 2), steps=36)
        assert [(f["replica"], f["attempt"]) for f in report["failures"]] == [(1, 0)]
        assert [(j["replica"], j["attempt"]) for j in report["joins"]] == [(1, 1)]


def test_a_run_of_which_everything_is_killed_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    checkpoints = {"FTHSDP_CHECKPOINT_PATH": str(tmp_path / "checkpoints"), "FTHSDP_CHECKPOINT_EVERY": "4"}
    with running(
        Job(tmp_path, arguments=brief(steps=20, compute=0.02), environment=checkpoints, lingers_after=9, growth=1.5)
    ) as job:
        job.wait_for_step(9)
        job.kill_coordinator()
        for replica in range(3):
            job.kill(replica)
        job.start_coordinator()
        for replica in range(3):
            job.start_replica(replica, attempt=1)
        report = job.finish()
        assert_sound(report, steps=20)
        first, second = report["starts"]
        assert (first["step"], second["step"] in (4, 8)) == (0, True)
        assert second["replicas"] == [0, 1, 2]
        assert [job.passes(r, attempt=1, rank=w) for r in range(3) for w in range(2)] == [
            list(range(second["step"] + 1, 21))
        ] * 6


FAULTS = 20
LAST_STEP = 130
SLOW_AFTER = 20
GROWTH = 1.03
"""Recovering takes time, and more of it on a busy machine: the steps left for it last at least 80 s."""


@dataclass
class Chain:
    """Random faults in a run with a spare: each replica that dies is started again, and one with a state is left."""

    job: Job
    random: random.Random
    attempts: dict[int, int] = field(default_factory=dict)
    """The newest attempt of each replica."""
    dead: set[tuple[int, int]] = field(default_factory=set)
    """What was taken out, by replica and attempt."""

    def healthy(self) -> list[int]:
        """Return the replicas whose newest attempt has trained."""
        trained = {(s["replica"], s["attempt"]) for s in self.job.steps() if s["replica"] in s["contributors"]}
        return [r for r, attempt in self.attempts.items() if (r, attempt) in trained]

    def pass_on(self) -> None:
        """Wait for some steps, and until one more than is needed can be lost."""
        newest = max(s["step"] for s in self.job.steps())
        self.job.wait_for_step(newest + self.random.randint(1, 6))
        wait_for("two replicas with a state", lambda: len(self.healthy()) >= 2)

    def victim(self) -> int:
        """Any but one that has a state: nobody else may have it."""
        keeper = self.random.choice(self.healthy())
        return self.random.choice([r for r in self.attempts if r != keeper])

    def restart(self, replica: int) -> None:
        """Start a replica again, as an operator would: after what is left of it was killed."""
        self.dead.add((replica, self.attempts[replica]))
        self.job.kill(replica, attempt=self.attempts[replica])
        self.attempts[replica] += 1
        self.job.start_replica(replica, attempt=self.attempts[replica])

    # --- faults

    def kill_a_replica(self) -> None:
        """All its ranks at once."""
        victim = self.victim()
        self.job.kill(victim, attempt=self.attempts[victim])
        self.restart(victim)

    def kill_a_rank(self) -> None:
        """The rest of the replica ends by itself."""
        victim, rank = self.victim(), self.random.randrange(self.job.ranks)
        attempt = self.attempts[victim]
        self.job.kill(victim, attempt=attempt, rank=rank)
        assert self.job.exit_code(victim, attempt=attempt, rank=1 - rank) != 0
        self.restart(victim)

    def kill_two(self) -> None:
        """As many as can be lost at once with a spare."""
        victims = self.random.sample(sorted(self.attempts.keys() - {self.random.choice(self.healthy())}), 2)
        for victim in victims:
            self.job.kill(victim, attempt=self.attempts[victim])
        for victim in victims:
            self.restart(victim)

    def freeze(self) -> None:
        """Until it is taken out for it."""
        keeper, victim = self.random.sample(self.healthy(), 2)
        attempt = self.attempts[victim]
        self.job.signal(victim, signal.SIGSTOP, attempt=attempt)
        wait_for(f"replica {victim} is taken out", lambda: (victim, attempt) in self.job.taken_out())
        assert (keeper, self.attempts[keeper]) not in self.job.taken_out()
        self.restart(victim)

    def kill_the_coordinator(self) -> None:
        """It comes back at once."""
        self.job.kill_coordinator()
        self.job.start_coordinator()

    def kill_the_coordinator_and_a_replica(self) -> None:
        """The first fault after its return is one that it did not see."""
        victim = self.victim()
        self.job.kill_coordinator()
        self.job.kill(victim, attempt=self.attempts[victim])
        self.job.start_coordinator()
        self.restart(victim)

    def run(self) -> None:
        """Let everything happen."""
        kinds: list[Callable[[], None]] = [
            self.kill_a_replica,
            self.kill_a_rank,
            self.kill_two,
            self.freeze,
            self.kill_the_coordinator,
            self.kill_the_coordinator_and_a_replica,
        ]
        for _ in range(FAULTS):
            self.pass_on()
            self.random.choice(kinds)()


@pytest.mark.parametrize("seed", [1])
def test_twenty_random_faults_in_one_run_with_a_spare_leave_no_trace_in_what_is_trained(
    tmp_path: Path, seed: int
) -> None:
    arguments = brief(steps=LAST_STEP, compute=0.02)
    with running(
        Job(tmp_path, spares=1, silence_timeout=8.0, arguments=arguments, lingers_after=SLOW_AFTER, growth=GROWTH)
    ) as job:
        chain = Chain(job, random.Random(seed), attempts=dict.fromkeys(range(4), 0))
        job.wait_for_step(3)
        chain.run()
        report = job.finish()
        assert_sound(report, steps=LAST_STEP)
        assert {(f["replica"], f["attempt"]) for f in report["failures"]} <= chain.dead
        assert report["joins"]
        for replica, attempt, rank in job.processes:
            passes = job.passes(replica, attempt=attempt, rank=rank)
            assert passes == sorted(set(passes)), f"replica {replica} attempt {attempt} rank {rank} repeated a pass"
