"""What can happen to a job and its cluster, as data: a run is replayed from a seed and a list of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random

from tests.simulation.operator.nodes import BAD_IMAGES, Node, Process
from tests.simulation.operator.server import name_of, uid_of
from tests.simulation.operator.world import World

from fthsdp.coordinator.messages import Cause
from fthsdp.exit_codes import EXIT_CONFIG
from fthsdp_operator.api import REPLICA_LABEL
from fthsdp_operator.cluster import Manifest

__all__ = ["CHANGES", "MACHINES", "Fault", "Kind", "faults_of", "random_faults"]


class Kind(StrEnum):
    """What happens."""

    # containers and pods
    EXIT = "exit"
    CRASH = "crash"
    EXIT_WITH_ZERO = "exit-with-zero"
    CONFIG_ERROR = "config-error"
    OUT_OF_MEMORY = "out-of-memory"
    DELETE_POD = "delete-pod"
    FORCE_DELETE = "force-delete"
    DELETE_GROUP = "delete-group"
    EVICT = "evict"
    DRAIN = "drain"
    REFUSE_PODS = "refuse-pods"
    BREAK_IMAGES = "break-images"
    FREEZE = "freeze"
    HANG_AT_START = "hang-at-start"
    # nodes
    CUT_NODE = "cut-node"
    UNPLUG_NODE = "unplug-node"
    REMOVE_NODE = "remove-node"
    CORDON = "cordon"
    ILL_NODE = "ill-node"
    LIE_ABOUT_NODE = "lie-about-node"
    LIE_ABOUT_ALL = "lie-about-all"
    FILL = "fill"
    # the operator and its API server
    KILL_OPERATOR = "kill-operator"
    SECOND_OPERATOR = "second-operator"
    LOSE_EVENTS = "lose-events"
    LATE_EVENTS = "late-events"
    SLOW_CALLS = "slow-calls"
    BREAK_API = "break-api"
    # the coordinator
    CRASH_COORDINATOR = "crash-coordinator"
    DELETE_COORDINATOR = "delete-coordinator"
    MUTE_COORDINATOR = "mute-coordinator"
    DIVERGE = "diverge"
    HANG = "hang"
    # the user
    SCALE = "scale"
    CHANGE_SPARES = "change-spares"
    SUSPEND = "suspend"
    CHANGE_TEMPLATE = "change-template"
    BREAK_TEMPLATE = "break-template"
    CHANGE_UPDATES = "change-updates"
    DELETE_JOB = "delete-job"
    DELETE_IN_FOREGROUND = "delete-in-foreground"
    CREATE_ANEW = "create-anew"
    DELETE_SUPPORT = "delete-support"


OFTEN = (Kind.EXIT, Kind.CRASH, Kind.DELETE_POD, Kind.FORCE_DELETE, Kind.SCALE, Kind.KILL_OPERATOR)
CROSSFIRE = [
    Kind.EXIT,
    Kind.CRASH,
    Kind.DELETE_GROUP,
    Kind.SCALE,
    Kind.CHANGE_TEMPLATE,
    Kind.SECOND_OPERATOR,
    Kind.SLOW_CALLS,
    Kind.LATE_EVENTS,
]
"""What users and operators do to each other while replicas fail."""
CHANGES = [Kind.CHANGE_TEMPLATE, Kind.BREAK_TEMPLATE, Kind.CHANGE_UPDATES, Kind.SUSPEND, Kind.SCALE, Kind.EXIT]
"""What a user does to a job who has changed his mind."""
MACHINES = [
    Kind.CRASH,
    Kind.CRASH,
    Kind.CORDON,
    Kind.ILL_NODE,
    Kind.CUT_NODE,
    Kind.UNPLUG_NODE,
    Kind.LIE_ABOUT_NODE,
    Kind.KILL_OPERATOR,
]
"""What happens to machines, and to what runs on them."""
FINAL = (Kind.DELETE_JOB, Kind.DELETE_IN_FOREGROUND, Kind.CREATE_ANEW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that happens."""

    at: float
    """Simulated seconds after the job was created."""
    kind: Kind
    number: int = 0
    """Says to which of those who can be hit, or how much."""
    seconds: float = 10.0
    """How long it lasts, if it lasts."""

    def __str__(self) -> str:
        return f"{self.kind}({self.number}) at {self.at:g} s for {self.seconds:g} s"

    def __call__(self, world: World) -> None:
        """Let it happen."""
        world.note(f"--- {self}")
        world.happened[self.kind] += 1
        _ACTS[self.kind](world, self)


def random_faults(random: Random, *, most: int, until: float) -> list[Fault]:
    """Return up to ``most`` faults, many of them close upon each other; what ends a job is rare.

    Often they are of a few kinds only, so that it is not always something else that happens first.
    """
    some = random.sample(list(Kind), random.choice([3, 6, 12, len(Kind)]))
    kinds = random.choice([CROSSFIRE, CROSSFIRE, CHANGES, some, some])
    return faults_of(kinds, random, most=most, until=until)


def faults_of(kinds: Sequence[Kind], random: Random, *, most: int, until: float) -> list[Fault]:
    """Return up to ``most`` faults of these kinds within so many seconds."""
    weights = [0.2 if kind in FINAL else 3.0 if kind in OFTEN else 1.0 for kind in kinds]
    faults, at = [], 0.0
    for _ in range(random.randint(most // 2, most)):
        at += random.choice([0.0, 0.05, 0.5, 3.0, until / most])
        kind = random.choices(kinds, weights)[0]
        seconds = random.choice([1.0, 8.0, 40.0, 130.0])
        faults.append(Fault(at=round(at, 3), kind=kind, number=random.randrange(60), seconds=seconds))
    return faults


# --- containers and pods ----------------------------------------------------------------------------------------------


def _processes(world: World) -> list[Process]:
    nodes = world.nodes.all.values()
    alive = (it for node in nodes if node.reachable for it in node.processes.values() if it.alive)
    return sorted((it for it in alive if it.who is not None and it.job == world.job_uid), key=lambda it: it.pod)


def _pods(world: World) -> list[Manifest]:
    pods = (pod for pod in world.server.pods() if REPLICA_LABEL in pod["metadata"]["labels"])
    return sorted(pods, key=name_of)


def _exit(code: int) -> Callable[[World, Fault], None]:
    def act(world: World, fault: Fault) -> None:
        running = _processes(world)
        if running:
            process = running[fault.number % len(running)]
            world.gave_up |= code == 0
            world.nodes.ends_with(process, code)

    return act


def _crash(world: World, fault: Fault) -> None:
    """What a container runs ends; its launcher, where it has one, does not."""
    running = _processes(world)
    if running:
        world.nodes.command_ends(running[fault.number % len(running)], 1)


def _out_of_memory(world: World, fault: Fault) -> None:
    """The kernel kills the container as a whole; or, on a machine that is set up so, only what it runs."""
    running = _processes(world)
    if running:
        whole, place = divmod(fault.number, len(running))
        ends = world.nodes.ends_with if whole % 2 else world.nodes.command_ends
        ends(running[place], 137, "OOMKilled")


def _delete_pod(what: str, grace: int | None = None) -> Callable[[World, Fault], None]:
    def act(world: World, fault: Fault) -> None:
        pods = _pods(world)
        if pods:
            pod = pods[fault.number % len(pods)]
            world.happened_to(pod, what)
            world.server.delete("Pod", name_of(pod), grace=grace)

    return act


def _delete_group(world: World, fault: Fault) -> None:
    pods = _pods(world)
    if pods:
        chosen = pods[fault.number % len(pods)]["metadata"]["labels"][REPLICA_LABEL]
        for pod in pods:
            if pod["metadata"]["labels"][REPLICA_LABEL] == chosen:
                world.happened_to(pod, "a user deletes it")
                world.server.delete("Pod", name_of(pod))


def _evict(world: World, fault: Fault) -> None:
    running = _processes(world)
    if running:
        process = running[fault.number % len(running)]
        world.nodes.ends_with(process, 137, pod_reason="Evicted")


def _drain(world: World, fault: Fault) -> None:
    pods = _pods(world)
    if pods:
        pod = pods[fault.number % len(pods)]
        world.nodes.disrupt(pod, "EvictionByEvictionAPI")
        world.server.delete("Pod", name_of(pod))


def _refuse_pods(world: World, fault: Fault) -> None:
    world.nodes.refusals = 1 + fault.number % 2


def _break_images(world: World, fault: Fault) -> None:
    world.nodes.images_broken = True
    world.after(fault.seconds, setattr, world.nodes, "images_broken", False)


def _freeze(world: World, fault: Fault) -> None:
    groups = world.training.members()
    if groups:
        world.training.freeze(groups[fault.number % len(groups)])


def _hang_at_start(world: World, fault: Fault) -> None:
    world.training.hanging_starts = 1


# --- nodes ------------------------------------------------------------------------------------------------------------


def _node(world: World, fault: Fault) -> Node:
    """One on which something runs, most of the time."""
    busy = [node for node in world.nodes.all.values() if any(it.alive for it in node.processes.values())]
    nodes = busy if busy and fault.number % 4 else list(world.nodes.all.values())
    return nodes[fault.number % len(nodes)]


def _lose_node(world: World, fault: Fault, *, power: bool) -> None:
    node = _node(world, fault)
    world.nodes.lose(node, power=power, patience=30.0)
    world.after(fault.seconds, world.nodes.back, node)


def _cut_node(world: World, fault: Fault) -> None:
    _lose_node(world, fault, power=False)


def _unplug_node(world: World, fault: Fault) -> None:
    _lose_node(world, fault, power=True)


def _remove_node(world: World, fault: Fault) -> None:
    world.nodes.remove(_node(world, fault))


def _cordon(world: World, fault: Fault) -> None:
    world.nodes.cordon(_node(world, fault), fault.seconds)


def _ill_node(world: World, fault: Fault) -> None:
    world.nodes.fall_ill(_node(world, fault), fault.seconds)


def _lie_about_node(world: World, fault: Fault) -> None:
    world.nodes.lie(_node(world, fault), fault.seconds)


def _lie_about_all(world: World, fault: Fault) -> None:
    """The control plane loses sight of all nodes."""
    for node in world.nodes.all.values():
        world.nodes.lie(node, fault.seconds)


def _fill(world: World, fault: Fault) -> None:
    world.nodes.full = True
    world.after(fault.seconds, setattr, world.nodes, "full", False)


# --- the operator and its API server ----------------------------------------------------------------------------------


def _kill_operator(world: World, fault: Fault) -> None:
    """It dies before one of its next calls, and is started again some time after it has."""
    for operator in world.alive()[:1]:
        operator.dies_in = fault.number % 8
    _revive(world, fault.seconds / 4)


def _revive(world: World, pause: float) -> None:
    if world.job is not None and not world.alive():
        world.after(pause, _start_one, world)
    elif any(operator.dies_in is not None for operator in world.alive()):
        world.after(1.0, _revive, world, pause)


def _start_one(world: World) -> None:
    if not world.alive():
        world.start_operator()


def _second_operator(world: World, fault: Fault) -> None:
    world.start_operator()
    world.after(fault.seconds, _stop_one, world)


def _stop_one(world: World) -> None:
    alive = world.alive()
    if len(alive) > 1:
        alive[world.random.randrange(len(alive))].die()


def _lose_events(world: World, fault: Fault) -> None:
    for operator in world.alive():
        operator.hears_no_more()
        world.after(fault.seconds, partial(operator.hears_again, gap=fault.number % 2 == 0))


def _late_events(world: World, fault: Fault) -> None:
    for operator in world.alive()[fault.number % 2 :]:
        operator.late = 0.5 + fault.number % 7
        world.after(fault.seconds, setattr, operator, "late", 0.0)


def _slow_calls(world: World, fault: Fault) -> None:
    for operator in world.alive()[fault.number % 2 :]:
        operator.slow = 1.0
        world.after(fault.seconds, setattr, operator, "slow", 0.0)


def _break_api(world: World, fault: Fault) -> None:
    world.api_down = True
    world.after(fault.seconds, setattr, world, "api_down", False)


# --- the coordinator --------------------------------------------------------------------------------------------------


def _crash_coordinator(world: World, fault: Fault) -> None:
    there = world.training.reached()
    if there is not None:
        world.nodes.ends_with(there.process, 1)


def _delete_coordinator(world: World, fault: Fault) -> None:
    there = world.training.coordinator
    pod = None if there is None else world.server.pod(there.process.uid)
    if pod is not None:
        world.note("a user deletes the coordinator's pod")
        world.server.delete("Pod", name_of(pod), grace=0 if fault.number % 3 == 0 else None)


def _mute_coordinator(world: World, fault: Fault) -> None:
    world.mute = True
    world.after(fault.seconds, setattr, world, "mute", False)


def _verdict(cause: Cause) -> Callable[[World, Fault], None]:
    def act(world: World, fault: Fault) -> None:
        there, groups = world.training.reached(), world.training.members()
        if there is not None and groups:
            there.lose(*groups[fault.number % len(groups)].who, cause)

    return act


# --- the user ---------------------------------------------------------------------------------------------------------


def _scale(world: World, fault: Fault) -> None:
    if world.job is not None:
        replicas = 1 + fault.number % 5
        least = 1 if fault.number % 2 else min(replicas, world.job["spec"]["minReplicas"])
        world.change(replicas=replicas, minReplicas=least)


def _change_spares(world: World, fault: Fault) -> None:
    world.change(spares=fault.number % 3)


def _suspend(world: World, fault: Fault) -> None:
    world.change(suspend=True)
    world.after(fault.seconds, _resume, world)


def _resume(world: World) -> None:
    if world.job is not None and world.job["spec"].get("suspend"):
        world.change(suspend=False)


def _change_template(world: World, fault: Fault) -> None:
    world.change_template(f"v{fault.number % 4}")


def _break_template(world: World, fault: Fault) -> None:
    """An image that does not exist, or a program that fails sooner or later; after a while it is corrected."""
    world.change_template(BAD_IMAGES[fault.number % len(BAD_IMAGES)])
    world.after(4 * fault.seconds, world.correct_template)


def _change_updates(world: World, fault: Fault) -> None:
    kept = world.job is not None and "checkpoint" in world.job["spec"]
    kind = ("Rolling", "OnRestart", "Recreate" if kept else "Rolling")[fault.number % 3]
    world.change(updatePolicy={"type": kind, "maxUnavailable": 1 + fault.number % 2})


def _delete_job(world: World, fault: Fault) -> None:
    world.delete_job()


def _delete_in_foreground(world: World, fault: Fault) -> None:
    world.delete_job(foreground=True)


def _create_anew(world: World, fault: Fault) -> None:
    """Delete the job and create it again at once, while objects of the old one still hold its names."""
    job = world.job
    if job is not None:
        world.delete_job()
        world.note("the user creates the job anew")
        world.apply(job["spec"])


def _delete_support(world: World, fault: Fault) -> None:
    kinds = ("Service", "Role", "RoleBinding", "ServiceAccount")
    things = [thing for thing in world.server.objects.values() if thing["kind"] in kinds]
    if things:
        thing = things[fault.number % len(things)]
        world.note(f"a user deletes {thing['kind']} {name_of(thing)} ({uid_of(thing)})")
        world.server.delete(thing["kind"], name_of(thing))


_ACTS: dict[Kind, Callable[[World, Fault], None]] = {
    Kind.CRASH: _crash,
    Kind.EXIT: _exit(1),
    Kind.EXIT_WITH_ZERO: _exit(0),
    Kind.CONFIG_ERROR: _exit(EXIT_CONFIG),
    Kind.OUT_OF_MEMORY: _out_of_memory,
    Kind.DELETE_POD: _delete_pod("a user deletes it"),
    Kind.FORCE_DELETE: _delete_pod("a user deletes it by force", grace=0),
    Kind.DELETE_GROUP: _delete_group,
    Kind.EVICT: _evict,
    Kind.DRAIN: _drain,
    Kind.REFUSE_PODS: _refuse_pods,
    Kind.BREAK_IMAGES: _break_images,
    Kind.FREEZE: _freeze,
    Kind.HANG_AT_START: _hang_at_start,
    Kind.CUT_NODE: _cut_node,
    Kind.UNPLUG_NODE: _unplug_node,
    Kind.REMOVE_NODE: _remove_node,
    Kind.CORDON: _cordon,
    Kind.ILL_NODE: _ill_node,
    Kind.LIE_ABOUT_NODE: _lie_about_node,
    Kind.LIE_ABOUT_ALL: _lie_about_all,
    Kind.FILL: _fill,
    Kind.KILL_OPERATOR: _kill_operator,
    Kind.SECOND_OPERATOR: _second_operator,
    Kind.LOSE_EVENTS: _lose_events,
    Kind.LATE_EVENTS: _late_events,
    Kind.SLOW_CALLS: _slow_calls,
    Kind.BREAK_API: _break_api,
    Kind.CRASH_COORDINATOR: _crash_coordinator,
    Kind.DELETE_COORDINATOR: _delete_coordinator,
    Kind.MUTE_COORDINATOR: _mute_coordinator,
    Kind.DIVERGE: _verdict(Cause.STATE_DIVERGED),
    Kind.HANG: _verdict(Cause.HUNG),
    Kind.SCALE: _scale,
    Kind.CHANGE_SPARES: _change_spares,
    Kind.SUSPEND: _suspend,
    Kind.CHANGE_TEMPLATE: _change_template,
    Kind.BREAK_TEMPLATE: _break_template,
    Kind.CHANGE_UPDATES: _change_updates,
    Kind.DELETE_JOB: _delete_job,
    Kind.DELETE_IN_FOREGROUND: _delete_in_foreground,
    Kind.CREATE_ANEW: _create_anew,
    Kind.DELETE_SUPPORT: _delete_support,
}
