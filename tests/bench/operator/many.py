"""Hundreds of small jobs at once: whether any of them waits for the others."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Metric
from tests.bench.figures import Figure, at_most
from tests.bench.operator.client import Api, Pods
from tests.bench.operator.ground import ground
from tests.bench.operator.large import DEADLINE, SETTLE, Say, p99
from tests.bench.operator.sizes import Size
from tests.bench.operator.subject import NAMESPACE, Operator, job, jobs_path, operator, sure, warm_up

from fthsdp_operator.api import JOB_LABEL, REPLICA_LABEL, ROLE_LABEL, Role

__all__ = ["many_jobs", "quantile"]

REPLICAS, PODS_PER_REPLICA = 2, 4
"""Of each job."""
PODS = REPLICAS * PODS_PER_REPLICA


def many_jobs(size: Size, say: Say, folder: Path) -> list[Figure]:
    """Create all jobs at once; then delete a pod in some of them, while there is nothing else to do."""
    with ground(folder / "many") as under:
        under.add_nodes(size.jobs * PODS + 8)
        with Pods(under.api, NAMESPACE, f"{ROLE_LABEL}={Role.TRAINER}") as pods, operator(under) as running:
            bodies = [job(f"job-{n}", replicas=REPLICAS, pods_per_replica=PODS_PER_REPLICA) for n in range(size.jobs)]
            warm_up(under.api, jobs_path(), job)
            began = under.api.create_all(jobs_path(), bodies)
            accepted = time.monotonic() - began
            total = size.jobs * PODS
            pods.until(lambda: len(pods.there) >= total, "all pods are created", DEADLINE)
            created = max(pods.made.values()) - began
            say(f"{size.jobs} jobs: {total:,} pods created in {created:.1f} s")
            up = pods.until(lambda: len(pods.running) >= total, "all pods run", DEADLINE) - began
            figures = [
                Figure(
                    name=f"{size.jobs} jobs x {PODS} pods: all pods created",
                    values=(created,),
                    note=f"{total / created:.0f} pods/s; the jobs were accepted within {accepted:.1f} s, all pods ran"
                    f" after {up:.1f} s; the last job to get its pods had them at the end",
                )
            ]
            figures += _idle(size, running, say)
            return [*figures, *_hit(size, pods, running, under.api, say)]


def _idle(size: Size, running: Operator, say: Say) -> Iterator[Figure]:
    time.sleep(SETTLE)
    before = running.metrics()["fthsdp_queue_wait_seconds"]
    share = running.idle(size.idle)
    waits = quantile(before, running.metrics()["fthsdp_queue_wait_seconds"], 0.99)
    say(f"idle: {running.memory:.0f} MiB, {share:.1%} of a core, queue wait p99 ≤ {waits:g} s")
    what = f"idle with {size.jobs} jobs"
    yield Figure(
        name=f"memory of the operator, {what}",
        unit="MiB",
        values=(running.memory,),
        must=at_most(400),
        note=f"resident; {running.peak_memory:.0f} MiB at most",
    )
    yield Figure(
        name=f"processor of the operator, {what}",
        unit="%",
        values=(share,),
        note=f"of one core, over {size.idle:g} s; no coordinator answers",
    )
    yield Figure(
        name=f"wait of a job for a worker, p99, {what}",
        values=(waits,),
        must=at_most(1.0),
        note="upper bound of the bucket of fthsdp_queue_wait_seconds, over the same time",
    )


def _hit(size: Size, pods: Pods, running: Operator, api: Api, say: Say) -> Iterator[Figure]:
    """Delete a pod of one job after the other."""
    took = []
    for number in random.Random(0).sample(range(size.jobs), size.jobs_hit):
        group = pods.having({JOB_LABEL: f"job-{number}", REPLICA_LABEL: "0"})
        victim = min(group)
        began = api.delete_pod(NAMESPACE, victim)
        took.append(pods.evicted(group - {victim}, DEADLINE) - began)
    total = size.jobs * PODS
    pods.until(lambda: len(pods.running) >= total, "all pods run again", DEADLINE)
    sure(running.process.alive, "the operator has ended")
    say(f"pod deleted → eviction, one job of {size.jobs}: p99 {p99(took):.3f} s")
    yield Figure(
        name=f"pod deleted → eviction of its group started, one of {size.jobs} jobs, p99",
        values=(p99(took),),
        must=at_most(0.5),
        note=f"most of {len(took)}; none of the jobs waits for the others",
    )


def quantile(before: Metric, after: Metric, part: float) -> float:
    """Return the upper bound of the bucket in which this part of what was observed between two readings ends."""
    counts = {sample.labels["le"]: sample.value for sample in after.samples if sample.name.endswith("_bucket")}
    for sample in before.samples:
        if sample.name.endswith("_bucket"):
            counts[sample.labels["le"]] -= sample.value
    total = max(counts.values(), default=0.0)
    bounds = sorted((float(bound), count) for bound, count in counts.items())
    return next((bound for bound, count in bounds if count >= part * total), math.inf) if total else 0.0
