"""What Prometheus is told. ``measure.py`` says what a look at a job adds; here it is summed up and shown.

The numbers of a job are gone when the job is: they are kept in one place, by job, and shown from there. No series has a
pod or a node in its labels, since their names never end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fthsdp_operator.api import Job, JobState
from fthsdp_operator.observed.observe import Observed
from fthsdp_operator.process.measure import ROLLS, Tally, measure
from fthsdp_operator.rules.actions import Plan

__all__ = ["Metrics", "Reading"]

_CALL = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Buckets in seconds for what the operator does itself."""
_RECOVERY = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Buckets in seconds for what pods, nodes and training take."""

_OF_A_JOB = ("namespace", "job")
Reading = Callable[[], float]
"""Reads a number at the moment at which it is asked for."""


class Metrics:
    """Everything that is counted, and the registry that shows it."""

    def __init__(self) -> None:
        disable_created_metrics()  # the moment at which a series began helps nobody, and doubles their number
        self.registry = CollectorRegistry()
        self._jobs = _Jobs()
        self.registry.register(self._jobs)
        self._failures = Counter(
            "fthsdp_replica_failures",
            "Failures of replicas, by reason and by what the operator did about them.",
            ["reason", "action"],
            registry=self.registry,
        )
        self._recovery = Histogram(
            "fthsdp_recovery_seconds",
            "Seconds that each stage of a replica's recovery took: detect, evict, schedule, start, join.",
            ["stage"],
            buckets=_RECOVERY,
            registry=self.registry,
        )
        self._outage = Histogram(
            "fthsdp_replica_outage_seconds",
            "Seconds from a replica's failure until it trained again, or was a ready spare.",
            buckets=_RECOVERY,
            registry=self.registry,
        )
        self._leader = Gauge(
            "fthsdp_leader", "1 for the operator that acts, 0 for one that stands by.", registry=self.registry
        )
        self.reconcile_seconds = Histogram(
            "fthsdp_reconcile_seconds",
            "Seconds that one reconcile of a job took, failed ones included.",
            buckets=_CALL,
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "fthsdp_reconcile_errors", "Reconciles that failed and were tried again.", registry=self.registry
        )
        self.queue_wait = Histogram(
            "fthsdp_queue_wait_seconds",
            "Seconds that jobs waited for a worker after they were due.",
            buckets=_CALL,
            registry=self.registry,
        )
        self._queue_depth = Gauge(
            "fthsdp_queue_depth", "Jobs that are due and wait for a worker.", registry=self.registry
        )
        self._requests = Counter(
            "fthsdp_api_requests",
            "Requests to the API server, by verb and HTTP status; error where there was no answer.",
            ["verb", "code"],
            registry=self.registry,
        )
        self._watch_age = Gauge(
            "fthsdp_watch_age_seconds",
            "Seconds since the watch stream that is silent longest gave a sign of life.",
            registry=self.registry,
        )
        self._forbidden = _Forbidden()
        self.registry.register(self._forbidden)

    def lead(
        self,
        *,
        queue_depth: Reading,
        watch_age: Reading,
        forbidden: Callable[[], Mapping[tuple[str, str], bool]] = dict,
    ) -> None:
        """Say that this operator acts from now on; all of these are read whenever somebody asks for them.

        ``forbidden``: whether the API server refuses to show a resource of a namespace (empty: of all).
        """
        self._leader.set(1)
        self._queue_depth.set_function(queue_depth)
        self._watch_age.set_function(watch_age)
        self._forbidden.read = forbidden

    def request(self, verb: str, code: str) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb, code).inc()

    def looked(self, job: Job, observed: Observed, todo: Plan, now: float) -> None:
        """Count what a look at a job added; its status was just written."""
        key = (job.namespace, job.name)
        new = measure(self._jobs.tallies.get(key), job, observed, todo, now)
        self._jobs.tallies[key] = new.tally
        for reason, action in new.failures:
            self._failures.labels(reason, action).inc()
        for stage, seconds in new.stages:
            self._recovery.labels(stage).observe(seconds)
        for seconds in new.outages:
            self._outage.observe(seconds)

    def forget(self, namespace: str, name: str) -> None:
        """Drop the numbers of a job that is gone."""
        self._jobs.tallies.pop((namespace, name), None)


class _Forbidden:
    """What the operator may not see, read when it is asked for."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[tuple[str, str], bool]] = dict

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with a sample for each collection."""
        family = GaugeMetricFamily(
            "fthsdp_watch_forbidden",
            "1 while the API server refuses to show the operator a resource of a namespace (empty: of all), else 0.",
            labels=["resource", "watched_namespace"],
        )
        for collection, refused in self.read().items():
            family.add_metric(collection, float(refused))
        yield family


class _Jobs:
    """The numbers of the jobs that are there, each made when it is asked for."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[str, str], Tally] = {}

    def describe(self) -> Iterator[Metric]:
        """Name the metrics, without a sample."""
        yield from _families({})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with a sample for each job."""
        yield from _families(self.tallies)


def _families(jobs: Mapping[tuple[str, str], Tally]) -> Iterator[Metric]:
    replicas = GaugeMetricFamily(
        "fthsdp_job_replicas", "Replicas of a job in each state, spares included.", labels=[*_OF_A_JOB, "state"]
    )
    states = GaugeMetricFamily(
        "fthsdp_job_state", "1 for the state that a job is in, 0 for the others.", labels=[*_OF_A_JOB, "state"]
    )
    rolls = GaugeMetricFamily(
        "fthsdp_job_roll",
        "1 for how a changed template stands, 0 otherwise: the reasons of the condition Progressing.",
        labels=[*_OF_A_JOB, "state"],
    )
    outdated = GaugeMetricFamily(
        "fthsdp_job_outdated_replicas", "Replicas that run another template than the spec's.", labels=_OF_A_JOB
    )
    steps = GaugeMetricFamily("fthsdp_job_step", "The newest final step of a job.", labels=_OF_A_JOB)
    available = CounterMetricFamily(
        "fthsdp_available_replica_seconds", "Seconds of all replicas in which they trained.", labels=_OF_A_JOB
    )
    desired = CounterMetricFamily(
        "fthsdp_desired_replica_seconds",
        "Seconds of all replicas in which they should have trained: while the job is neither suspended nor ended.",
        labels=_OF_A_JOB,
    )
    avoided = GaugeMetricFamily(
        "fthsdp_job_avoided_nodes", "Nodes that new pods of a job keep away from.", labels=_OF_A_JOB
    )
    cornered = GaugeMetricFamily(
        "fthsdp_job_replicas_on_avoided_nodes",
        "Replicas of a job with a pod on a node that new pods keep away from.",
        labels=_OF_A_JOB,
    )
    for key, tally in jobs.items():
        for state, count in tally.replicas.items():
            replicas.add_metric([*key, state], count)
        for each in JobState:
            states.add_metric([*key, each], float(each is tally.state))
        for reason in ROLLS:
            rolls.add_metric([*key, reason], float(reason == tally.roll))
        outdated.add_metric(key, tally.outdated)
        steps.add_metric(key, tally.step)
        available.add_metric(key, tally.available_seconds)
        desired.add_metric(key, tally.desired_seconds)
        avoided.add_metric(key, tally.avoided)
        cornered.add_metric(key, tally.cornered)
    yield from (replicas, states, rolls, outdated, steps, available, desired, avoided, cornered)
