"""One job of twelve thousand pods: created, looked after, and losing one group after the other."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure, Of, at_least, at_most
from tests.bench.operator.client import Pods
from tests.bench.operator.ground import Ground, ground
from tests.bench.operator.sizes import Size
from tests.bench.operator.subject import NAMESPACE, Operator, create_job, job, jobs_path, operator, sure, warm_up

from fthsdp_operator.api import GROUP, JOB_LABEL, REPLICA_LABEL, ROLE_LABEL, Role, parse_job
from fthsdp_operator.manifests.render import training_pods

__all__ = ["DEADLINE", "SETTLE", "Say", "group_of", "large_job", "p99", "untouched"]

NAME = "large"
RAW = "raw"
DEADLINE = 900.0
"""Seconds for anything that is waited for."""
SETTLE = 5.0
"""Seconds after which nothing of what was done before is still on its way."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What happened after one pod of a group was deleted. Seconds from then on."""

    evicted: float
    """Until another pod of its group was seen to be on its way out."""
    created: float
    """Until the last pod of the new group was there."""
    running: float
    """Until all of them ran."""
    calls: dict[str, float] = field(default_factory=dict)
    """That the operator made meanwhile, by verb."""


def large_job(size: Size, say: Say, folder: Path) -> list[Figure]:
    """Measure everything that is promised of the largest job."""
    with ground(folder / "large") as under:
        under.add_nodes(size.pods + 8)
        say(f"{size.pods + 8:,} nodes")
        raw = _create_raw(under, size)
        say(f"raw: {size.pods:,} pods in {raw:.1f} s")
        with Pods(under.api, NAMESPACE, f"{JOB_LABEL}={NAME},{ROLE_LABEL}={Role.TRAINER}") as pods:
            return list(_of_the_job(size, say, under, pods, raw))


def _of_the_job(size: Size, say: Say, under: Ground, pods: Pods, raw: float) -> Iterator[Figure]:
    manifest = job(NAME, replicas=size.replicas, pods_per_replica=size.pods_per_replica)
    with operator(under) as running:
        warm_up(under.api, jobs_path(), job)
        began = create_job(under.api, manifest)
        pods.until(lambda: len(pods.there) >= size.pods, "all pods are created", DEADLINE)
        created = max(pods.made.values()) - began
        say(f"{size.pods:,} pods created in {created:.1f} s")
        up = pods.until(lambda: len(pods.running) >= size.pods, "all pods run", DEADLINE) - began
        say(f"and running after {up:.1f} s")
        yield _creation(size, created, raw, up)
        yield from _idle(size, running, say)
        seen = [_lose_one(under, pods, running, size, number, say) for number in range(size.deletions)]
        yield from _replacements(size, seen)
    yield _restarts(under, pods, size, say)


# --- creation -------------------------------------------------------------------------------------------------------


def _create_raw(under: Ground, size: Size) -> float:
    """Create the same pods without any operator, wait until all run, and take them away; return the first part."""
    bodies = [_nobodys(pod) for pod in _pods_of_the_job(size)]
    with Pods(under.api, NAMESPACE, RAW) as pods:
        began = under.api.create_all(f"api/v1/namespaces/{NAMESPACE}/pods", bodies)
        pods.until(lambda: len(pods.there) >= size.pods, "all raw pods are created", DEADLINE)
        created = max(pods.made.values()) - began
        pods.until(lambda: len(pods.running) >= size.pods, "all raw pods run", DEADLINE)
        for replica in range(size.replicas):  # the time of one call is limited
            part = f"{RAW},{_nobodys_label(REPLICA_LABEL)}={replica}"
            path = f"api/v1/namespaces/{NAMESPACE}/pods?labelSelector={part}"
            under.api.call("DELETE", path, {"gracePeriodSeconds": 0})
        pods.until(lambda: not pods.there, "all raw pods are gone", DEADLINE)
    return created


def _pods_of_the_job(size: Size) -> Iterator[dict[str, Any]]:
    manifest = job(NAME, replicas=size.replicas, pods_per_replica=size.pods_per_replica)
    manifest["metadata"] |= {"uid": "0", "generation": 1, "resourceVersion": "0"}
    parsed = parse_job(manifest)
    for replica in range(size.replicas):
        yield from training_pods(parsed, replica=replica, attempt=0, indices=range(size.pods_per_replica))


def _nobodys(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the same pod as one that no operator and no garbage collector cares about."""
    metadata = pod["metadata"]
    labels = {_nobodys_label(name): value for name, value in metadata["labels"].items()}
    return pod | {"metadata": {"name": metadata["name"], "labels": labels | {RAW: "true"}}}


def _nobodys_label(name: str) -> str:
    return name.replace(GROUP, "nobody.dev")


def _creation(size: Size, created: float, raw: float, up: float) -> Figure:
    return Figure(
        name=f"creating the {size.pods:,} pods of a job, next to creating them raw with 50 in flight",
        unit="pods/s",
        values=(size.pods / created,),
        peer="raw",
        peer_values=(size.pods / raw,),
        must=at_least(0.8, Of.RATIO),
        aim=at_least(0.95, Of.RATIO),
        note=f"until the last one was seen to exist: {created:.1f} s, raw {raw:.1f} s, scheduler and nodes at work in"
        f" both; all of the job ran after {up:.1f} s",
    )


# --- nothing to do --------------------------------------------------------------------------------------------------


def _idle(size: Size, running: Operator, say: Say) -> Iterator[Figure]:
    time.sleep(SETTLE)
    share = running.idle(size.idle)
    say(f"idle: {running.memory:.0f} MiB, {share:.1%} of a core")
    yield Figure(
        name=f"memory of the operator, idle with {size.pods:,} pods",
        unit="MiB",
        values=(running.memory,),
        must=at_most(400),
        aim=at_most(200),
        note=f"resident; {running.peak_memory:.0f} MiB at most, while the pods were created",
    )
    yield Figure(
        name=f"processor of the operator, idle with {size.pods:,} pods",
        unit="%",
        values=(share,),
        must=at_most(0.02),
        note=f"of one core, over {size.idle:g} s; the job's coordinator does not answer",
    )


# --- groups that are lost -------------------------------------------------------------------------------------------


def _lose_one(under: Ground, pods: Pods, running: Operator, size: Size, number: int, say: Say) -> Replaced:
    """Delete a pod of the next group and wait until its group is back."""
    replica, before = number % size.replicas, running.calls()
    group = group_of(pods, replica)
    victim = random.Random(number).choice(sorted(group))
    began = under.api.delete_pod(NAMESPACE, victim)
    evicted = pods.evicted(group - {victim}, DEADLINE) - began
    pods.replaced(group, size.pods, DEADLINE)
    new = group_of(pods, replica)
    untouched(pods, group | new, began)
    calls = {verb: count - before.get(verb, 0.0) for verb, count in running.calls().items()}
    found = Replaced(
        evicted=evicted,
        created=max(pods.made[name] for name in new) - began,
        running=max(pods.running[name] for name in new) - began,
        calls=calls,
    )
    say(f"{victim} deleted: eviction after {found.evicted:.3f} s, new pods after {found.created:.2f} s, running after"
        f" {found.running:.2f} s, {sum(calls.values()) / len(group):.2f} calls a pod")  # fmt: skip
    return found


def group_of(pods: Pods, number: int, label: str = REPLICA_LABEL) -> set[str]:
    """Return the names of a group's pods that are there."""
    return pods.having({label: str(number)})


def untouched(pods: Pods, group: set[str], since: float) -> None:
    """Make sure that no pod of any other group was touched; raises BenchmarkFailed."""
    touched = pods.left_since(since) - group
    sure(not touched, f"pods of other groups were deleted: {', '.join(sorted(touched)[:5])}")


def _replacements(size: Size, seen: list[Replaced]) -> Iterator[Figure]:
    evicted = sorted(one.evicted for one in seen)
    yield Figure(
        name=f"pod deleted → eviction of its group started, {size.pods:,} pods, p99",
        values=(p99(evicted),),
        must=at_most(0.5),
        aim=at_most(0.05),
        note=f"from the call that deletes a pod until another of its group is seen to be deleted: median"
        f" {statistics.median(evicted):.3f} s, most {evicted[-1]:.3f} s of {len(evicted)}",
    )
    yield Figure(
        name=f"one group of {size.pods_per_replica:,} pods replaced, the operator's share",
        values=tuple(one.created for one in seen),
        must=at_most(10),
        aim=at_most(6),
        note="from the deletion of a pod until the last pod of the new group exists; until all run"
        f" {statistics.median(one.running for one in seen):.1f} s",
    )
    calls = [sum(one.calls.values()) / size.pods_per_replica for one in seen]
    verbs = sorted({verb for one in seen for verb in one.calls})
    parts = (f"{verb} {statistics.median(one.calls.get(verb, 0.0) for one in seen):.0f}" for verb in verbs)
    yield Figure(
        name="API calls for each pod that is replaced",
        unit="calls",
        values=tuple(calls),
        must=at_most(2.2),
        note=f"by fthsdp_api_requests_total, from the deletion until the group runs; of {size.pods_per_replica:,} pods:"
        f" {', '.join(parts)}",
    )


def p99(values: list[float]) -> float:
    """Return the smallest value that 99 % of all are not above; of fewer than a hundred the largest."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


# --- an operator that starts ----------------------------------------------------------------------------------------


def _restarts(under: Ground, pods: Pods, size: Size, say: Say) -> Figure:
    """Delete a pod while there is no operator, and start one: its first right deed is to evict that group."""
    took: list[float] = []
    for number in range(size.restarts):
        group = group_of(pods, number % size.replicas)
        victim = min(group)
        began = under.api.delete_pod(NAMESPACE, victim)
        with operator(under) as running:
            took.append(pods.evicted(group - {victim}, DEADLINE) - running.process.spawned)
            pods.replaced(group, size.pods, DEADLINE)
            untouched(pods, group | group_of(pods, number % size.replicas), began)
        say(f"first right deed of a new operator after {took[-1]:.2f} s")
    return Figure(
        name=f"restart of the operator to its first right deed, {size.pods:,} pods",
        values=tuple(took),
        must=at_most(10),
        aim=at_most(5),
        note="a pod was deleted while there was no operator: from the start of the process, imports included, until its"
        " group is seen to be evicted",
    )
