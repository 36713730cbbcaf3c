"""What follows from the state of nodes: who leaves them, who stays, and which are avoided afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operator.world import GRACE, NAME, NOW, World, manifest

from fthsdp.coordinator.messages import Cause, Status, Verdict
from fthsdp_operator.api import (
    REPLICA_LABEL,
    AvoidedNode,
    Failure,
    Job,
    NodeFaults,
    ReplicaState,
    ReplicaStatus,
    RuleAction,
    format_time,
    parse_job,
)
from fthsdp_operator.manifests.render import training_pod
from fthsdp_operator.observed.observe import NodeView
from fthsdp_operator.rules.nodes import MOVE_PATIENCE, OVERDUE, remembering

WELL = NodeView(name="", ready="True", conditions=frozenset({("Ready", "True")}))
GPU_MISSING = frozenset({("Ready", "True"), ("GPUMissing", "True")})
MIGRATE = {"onCordon": "Migrate"}


async def trains(policy: dict[str, Any] | None = None, **spec: Any) -> World:
    """A job that trains, each replica on a node of its own: node-r0, node-r1, ..."""
    world = World(manifest(nodePolicy=policy or {}, **spec))
    await world.train()
    settle_in(world)
    return world


def settle_in(world: World) -> None:
    """Each pod is on the node of its replica, where there is none of it yet, and that node is well."""
    for (kind, _), it in world.objects.items():
        replica = it["metadata"].get("labels", {}).get(REPLICA_LABEL)
        if kind == "Pod" and replica is not None and it["spec"]["nodeName"] == "node-1":
            it["spec"]["nodeName"] = f"node-r{replica}"
            world.node_views.setdefault(f"node-r{replica}", replace(WELL, name=f"node-r{replica}"))


def change(world: World, replica: int, **fields: Any) -> None:
    """Something becomes of the node of a replica."""
    world.node_views[f"node-r{replica}"] = replace(world.node_views[f"node-r{replica}"], **fields)


def not_ready(world: World, replica: int, *, seconds: float = 60.0, ready: str = "Unknown") -> None:
    change(world, replica, ready=ready, not_ready_since=world.now - seconds)


def unheard(world: World, *replicas: int) -> None:
    """The coordinator hears these no more."""
    assert world.coordinator is not None
    left = tuple(it for it in world.coordinator.replicas if it.replica not in replicas)
    world.coordinator = world.coordinator.model_copy(update={"replicas": left})


def entry(world: World, replica: int = 2) -> ReplicaStatus:
    found = world.job.status.replica(replica)
    assert found is not None
    return found


def attempts(world: World) -> list[int]:
    return [it.attempt for it in world.job.status.replica_statuses]


async def comes_back(world: World) -> None:
    """Whoever was moved trains again, on another node."""
    for name in list(world.objects):
        if name[0] == "Pod" and "deletionTimestamp" in world.objects[name]["metadata"]:
            world.vanish(name[1])
    await world.train()


# --- lost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ready", ["Unknown", "False"])
def test_a_replica_is_started_elsewhere_before_kubernetes_takes_its_pods_off_a_lost_node(ready: str) -> None:
    async def story() -> None:
        world = await trains()
        before = world.pods
        not_ready(world, 2, ready=ready)
        unheard(world, 2)
        await world.settle()
        why = entry(world).last_failure
        assert why is not None
        assert (why.reason, why.pod, why.node) == ("NodeLost", f"{NAME}-r2-a0-0", "node-r2")
        assert why.message.startswith("node node-r2 has not been Ready for 60 s")
        assert (entry(world).recent_restarts, why.action) == ((), RuleAction.RESTART_REPLICA_FREE)
        assert world.pods.keys() == (before.keys() - {"r2-a0-0", "r2-a0-1"}) | {"r2-a1-0", "r2-a1-1"}
        assert world.pod("r2-a0-0")["metadata"]["deletionGracePeriodSeconds"] == GRACE  # as any other pod
        assert [(it.replica, it.attempt) for it in world.told] == [(2, 0)]
        world.now += 3600  # the old pods never go, and nobody waits for them
        world.kubelets_start_everything()
        world.everybody_trains()
        await world.settle()
        assert entry(world).state is ReplicaState.ACTIVE
        assert world.writes.count(f"delete Pod {NAME}-r2-a0-0") == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    ("cause", "later", "rules", "free"),
    [
        (Cause.SILENT, 45, [], True),
        (Cause.FROZEN, 45, [], True),
        (Cause.SILENT, -100, [], True),
        (Cause.SILENT, 121, [], False),
        (Cause.STATE_DIVERGED, 45, [], False),
        (Cause.SILENT, 45, [{"name": "mine", "onPodReasons": ["Silent"], "action": "RestartReplica"}], False),
    ],
)
def test_what_the_coordinator_noticed_first_costs_nothing_once_the_node_turns_out_to_be_lost(
    cause: Cause, later: float, rules: list[dict[str, Any]], free: bool
) -> None:
    async def story() -> None:
        world = await trains(failurePolicy={"rules": rules})
        missed = world.now
        assert world.coordinator is not None
        verdict = Verdict(replica=2, attempt=0, cause=cause, reason="nothing was heard of it for 5 s")
        world.coordinator = world.coordinator.model_copy(update={"verdicts": (verdict,)})
        await world.settle()
        assert entry(world).recent_restarts == (missed,)
        world.now += 200
        change(world, 2, ready="Unknown", not_ready_since=missed + later)
        await world.settle()
        why = entry(world).last_failure
        assert why is not None
        if free:
            assert (why.reason, why.node, why.action) == ("NodeLost", "node-r2", RuleAction.RESTART_REPLICA_FREE)
            assert why.message == "nothing was heard of it for 5 s; node node-r2 is not Ready"
        assert (entry(world).recent_restarts, entry(world).attempt) == (() if free else (missed,), 1)

    asyncio.run(story())


@pytest.mark.parametrize("other_ended", [True, False])
def test_a_pod_that_ends_because_it_misses_one_on_a_lost_node_costs_nothing(other_ended: bool) -> None:
    async def story() -> None:
        world = await trains()
        world.pod("r2-a0-1")["spec"]["nodeName"] = "node-7"
        world.exits("r2-a0-0", 75)
        if other_ended:
            world.exits("r2-a0-1", 75)
        await world.settle()
        why = entry(world).last_failure
        assert why is not None
        assert (why.reason, len(entry(world).recent_restarts)) == ("Error", 1)
        world.node_views["node-7"] = replace(WELL, name="node-7", ready="Unknown", not_ready_since=world.now + 40)
        world.now += 45
        await world.settle()
        after = entry(world).last_failure
        assert after is not None
        lost = ("NodeLost", f"{NAME}-r2-a0-1", None, 0)
        same = ("Error", why.pod, 75, 1)
        assert (after.reason, after.pod, after.exit_code, len(entry(world).recent_restarts)) == (
            same if other_ended else lost
        )

    asyncio.run(story())


@pytest.mark.parametrize("case", ["heard", "nobody answers", "not long", "ready", "not known"])
def test_nobody_is_moved_for_a_node_that_is_not_ready_while(case: str) -> None:
    async def story() -> None:
        world = await trains()
        not_ready(world, 2, seconds=59 if case == "not long" else 6000)
        if case == "ready":
            change(world, 2, ready="True", not_ready_since=None)
        if case == "not known":
            del world.node_views["node-r2"]
        if case != "heard":
            unheard(world, 2)
        if case == "nobody answers":
            world.coordinator = None
        await world.settle()
        assert attempts(world) == [0, 0, 0]

    asyncio.run(story())


@pytest.mark.parametrize("answers", [True, False])
def test_a_control_plane_that_loses_sight_of_all_nodes_stops_nobody_who_trains(answers: bool) -> None:
    async def story() -> None:
        world = await trains()
        for replica in range(3):
            not_ready(world, replica, seconds=6000)
        if not answers:
            world.coordinator = None
        before = world.pods
        await world.settle()
        assert (world.pods, world.job.status.restarts) == (before, 0)

    asyncio.run(story())


def test_a_coordinator_on_a_lost_node_is_replaced_and_one_that_answers_stays() -> None:
    async def story() -> None:
        world = await trains()
        keeper = world.pod("coordinator")
        world.node_views["node-1"] = replace(WELL, name="node-1", ready="Unknown", not_ready_since=NOW - 60)
        await world.settle()
        assert world.pod("coordinator") is keeper
        world.coordinator = None
        await world.settle()
        assert "deletionTimestamp" in keeper["metadata"]
        world.now += GRACE + OVERDUE
        await world.settle()
        assert world.pod("coordinator")["metadata"]["uid"] != keeper["metadata"]["uid"]
        assert attempts(world) == [0, 0, 0]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("policy", "deadlines", "ready", "late", "gone"),
    [
        ({}, {}, "Unknown", 6000.0, False),
        ({"forceDelete": True}, {}, "Unknown", OVERDUE, True),
        ({"forceDelete": True}, {}, "Unknown", OVERDUE - 0.1, False),
        ({"forceDelete": True}, {}, "True", 6000.0, False),
        ({"forceDelete": True}, {"terminationSeconds": 300}, "True", 300.0, True),
        ({"forceDelete": True}, {"terminationSeconds": 300}, "True", 299.0, False),
    ],
)
def test_pods_that_nobody_takes_away_are_removed_by_force_only_where_that_is_allowed(
    policy: dict[str, Any], deadlines: dict[str, Any], ready: str, late: float, gone: bool
) -> None:
    async def story() -> None:
        world = await trains(policy, deadlines=deadlines)
        world.user_deletes("r2-a0-0")
        world.user_deletes("r2-a0-1")
        change(world, 2, ready=ready, not_ready_since=None if ready == "True" else world.now - 100)
        await world.settle()
        assert ("Pod", f"{NAME}-r2-a0-0") in world.objects
        world.now += GRACE + late
        await world.settle()
        assert (("Pod", f"{NAME}-r2-a0-0") not in world.objects) is gone

    asyncio.run(story())


@pytest.mark.parametrize("end", ["suspended", "ended"])
def test_pods_on_dead_nodes_are_removed_by_force_from_a_job_that_is(end: str) -> None:
    async def story() -> None:
        world = await trains({"forceDelete": True}, deadlines={"activeSeconds": 100})
        change(world, 2, ready="Unknown", not_ready_since=world.now - 100)
        if end == "suspended":
            world.user_changes(suspend=True)
        else:
            world.now += 100
        await world.settle()
        assert ("Pod", f"{NAME}-r2-a0-0") in world.objects
        assert await world.look() <= 2.0
        world.now += GRACE + OVERDUE
        await world.settle()
        left = {name for kind, name in world.objects if kind == "Pod"}
        assert not {f"{NAME}-r2-a0-0", f"{NAME}-r2-a0-1"} & left
        assert f"{NAME}-r1-a0-0" in left  # its node is well, and will say when it has ended

    asyncio.run(story())


# --- ill --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"conditions": GPU_MISSING}, "the condition GPUMissing=True"),
        ({"conditions": frozenset({("GpuMemWatch", "True")})}, "the condition GpuMemWatch=True"),
        ({"conditions": frozenset({("SysLogsXIDError", "True")})}, "the condition SysLogsXIDError=True"),
        (
            {"taints": frozenset({("nvidia.com/gpu-xid-error", "1", "NoSchedule")})},
            "the taint nvidia.com/gpu-xid-error",
        ),
        ({"conditions": frozenset({("GPUMissing", "False")})}, ""),
        ({"conditions": frozenset({("MemoryPressure", "True")})}, ""),
        ({"taints": frozenset({("node.kubernetes.io/unreachable", "", "NoExecute")})}, ""),
        ({"unschedulable": True}, ""),
    ],
)
def test_a_replica_leaves_a_node_that_says_that_it_is_ill(node: dict[str, Any], words: str) -> None:
    async def story() -> None:
        world = await trains()
        change(world, 2, **node)
        await world.settle()
        if not words:
            assert attempts(world) == [0, 0, 0]
            return
        assert attempts(world) == [0, 0, 1]
        why = entry(world).last_failure
        assert why is not None
        assert (why.reason, why.node, why.message) == ("NodeUnhealthy", "node-r2", f"node node-r2 has {words}")
        assert entry(world).recent_restarts == ()
        assert world.told == []  # it leaves at a step boundary
        moved = [event for event in world.events if event.reason == "ReplicaMoved"]
        assert [(event.warning, event.message) for event in moved] == [
            (False, f"r2 {NAME}-r2-a0-0 NodeUnhealthy: node node-r2 has {words}; attempt 1 starts now, at no cost")
        ]

    asyncio.run(story())


def test_patterns_of_the_user_replace_the_known_ones_and_never_speak_of_kubernetes_own() -> None:
    everything = {"unhealthyConditions": [{"type": "*"}], "unhealthyTaints": ["*"]}

    async def story() -> None:
        world = await trains(everything)
        change(world, 2, taints=frozenset({("node.kubernetes.io/unschedulable", "", "NoSchedule")}))
        await world.settle()
        assert attempts(world) == [0, 0, 0]
        change(world, 2, conditions=frozenset({("Cable[0]?", "True")}))
        await world.settle()
        assert attempts(world) == [0, 0, 1]

    asyncio.run(story())


def test_of_ill_nodes_one_is_left_after_the_other_and_the_minimum_stays() -> None:
    async def story() -> None:
        world = await trains()
        for replica in range(3):
            change(world, replica, conditions=GPU_MISSING)
        for expected in ([1, 0, 0], [1, 1, 0], [1, 1, 1]):
            await world.settle()
            assert attempts(world) == expected
            assert world.job.status.ready_replicas == 2
            await comes_back(world)
        await world.settle()
        assert attempts(world) == [1, 1, 1]

    asyncio.run(story())


# --- cordoned ---------------------------------------------------------------------------------------------------------


def test_a_cordoned_node_keeps_its_replica_unless_the_user_says_otherwise() -> None:
    async def story() -> None:
        for policy, expected in (({}, [0, 0, 0]), (MIGRATE, [0, 0, 1])):
            world = await trains(policy)
            change(world, 2, unschedulable=True)
            await world.settle()
            assert attempts(world) == expected

    asyncio.run(story())


@pytest.mark.parametrize(("spec", "moves"), [({"minReplicas": 3}, False), ({"minReplicas": 3, "spares": 1}, True)])
def test_a_planned_move_never_leaves_fewer_than_the_minimum(spec: dict[str, Any], moves: bool) -> None:
    async def story() -> None:
        world = await trains(MIGRATE, **spec)
        change(world, 1, unschedulable=True)
        await world.settle()
        assert (1 in attempts(world)) is moves

    asyncio.run(story())


@pytest.mark.parametrize("why", ["the coordinator is silent", "the job is paused", "another one has just failed"])
def test_a_planned_move_waits_while(why: str) -> None:
    async def story() -> None:
        world = await trains(MIGRATE, minReplicas=1)
        if why == "another one has just failed":
            world.exits("r1-a0-0", 1)
            await world.settle()
        change(world, 2, unschedulable=True)
        assert world.coordinator is not None
        if why == "the coordinator is silent":
            world.coordinator = None
        if why == "the job is paused":
            world.coordinator = world.coordinator.model_copy(update={"paused": True})
        await world.settle()
        assert entry(world).attempt == 0
        if why == "another one has just failed":
            world.now += MOVE_PATIENCE  # it may never come, and the node is to be empty some day
        else:
            world.everybody_trains()
        await world.settle()
        assert entry(world).attempt == 1

    asyncio.run(story())


def test_who_does_not_train_yet_leaves_first_and_costs_nobody_anything() -> None:
    async def story() -> None:
        world = World(manifest(nodePolicy=MIGRATE, minReplicas=3))
        await world.settle()
        world.kubelets_start_everything()
        settle_in(world)
        await world.settle()
        change(world, 1, unschedulable=True)
        await world.settle()
        assert attempts(world) == [0, 0, 0]  # without a coordinator nobody knows whether it trains by now
        world.coordinator = Status(epoch=0, paused=False, finished=False, step=0, loss=None, replicas=())
        await world.settle()
        assert attempts(world) == [0, 1, 0]

    asyncio.run(story())


def test_who_comes_back_to_a_node_that_it_left_stays_there_for_a_while() -> None:
    async def story() -> None:
        world = await trains(MIGRATE)  # its pods tolerate every taint, say
        change(world, 2, unschedulable=True)
        await world.settle()
        await comes_back(world)
        settle_in(world)
        await world.settle()
        assert entry(world).attempt == 1
        world.now += 3600
        await world.settle()
        assert entry(world).attempt == 2

    asyncio.run(story())


def test_who_found_no_place_but_an_avoided_node_stays_there() -> None:
    async def story() -> None:
        world = await trains()
        for replica in (1, 2):
            change(world, replica, conditions=GPU_MISSING)
        await world.settle()
        await comes_back(world)
        for name in ("r1-a1-0", "r1-a1-1"):  # replica 1 has left its node, and goes where replica 2 was
            world.pod(name)["spec"]["nodeName"] = "node-r2"
            world.pod(name)["metadata"]["creationTimestamp"] = format_time(world.now)
        await world.settle()
        assert attempts(world) == [0, 1, 1]
        await comes_back(world)
        for name in ("r2-a1-0", "r2-a1-1"):
            world.pod(name)["spec"]["nodeName"] = "node-r1"
            world.pod(name)["metadata"]["creationTimestamp"] = format_time(world.now)
        world.now += 60
        await world.settle()
        assert entry(world, 2).attempt == 1
        assert {it.name for it in world.job.status.avoided_nodes} == {"node-r1", "node-r2"}

    asyncio.run(story())


def test_who_would_have_to_wait_for_its_next_start_leaves_when_it_has_been_stable() -> None:
    async def story() -> None:
        world = await trains(MIGRATE)
        world.exits("r2-a0-0", 1)
        await world.settle()
        await comes_back(world)
        settle_in(world)
        change(world, 2, unschedulable=True)
        world.now += 599
        await world.settle()
        assert entry(world).attempt == 1
        world.now += 1
        await world.settle()
        assert (entry(world).attempt, entry(world).state) == (2, ReplicaState.STARTING)

    asyncio.run(story())


def test_a_node_that_is_lost_while_its_replica_leaves_it_holds_up_nobody() -> None:
    async def story() -> None:
        world = await trains({**MIGRATE, "forceDelete": True})
        change(world, 2, unschedulable=True)
        await world.settle()
        not_ready(world, 2, seconds=0)
        world.now += 60
        unheard(world, 2)
        await world.settle()
        assert attempts(world) == [0, 0, 1]
        assert ("Pod", f"{NAME}-r2-a0-0") not in world.objects
        world.kubelets_start_everything()
        world.everybody_trains()
        await world.settle()
        assert (entry(world).state, world.job.status.restarts) == (ReplicaState.ACTIVE, 1)

    asyncio.run(story())


def test_a_replica_that_does_not_leave_in_its_grace_period_is_declared_gone() -> None:
    async def story() -> None:
        world = await trains(MIGRATE)
        change(world, 2, unschedulable=True)
        await world.settle()
        assert world.told == []
        world.now += GRACE
        await world.settle()
        assert [(it.replica, it.attempt) for it in world.told] == [(2, 0)]

    asyncio.run(story())


def test_a_rule_may_say_something_else_about_nodes() -> None:
    async def story() -> None:
        rules = [{"name": "broken", "onPodReasons": ["NodeUnhealthy"], "action": "AbandonReplica"}]
        world = await trains(failurePolicy={"rules": rules})
        change(world, 2, conditions=GPU_MISSING)
        await world.settle()
        assert entry(world).state is ReplicaState.ABANDONED

    asyncio.run(story())


# --- avoided ----------------------------------------------------------------------------------------------------------


def job(*faults: NodeFaults, avoided: tuple[AvoidedNode, ...] = (), pods: int = 2, **avoid: Any) -> Job:
    parsed = parse_job(manifest(nodePolicy={"avoid": {"ttlSeconds": 100, **avoid}}, podsPerReplica=pods))
    status = parsed.status.model_copy(update={"node_faults": faults, "avoided_nodes": avoided})
    return parsed.model_copy(update={"status": status})


def fault(reason: str, node: str | None = "a") -> Failure:
    return Failure(pod=f"{NAME}-r2-a0-0", node=node, reason=reason, message="so it is", time=NOW)


def faults(name: str, *ago: float) -> NodeFaults:
    return NodeFaults(name=name, times=tuple(NOW - it for it in ago))


def shunned(name: str, *, left: float = 50.0) -> AvoidedNode:
    return AvoidedNode(name=name, since=NOW + left - 100, until=NOW + left, why="")


@pytest.mark.parametrize(
    ("reason", "pods", "known", "remembered", "avoided"),
    [
        ("NodeLost", 2, (), ["a"], []),
        ("NodeLost", 2, (99,), [], ["a"]),
        ("NodeLost", 2, (100,), ["a"], []),
        ("NodeUnhealthy", 2, (), [], ["a"]),
        ("UnexpectedAdmissionError", 2, (5,), [], ["a"]),
        ("Silent", 2, (5,), [], ["a"]),
        ("Frozen", 1, (5,), [], ["a"]),
        ("StateDiverged", 1, (5,), [], ["a"]),
        ("Hung", 1, (5,), [], ["a"]),
        # nobody says which of its pods it was
        ("Frozen", 2, (5,), ["a"], []),
        # these say nothing of the machine
        ("Error", 1, (5,), ["a"], []),
        ("OOMKilled", 1, (5,), ["a"], []),
        ("NodeCordoned", 1, (5,), ["a"], []),
        ("PodDeleted", 1, (5,), ["a"], []),
    ],
)
def test_a_node_is_avoided_after_enough_failures_of_the_machines_kind(
    reason: str, pods: int, known: tuple[float, ...], remembered: list[str], avoided: list[str]
) -> None:
    before = job(*([faults("a", *known)] if known else []), pods=pods)
    after = remembering(before, [None, fault(reason), fault("NodeLost", node=None)], NOW).status
    assert [it.name for it in after.node_faults] == remembered
    assert [(it.name, it.since, it.until) for it in after.avoided_nodes] == [(it, NOW, NOW + 100) for it in avoided]


def test_why_a_node_is_avoided_stands_in_the_status_and_in_an_event() -> None:
    async def story() -> None:
        world = await trains({"avoid": {"threshold": 1}})
        assert world.coordinator is not None
        silent = Verdict(replica=2, attempt=0, cause=Cause.SILENT, reason="nothing was heard of it for 5 s")
        world.coordinator = world.coordinator.model_copy(update={"verdicts": (silent,)})
        await world.settle()
        (node,) = world.job.status.avoided_nodes
        assert (node.name, node.until - node.since) == ("node-r2", 3600)
        assert node.why == ("1 failure within 3600 s, last: llama-r2-a0-0 Silent: nothing was heard of it for 5 s")
        assert [event.message for event in world.events if event.reason == "NodeAvoided"] == [
            f"node node-r2: {node.why}"
        ]
        (term,) = world.pod("r2-a1-0")["spec"]["affinity"]["nodeAffinity"][PREFERRED]
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": ["node-r2"]}]
        assert term == {"weight": 100, "preference": {"matchFields": fields}}
        assert "affinity" not in world.pod("r1-a0-0")["spec"]
        world.now += 3600
        await world.settle()
        assert world.job.status.avoided_nodes == ()

    asyncio.run(story())


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("avoid", "left", "names"),
    [
        ({}, 50.0, ["old", "a"]),
        ({}, 0.0, ["a"]),
        ({"maxNodes": 1}, 50.0, ["a"]),
        ({"mode": "None"}, 50.0, []),
    ],
)
def test_nodes_are_avoided_for_a_time_and_only_so_many(avoid: dict[str, Any], left: float, names: list[str]) -> None:
    after = remembering(job(avoided=(shunned("old", left=left),), **avoid), [fault("NodeUnhealthy")], NOW).status
    assert [it.name for it in after.avoided_nodes] == names


def test_a_node_that_fails_again_is_avoided_anew_and_is_the_newest() -> None:
    before = job(avoided=(shunned("a"), shunned("b")), maxNodes=2)
    after = remembering(before, [fault("NodeUnhealthy")], NOW).status
    assert [(it.name, it.until) for it in after.avoided_nodes] == [("b", NOW + 50), ("a", NOW + 100)]


def test_what_is_remembered_is_bounded() -> None:
    many = [faults(f"n{number}", 1) for number in range(200)]
    after = remembering(job(*many), [fault("NodeLost", node="new")], NOW).status
    assert (len(after.node_faults), after.node_faults[-1].name) == (64, "new")


def test_avoiding_leaves_the_templates_own_affinity_as_it_is() -> None:
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}
    mine = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}
    affinity = {
        "podAffinity": {PREFERRED: []},
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required, PREFERRED: [mine]},
    }
    of = job(avoided=(shunned("a"), shunned("b")))
    of.spec.template["spec"]["affinity"] = affinity
    made = training_pod(of, replica=0, attempt=0, index=0)["spec"]["affinity"]
    assert made["podAffinity"] == affinity["podAffinity"]
    assert made["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == required
    assert made["nodeAffinity"][PREFERRED][0] == mine
    named = made["nodeAffinity"][PREFERRED][1]["preference"]["matchFields"]
    assert [it["values"] for it in named] == [["a"], ["b"]]  # the API takes one name in each
    assert affinity["nodeAffinity"][PREFERRED] == [mine]


def test_a_coordinator_gets_its_new_numbers_although_a_pod_that_was_scaled_away_never_goes() -> None:
    async def story() -> None:
        world = World(manifest(replicas=3, minReplicas=1))
        await world.train()
        first = world.objects["Pod", f"{NAME}-coordinator"]["metadata"]["uid"]
        world.user_changes(replicas=2)
        await world.settle()
        assert ("Pod", f"{NAME}-r2-a0-0") in world.objects  # it is asked to leave
        assert world.objects["Pod", f"{NAME}-coordinator"]["metadata"]["uid"] == first
        world.now += GRACE + OVERDUE  # its node is gone: nobody will say that it has ended
        await world.settle()
        assert ("Pod", f"{NAME}-r2-a0-0") in world.objects
        there = world.objects.get(("Pod", f"{NAME}-coordinator"))
        assert there is None or "deletionTimestamp" in there["metadata"] or there["metadata"]["uid"] != first

    asyncio.run(story())
