"""The same job under Hypothesis, which looks for a run that breaks and cuts it down to what is needed for that."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tests.simulation import mutations
from tests.simulation.checks import Violation
from tests.simulation.faults import LOUD, Fault, Kind, apply
from tests.simulation.world import World

from fthsdp.data.policies import BatchPolicy, Policies

MOST = settings(max_examples=60, stateful_step_count=20)


class Jobs(RuleBasedStateMachine):
    """A job: time passes, things break, and in the end everything is healed and the run has to finish."""

    @initialize(
        seed=st.integers(0, 3),
        replicas=st.integers(1, 3),
        spares=st.integers(0, 1),
        ranks=st.integers(1, 2),
        steps=st.integers(2, 5),
        batch=st.sampled_from(BatchPolicy),
        download_seconds=st.sampled_from([0.02, 0.3, 1.0]),
        checkpoint_every=st.integers(0, 2),
        unruly=st.sampled_from([0.05, 0.4]),
    )
    def begins(self, *, seed: int, replicas: int, batch: BatchPolicy, **size: int | float) -> None:
        self.world = World(seed, replicas=replicas, policies=Policies(batch=batch), **size)  # type: ignore[arg-type]

    @rule(events=st.integers(1, 120))
    def time_passes(self, events: int) -> None:
        for _ in range(events):
            if not self.world.over:
                self.world.next()

    @rule(
        kind=st.sampled_from(LOUD),
        replica=st.integers(0, 3),
        rank=st.integers(0, 1),
        seconds=st.sampled_from([0.5, 4.0, 12.0]),
    )
    def breaks(self, kind: Kind, replica: int, rank: int, seconds: float) -> None:
        if not self.world.finished:
            replica, rank = replica % len(self.world.replicas), rank % self.world.ranks
            apply(self.world, Fault(at=self.world.clock.events, kind=kind, replica=replica, rank=rank, seconds=seconds))

    def teardown(self) -> None:
        self.world.finish()


TestJobs = Jobs.TestCase
TestJobs.settings = MOST


def test_a_protocol_without_a_rule_is_found_out_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mutations.the_impatient_coordinator(monkeypatch)
    # The same examples each time: this mistake breaks more than one promise, and by chance another one comes first.
    search = settings(MOST, max_examples=2000, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.raises(Violation, match="a healthy replica is taken out"):
        run_state_machine_as_test(Jobs, settings=search)
