"""A crashed process is restarted in the pods that its replica has, once; for everything else pods are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.unit.operator.world import NAME, NAMESPACE, Killed, World, manifest, template

from fthsdp.coordinator.messages import Cause, Verdict
from fthsdp.errors import ConfigError
from fthsdp_operator.api import ATTEMPT_LABEL, JobState, ReplicaState, ReplicaStatus, format_time, parse_job
from fthsdp_operator.cluster import Manifest, Refused
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import NodeView, observe
from fthsdp_operator.rules.actions import Label
from fthsdp_operator.rules.plan import plan

OLD = {"r2-a0-0", "r2-a0-1"}
NEW = {"r2-a1-0", "r2-a1-1"}


def job(**policy: Any) -> dict[str, Any]:
    return manifest(failurePolicy={"inPlace": {}, **policy})


def entry(world: World, replica: int = 2) -> ReplicaStatus:
    found = world.job.status.replica(replica)
    assert found is not None
    return found


def of_replica_2(world: World) -> set[str]:
    return {name for name in world.pods if name.startswith("r2")}


def labels(world: World) -> list[str]:
    pods = (world.pod(name) for name in sorted(of_replica_2(world)))
    return [pod["metadata"]["labels"][ATTEMPT_LABEL] for pod in pods]


async def crashed(world: World, code: int = 1, *, pod: str = "r2-a0-1") -> None:
    await world.train()
    world.launcher_says(pod, code, words="Traceback …\nValueError: boom")
    world.writes.clear()


def test_a_crashed_replica_is_restarted_in_its_pods_and_no_other_is_touched() -> None:
    async def story() -> None:
        world = World(job())
        await crashed(world)
        before = world.pods
        await world.look()
        assert world.writes == [
            "status",
            "tell 2",
            f"label Pod {NAME}-r2-a0-0 1",
            f"label Pod {NAME}-r2-a0-1 1",
        ]
        await world.settle()
        assert world.pods == before
        now = entry(world)
        assert (now.attempt, now.named_after, now.restarts, now.state) == (1, 0, 1, ReplicaState.STARTING)
        world.everybody_trains()
        await world.settle()
        assert world.job.status.state is JobState.RUNNING
        assert world.pods == before

    asyncio.run(story())


def test_a_crash_in_place_reads_as_if_the_container_had_ended() -> None:
    async def story() -> None:
        world = World(job())
        await crashed(world, 7)
        await world.settle()
        why = entry(world).last_failure
        assert why is not None
        assert (why.pod, why.node, why.container, why.exit_code, why.reason) == (
            f"{NAME}-r2-a0-1", "node-1", "train", 7, "Error"
        )  # fmt: skip
        assert why.message.endswith("ValueError: boom")
        assert len(entry(world).recent_restarts) == 1
        said = next(event.message for event in world.events if event.reason == "ReplicaFailed")
        assert said.endswith("ValueError: boom; attempt 1 starts now in its pods")

    asyncio.run(story())


def test_a_process_that_was_killed_for_its_memory_reads_as_a_container_that_was_and_gets_new_pods() -> None:
    async def story() -> None:
        world = World(job())
        await world.train()
        world.launcher_says("r2-a0-1", 137, oom_killed=True)
        await world.settle()
        assert of_replica_2(world) == NEW
        why = entry(world).last_failure
        assert why is not None
        assert (why.pod, why.container, why.exit_code, why.reason) == (f"{NAME}-r2-a0-1", "train", 137, "OOMKilled")

    asyncio.run(story())


@pytest.mark.parametrize(("container", "state"), [(None, JobState.FAILED), ("train", JobState.FAILED), ("other", None)])
def test_rules_by_exit_code_hear_of_a_crash_in_place(container: str | None, state: JobState | None) -> None:
    async def story() -> None:
        codes = {"operator": "In", "values": [42], **({"containerName": container} if container else {})}
        given = job(rules=[{"name": "shard", "onExitCodes": codes, "action": "FailJob"}])
        given["spec"]["template"]["spec"]["containers"].append({"name": "other", "image": "x"})
        world = World(given)
        await crashed(world, 42)
        await world.settle()
        assert world.job.status.state is (state or JobState.DEGRADED)

    asyncio.run(story())


def second_crash(world: World) -> None:
    world.launcher_says("r2-a0-0", 1)


def container_ends(world: World) -> None:
    world.exits("r2-a0-0", 1)


def pod_is_deleted(world: World) -> None:
    world.user_deletes("r2-a0-1")


def rank_hangs(world: World) -> None:
    assert world.coordinator is not None
    hung = Verdict(replica=2, attempt=1, cause=Cause.HUNG, reason="rank 1 never joined step 11")
    world.coordinator = world.coordinator.model_copy(update={"verdicts": (hung,)})


@pytest.mark.parametrize("fault", [second_crash, container_ends, pod_is_deleted, rank_hangs])
def test_what_fails_again_before_it_was_stable_gets_new_pods(fault: Callable[[World], None]) -> None:
    async def story() -> None:
        world = World(job(backoff={"initialSeconds": 0}))
        await crashed(world)
        await world.settle()
        world.everybody_trains()
        await world.settle()
        fault(world)
        await world.settle()
        assert of_replica_2(world) == {"r2-a2-0", "r2-a2-1"}
        assert entry(world).pods_attempt is None
        why = entry(world).last_failure
        assert why is not None
        assert why.pod.startswith(f"{NAME}-r2-a0-")

    asyncio.run(story())


def test_a_restart_in_place_that_never_came_about_is_no_second_failure() -> None:
    async def story() -> None:
        world = World(job(perReplica={"limit": 1}, onExhausted="FailJob", backoff={"initialSeconds": 0}))
        await crashed(world, 75)  # since the container of the other pod was killed, of which no kubelet has told yet
        await world.settle()
        assert labels(world) == ["1", "1"]
        world.exits("r2-a0-0", 137, reason="OOMKilled")
        await world.settle()
        assert of_replica_2(world) == {"r2-a2-0", "r2-a2-1"}
        now = entry(world)
        assert (len(now.recent_restarts), now.restarts) == (1, 2)
        assert now.last_failure is not None
        assert (now.last_failure.reason, now.last_failure.action) == ("OOMKilled", "RestartReplicaFree")

    asyncio.run(story())


def test_a_replica_that_was_stable_is_restarted_in_its_pods_again() -> None:
    async def story() -> None:
        world = World(job())
        await crashed(world)
        await world.settle()
        world.everybody_trains()
        await world.settle()
        world.now += 601
        world.launcher_says("r2-a0-0", 1)
        await world.settle()
        assert of_replica_2(world) == OLD
        assert labels(world) == ["2", "2"]
        assert (entry(world).attempt, entry(world).named_after) == (2, 0)

    asyncio.run(story())


def evicted(world: World) -> None:
    world.pod("r2-a0-0")["status"]["reason"] = "Evicted"


def unplaced(world: World) -> None:
    world.pod("r2-a0-0")["status"]["phase"] = "Pending"


def without_a_launcher(world: World) -> None:
    world.exits("r2-a0-1", 1)


def switched_off(world: World) -> None:
    world.user_changes(failurePolicy={})
    world.launcher_says("r2-a0-1", 1)


def has_another_template(world: World) -> None:
    world.user_changes(template=template())


@pytest.mark.parametrize(
    "fault", [evicted, unplaced, without_a_launcher, switched_off, pod_is_deleted, has_another_template]
)
def test_pods_are_replaced_where_one_is_not_as_it_was(fault: Callable[[World], None]) -> None:
    async def story() -> None:
        world = World(job())
        await world.train()
        if fault not in (without_a_launcher, switched_off):
            world.launcher_says("r2-a0-1", 1)
        fault(world)
        await world.settle()
        assert of_replica_2(world) == NEW

    asyncio.run(story())


@pytest.mark.parametrize(("ready", "stays"), [("True", True), ("False", False), ("Unknown", False)])
def test_pods_stay_only_on_nodes_that_are_ready(ready: str, stays: bool) -> None:
    async def story() -> None:
        world = World(job())
        await crashed(world)
        pods = await world.list_pods(NAMESPACE, NAME)
        nodes = {"node-1": NodeView(name="node-1", ready=ready)}
        seen = observe(
            world.job, pods, nodes=nodes, coordinator=world.coordinator, fresh_key="k", coordinator_image="x"
        )
        actions = plan(world.job, seen, world.now).actions
        assert any(isinstance(action, Label) for action in actions) is stays

    asyncio.run(story())


GPU_MISSING = frozenset({("Ready", "True"), ("GPUMissing", "True")})


@pytest.mark.parametrize(
    ("node", "policy", "stays"),
    [
        ({"conditions": GPU_MISSING}, {}, False),
        ({"conditions": GPU_MISSING}, {"unhealthyConditions": []}, True),
        ({"unschedulable": True}, {}, True),
        ({"unschedulable": True}, {"onCordon": "Migrate"}, False),
    ],
)
def test_a_replica_that_crashes_on_a_node_that_it_is_to_leave_leaves_it_at_once(
    node: dict[str, Any], policy: dict[str, Any], stays: bool
) -> None:
    async def story() -> None:
        given = job()
        given["spec"] |= {"nodePolicy": policy, "minReplicas": 3}  # so that it has not left before
        world = World(given)
        await crashed(world)
        world.node_views["node-1"] = NodeView(name="node-1", ready="True", **node)
        await world.settle()
        assert of_replica_2(world) == (OLD if stays else NEW)
        why = entry(world).last_failure
        assert why is not None
        assert (why.reason, why.exit_code, len(entry(world).recent_restarts)) == ("Error", 1, 1)
        ill = "conditions" in node and not stays
        assert [it.name for it in world.job.status.avoided_nodes] == (["node-1"] if ill else [])

    asyncio.run(story())


def test_who_came_back_to_a_node_because_there_is_no_other_is_restarted_in_its_pods_there() -> None:
    async def story() -> None:
        world = World(job())
        await world.train()
        for pod in OLD:
            world.pod(pod)["spec"]["nodeName"] = "ill"
        world.node_views["ill"] = NodeView(name="ill", ready="True", conditions=GPU_MISSING)
        await world.settle()
        assert of_replica_2(world) == NEW
        for pod in OLD:
            world.vanish(pod)
        await world.train()
        for pod in NEW:
            world.pod(pod)["spec"]["nodeName"] = "ill"
            world.pod(pod)["metadata"]["creationTimestamp"] = format_time(world.now)
        world.now += 601
        await world.settle()
        world.launcher_says("r2-a1-0", 1)
        await world.settle()
        assert (of_replica_2(world), entry(world).pods_attempt) == (NEW, 1)

    asyncio.run(story())


def lost_node(world: World, *, since: float) -> None:
    world.pod("r2-a0-0")["spec"]["nodeName"] = "lost"
    world.node_views["lost"] = NodeView(name="lost", ready="Unknown", not_ready_since=since)


@pytest.mark.parametrize("code", [1, 75])
def test_a_crash_that_turns_out_to_be_the_loss_of_a_node_is_moved_at_once_and_costs_nothing(code: int) -> None:
    async def story() -> None:
        world = World(job())
        await crashed(world, code)  # it misses the other pod, whose node is called not Ready 40 s later
        await world.settle()
        assert (of_replica_2(world), len(entry(world).recent_restarts)) == (OLD, 1)
        world.now += 40
        lost_node(world, since=world.now)
        await world.settle()
        now = entry(world)
        assert of_replica_2(world) == {"r2-a2-0", "r2-a2-1"}  # without a wait, as after a first failure
        assert (now.attempt, now.recent_restarts, now.restarts_in_a_row) == (2, (), 1)
        assert now.last_failure is not None
        assert (now.last_failure.reason, now.last_failure.pod, now.last_failure.node, now.last_failure.action) == (
            "NodeLost", f"{NAME}-r2-a0-0", "lost", "RestartReplicaFree"
        )  # fmt: skip

    asyncio.run(story())


@pytest.mark.parametrize("case", ["it is heard", "nobody answers", "another loss"])
def test_a_restart_in_place_goes_on_while(case: str) -> None:
    async def story() -> None:
        world = World(job())
        await crashed(world)
        await world.settle()
        if case == "it is heard":
            world.everybody_trains()
        if case == "nobody answers":
            world.coordinator = None
        world.now += 40
        lost_node(world, since=world.now + (121 if case == "another loss" else 0))
        world.now += 1
        await world.settle()
        assert (of_replica_2(world), entry(world).attempt) == (OLD, 1)

    asyncio.run(story())


@pytest.mark.parametrize("calls", range(1, 5))
def test_an_operator_that_is_killed_on_the_way_leads_to_the_same_end(calls: int) -> None:
    async def story() -> None:
        world = World(job())
        await crashed(world)
        world.kill_at = calls
        with pytest.raises(Killed):
            await world.settle()
        world.kill_at = None
        await world.settle()
        assert of_replica_2(world) == OLD
        assert labels(world) == ["1", "1"]
        assert (entry(world).attempt, entry(world).restarts) == (1, 1)

    asyncio.run(story())


def test_a_pod_that_goes_before_it_was_told_is_a_failure_of_the_new_attempt() -> None:
    async def story() -> None:
        world = World(job(backoff={"initialSeconds": 0}))
        await crashed(world)
        world.kill_at = 1  # the status is written, no label is
        with pytest.raises(Killed):
            await world.look()
        world.kill_at = None
        world.vanish("r2-a0-0")
        await world.settle()
        assert of_replica_2(world) == {"r2-a2-0", "r2-a2-1"}

    asyncio.run(story())


class Stubborn(World):
    """Labels that are set do not show."""

    async def label_pod(self, namespace: str, name: str, labels: Mapping[str, str], *, uid: str) -> None:
        self.writes.append(f"label Pod {name}")


def test_pods_are_told_again_until_it_shows_and_nothing_is_created_meanwhile() -> None:
    async def story() -> None:
        world = Stubborn(job())
        await crashed(world)
        for _ in range(3):
            await world.look()
        assert of_replica_2(world) == OLD
        assert world.writes.count(f"label Pod {NAME}-r2-a0-0") == 3
        assert entry(world).attempt == 1

    asyncio.run(story())


def test_a_suspended_and_resumed_job_has_pods_of_its_own_again() -> None:
    async def story() -> None:
        world = World(job())
        await crashed(world)
        await world.settle()
        world.user_changes(suspend=True)
        await world.settle()
        for name in list(world.pods):
            world.vanish(name)
        world.user_changes(suspend=False)
        await world.settle()
        assert of_replica_2(world) == {"r2-a2-0", "r2-a2-1"}
        assert entry(world).pods_attempt is None

    asyncio.run(story())


def port(world: World, name: str) -> str:
    env = {it["name"]: it.get("value") for it in world.pod(name)["spec"]["containers"][0]["env"]}
    return str(env["MASTER_PORT"])


@pytest.mark.parametrize("times", [1, 2])
def test_on_the_network_of_a_node_new_pods_have_other_ports_than_those_that_may_still_be_there(times: int) -> None:
    async def story() -> None:
        given = job()
        given["spec"]["template"]["spec"]["hostNetwork"] = True
        world = World(given)
        await world.train()
        for _ in range(times):
            world.launcher_says("r2-a0-1", 1)
            await world.settle()
            world.everybody_trains()
            await world.settle()
            world.now += 601
        assert (entry(world).attempt, entry(world).restarts_in_place) == (times, times)
        world.exits("r2-a0-0", 1)
        await world.settle()
        new = f"r2-a{times + 1}"
        assert of_replica_2(world) == {f"{new}-0", f"{new}-1"}
        assert (port(world, "r2-a0-1"), port(world, f"{new}-0"), port(world, f"{new}-1")) == ("29508", "29510", "29510")

    asyncio.run(story())


# --- the pod --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "python"),
    [
        (["python", "train.py"], "python"),
        (["/opt/conda/bin/python3", "-u", "-m", "train"], "/opt/conda/bin/python3"),
        (["torchrun", "train.py"], "python"),
    ],
)
def test_the_launcher_is_run_by_the_interpreter_of_the_command(command: list[str], python: str) -> None:
    given = job(inPlace={"preload": ["torch", "my.models"]})
    container = given["spec"]["template"]["spec"]["containers"][0]
    container |= {"command": command, "args": ["--steps", "5"]}
    pod = render.training_pod(parse_job(given), replica=2, attempt=3, index=0)
    trainer = pod["spec"]["containers"][0]
    assert trainer["command"] == [python, "-m", "fthsdp.launcher", "--", *command]
    assert trainer["args"] == ["--steps", "5"]
    env = {it["name"]: it.get("value") for it in trainer["env"]}
    assert env["FTHSDP_PRELOAD"] == "torch,my.models"
    file = env["FTHSDP_ATTEMPT_FILE"]
    assert file is not None
    (mount,) = (it for it in trainer["volumeMounts"] if file.startswith(it["mountPath"] + "/"))
    (volume,) = (it for it in pod["spec"]["volumes"] if it["name"] == mount["name"])
    (item,) = volume["downwardAPI"]["items"]
    assert file == f"{mount['mountPath']}/{item['path']}"
    assert item["fieldRef"]["fieldPath"] == f"metadata.labels['{ATTEMPT_LABEL}']"


def test_only_the_first_container_has_a_launcher_and_none_has_where_nobody_asked() -> None:
    given = job()
    given["spec"]["template"]["spec"]["containers"].append({"name": "logs", "image": "x", "command": ["tail"]})
    pod = render.training_pod(parse_job(given), replica=0, attempt=0, index=0)
    assert pod["spec"]["containers"][1]["command"] == ["tail"]
    plain = render.training_pod(parse_job(manifest()), replica=0, attempt=0, index=0)
    assert plain["spec"]["containers"][0]["command"] == ["train"]
    assert [volume["name"] for volume in plain["spec"]["volumes"]] == ["fthsdp-key", "fthsdp-shm"]


def test_a_template_without_a_command_is_refused() -> None:
    given = job()
    del given["spec"]["template"]["spec"]["containers"][0]["command"]
    with pytest.raises(ConfigError, match=r"spec\.failurePolicy\.inPlace needs the command of the first container"):
        parse_job(given)


@pytest.mark.parametrize("name", ["", "my model", "torch;import os", "a,b", ".torch", "torch."])
def test_what_cannot_be_a_module_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"spec\.failurePolicy\.inPlace\.preload\[0\]"):
        parse_job(job(inPlace={"preload": [name]}))


class Full(World):
    """A namespace that takes no more pods once it is full."""

    full = False

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        if self.full and manifest["kind"] == "Pod":
            raise Refused("exceeded quota: pods")
        return await super().create(manifest)


def test_pods_are_told_to_start_again_though_pods_of_another_replica_are_refused() -> None:
    async def story() -> None:
        world = Full(job())
        await world.train()
        world.full = True
        world.vanish("r1-a0-0")
        world.launcher_says("r2-a0-1", 1)
        with pytest.raises(Refused):
            await world.settle()
        assert labels(world) == ["1", "1"]

    asyncio.run(story())
