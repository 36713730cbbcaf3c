"""Whatever happens in whatever order, no healthy replica is touched and every state has a way out."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.world import Killed, World, manifest

from fthsdp_operator.api import JobState, OnExhausted, ReplicaState

LIMIT = 3
KINDS = ["exit", "crash", "delete", "vanish", "evict", "kill operator", "wait", "coordinator"]
FAULT = st.tuples(st.sampled_from(KINDS), st.integers(0, 99))


def healthy(world: World) -> dict[str, str]:
    """Pods of replicas of which no pod has failed or is going."""
    pods = [it for (kind, name), it in world.objects.items() if kind == "Pod" and "coordinator" not in name]
    bad = {
        (it["metadata"]["labels"]["fthsdp.dev/replica"], it["metadata"]["labels"]["fthsdp.dev/attempt"])
        for it in pods
        if it["status"]["phase"] == "Failed" or "deletionTimestamp" in it["metadata"]
    }
    return {
        it["metadata"]["name"]: it["metadata"]["uid"]
        for it in pods
        if (it["metadata"]["labels"]["fthsdp.dev/replica"], it["metadata"]["labels"]["fthsdp.dev/attempt"]) not in bad
    }


async def happen(world: World, what: str, number: int) -> set[str]:
    """Let something happen; return the prefixes of the groups that it hit."""
    running = sorted(name for name in world.pods if world.pod(name)["status"]["phase"] == "Running")
    if what == "kill operator":
        world.kill_at = len(world.writes) + number % 8
    elif what == "wait":
        world.now += number * 10
    elif what == "coordinator" and ("Pod", "llama-coordinator") in world.objects:
        world.vanish("llama-coordinator")
    elif running:
        name = running[number % len(running)]
        if what == "exit":
            world.exits(name, 1 + number)
        elif what == "crash":
            world.launcher_says(name, 1 + number)
        elif what == "delete":
            world.user_deletes(name)
        elif what == "vanish":
            world.vanish(name)
        elif what == "evict":
            world.pod(name)["status"] |= {"phase": "Failed", "reason": "Evicted"}
        return {f"llama-{name.rpartition('-')[0]}-"}
    return set()


async def recover(world: World) -> None:
    try:
        await world.settle()
    except Killed:
        world.kill_at = None
        await world.settle()
    world.kill_at = None


@settings(max_examples=30, deadline=None)
@given(st.lists(FAULT, max_size=12), st.integers(0, 2), st.sampled_from(OnExhausted), st.booleans())
def test_random_faults(faults: list[tuple[str, int]], spares: int, exhausted: OnExhausted, in_place: bool) -> None:
    async def story() -> None:
        budget = {"perReplica": {"limit": LIMIT, "windowSeconds": 600}, "onExhausted": str(exhausted)}
        policy = {**budget, "backoff": {"initialSeconds": 5}} | ({"inPlace": {}} if in_place else {})
        world = World(manifest(failurePolicy=policy, spares=spares))
        await world.train()
        for what, number in faults:
            before = healthy(world)
            hit = await happen(world, what, number)
            await recover(world)
            if world.job.status.state is JobState.FAILED:
                assert not [name for name in world.pods if world.pod(name)["status"]["phase"] == "Running"]
                return
            untouched = {name: uid for name, uid in before.items() if not name.startswith(tuple(hit))}
            assert untouched.items() <= healthy(world).items()
            abandoned = world.job.status.abandoned_replicas
            assert abandoned <= (1 + spares if exhausted is OnExhausted.ABANDON_REPLICA else 0)
            for entry in world.job.status.replica_statuses:
                assert len(entry.recent_restarts) <= LIMIT
                assert entry.state is not ReplicaState.BACKOFF or entry.next_restart_time is not None
            world.kubelets_start_everything()
            world.everybody_trains()
            await recover(world)
        world.now += 3600  # every wait is over
        await world.train()
        able = 3 + spares - world.job.status.abandoned_replicas
        assert (world.job.status.ready, world.job.status.replicas) == (f"{min(able, 3)}/3", min(able, 3))
        assert world.job.status.spares == (f"{max(able - 3, 0)}/{spares}" if spares else None)
        assert len([name for name in world.pods if world.pod(name)["status"]["phase"] == "Running"]) == 2 * able

    asyncio.run(story())
