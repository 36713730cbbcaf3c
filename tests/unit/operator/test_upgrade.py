"""An operator that takes over a job from an earlier version goes on with it, and touches nothing that runs."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.unit.operator.world import World
from tests.upgrade import before, freeze

from fthsdp.coordinator.messages import Status


@pytest.fixture(params=["an earlier version", "this version"])
def world(request: pytest.FixtureRequest) -> World:
    """Return a world with the job of another operator in it."""
    kept = json.loads(before.JOB.read_text(encoding="utf-8")) if "earlier" in request.param else freeze.job()
    job, *others = kept["objects"]
    world = World(job)
    world.objects |= {(it["kind"], it["metadata"]["name"]): it for it in others}
    world.coordinator = Status.model_validate(kept["coordinator"])
    world._uids = iter(range(1000, 2000))  # type: ignore[assignment]  # none that is there already
    return world


def test_a_job_that_is_taken_over_is_left_as_it_is(world: World) -> None:
    async def story() -> None:
        old, pods = world.job.status, world.pods
        await world.settle()
        assert set(world.writes) <= {"status"}  # which may say more than the old one did
        assert (world.told, world.events) == ([], [])
        assert len(world.pods) == 8
        assert world.pods == pods
        new = world.job.status
        # Filled in by who takes over: the template is the one that runs, and its steps are counted from here on.
        new_fields = {"revision", "trains_since_step"}
        assert [it.model_dump(exclude=new_fields) for it in new.replica_statuses] == [
            it.model_dump(exclude=new_fields) for it in old.replica_statuses
        ]
        assert (new.state, new.ready, new.restarts, new.step) == (old.state, old.ready, old.restarts, old.step)

    asyncio.run(story())


def test_what_the_other_operator_counted_still_counts(world: World) -> None:
    async def story() -> None:
        others = {name: uid for name, uid in world.pods.items() if not name.startswith("r2-")}
        world.exits("r2-a1-0", 1)
        await world.settle()
        entry = world.job.status.replica(2)
        assert entry is not None
        assert (entry.attempt, entry.restarts, entry.restarts_in_a_row, entry.state) == (2, 2, 2, "Backoff")
        assert others == {name: uid for name, uid in world.pods.items() if not name.startswith("r2-")}

    asyncio.run(story())
