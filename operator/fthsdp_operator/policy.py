"""What failed, and what that costs. Rules about pods on one side, about the restart budget on the other; both pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fthsdp.exit_codes import EXIT_CONFIG, EXIT_LOST, EXIT_REFUSED
from fthsdp_operator.api import Backoff, Failure, FailurePolicy, Job, ReplicaStatus, pod_name
from fthsdp_operator.observe import Observed, PodView

__all__ = [
    "EARLY_EXIT_GRACE",
    "Verdict",
    "failure_of",
    "judge",
    "last_line",
    "recent",
    "short",
    "wait_before",
    "with_exit_code",
]

EARLY_EXIT_GRACE = 60.0
"""Seconds for which a pod may have exited with 0 while others of its replica still run. At the end of a run pods finish
within moments of each other; one that stays alone means that the others wait for it in vain."""

MESSAGE_LIMIT = 1024
"""Characters of a failure's message that are kept, from its end: there a traceback has the error."""

_EXIT_CODES = {
    EXIT_CONFIG: "a setting or an argument is wrong, see the logs",
    EXIT_LOST: "it was out of step with the others and asked to be started again",
    EXIT_REFUSED: "the coordinator refused it",
}
_DISRUPTIONS = {
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
}
_UNKNOWN_TIME = float("-inf")


# --- what failed ----------------------------------------------------------------------------------------------------


def failure_of(job: Job, observed: Observed, entry: ReplicaStatus, now: float, *, complete: bool) -> Failure | None:
    """Return why a replica has to be restarted, or None.

    ``complete``: all its pods were seen before, so one that is missing now has been deleted. Of several pods the one
    that went first is named: the others usually fall because of it.
    """
    pods = observed.group(entry.index, entry.attempt)
    failed = [pod for pod in pods if pod.deleted is not None or pod.phase == "Failed" or _left_alone(pod, entry, now)]
    missing = _missing(job, entry, pods) if complete else []
    causes = [_failure(pod, now) for pod in failed] + [_gone(name, observed, now) for name in missing]
    verdict = _verdict(job, observed, entry, now)
    return min(causes, key=lambda cause: cause[0], default=(_Order(), verdict))[1]


def _verdict(job: Job, observed: Observed, entry: ReplicaStatus, now: float) -> Failure | None:
    """What the coordinator says of an attempt whose pods all seem well: it is silent, or one of its ranks hangs."""
    for verdict in observed.coordinator.verdicts if observed.coordinator else ():
        if (verdict.replica, verdict.attempt) == (entry.index, entry.attempt):
            leader = next((pod for pod in observed.group(entry.index, entry.attempt) if pod.index == 0), None)
            return Failure(
                pod=pod_name(job.name, entry.index, entry.attempt, 0),
                node=leader.node if leader else None,
                reason=str(verdict.cause),
                message=verdict.reason,
                time=now,
            )
    return None


@dataclass(frozen=True, slots=True, order=True)
class _Order:
    time: float = 0.0
    own_exit: bool = False
    """In the same second, what was done to a pod comes before what pods do."""
    name: str = ""


def _left_alone(pod: PodView, entry: ReplicaStatus, now: float) -> bool:
    """By our own clock: that of the pod's node may be minutes off."""
    since = entry.first_exit_time
    return pod.phase == "Succeeded" and since is not None and now - since >= EARLY_EXIT_GRACE


def _missing(job: Job, entry: ReplicaStatus, pods: Sequence[PodView]) -> list[str]:
    there = {pod.index for pod in pods}
    return [
        pod_name(job.name, entry.index, entry.attempt, index)
        for index in range(job.spec.pods_per_replica)
        if index not in there
    ]


def _failure(pod: PodView, now: float) -> tuple[_Order, Failure]:
    reason = _reason(pod)
    ended = pod.exit.time if pod.exit and pod.exit.time is not None else now
    since = pod.deleted if pod.deleted is not None else ended
    order = _Order(min(since, ended), reason in ("Error", "ExitedEarly"), pod.name)
    return order, _describe(pod, reason, now)


def _gone(name: str, observed: Observed, now: float) -> tuple[_Order, Failure]:
    """Describe a pod that is not there any more, from its last words where somebody heard them."""
    last = observed.last_words.get(name)
    if last is None:
        return _Order(_UNKNOWN_TIME, False, name), Failure(pod=name, reason="PodDeleted", time=now)
    since = last.deleted if last.deleted is not None else _UNKNOWN_TIME
    reason = _DISRUPTIONS.get(last.reason, last.reason) or "PodDeleted"
    return _Order(since, False, name), _describe(last, reason, now)


def _describe(pod: PodView, reason: str, now: float) -> Failure:
    ended = pod.exit
    words = pod.message.strip() or (ended.message.strip() if ended else "")
    known = _EXIT_CODES.get(ended.code, "") if ended else ""
    return Failure(
        pod=pod.name,
        node=pod.node,
        container=ended.container if ended else None,
        exit_code=ended.code if ended else None,
        reason=reason,
        message=(words or known)[-MESSAGE_LIMIT:],
        time=now,
    )


def _reason(pod: PodView) -> str:
    if pod.reason:
        return _DISRUPTIONS.get(pod.reason, pod.reason)
    if pod.deleted is not None:
        return "PodDeleted"
    if pod.exit is not None and pod.exit.reason == "OOMKilled":
        return "OOMKilled"
    return "ExitedEarly" if pod.phase == "Succeeded" else "Error"


def with_exit_code(failure: Failure | None, observed: Observed) -> Failure | None:
    """Fill in the exit code of a recorded failure, now that the pod has ended."""
    if failure is None or failure.exit_code is not None:
        return failure
    pod = observed.last_seen(failure.pod)
    if pod is None or pod.exit is None:
        return failure
    return failure.model_copy(
        update={
            "exit_code": pod.exit.code,
            "container": pod.exit.container,
            "node": failure.node or pod.node,
            "message": failure.message or _describe(pod, failure.reason, failure.time).message,
        }
    )


# --- what it costs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Restart the replica, or give up on the job."""

    restart_at: float = 0.0
    """Unix time in seconds."""
    give_up: str = ""
    """One word that says why the job fails; empty for a restart."""
    message: str = ""


def judge(policy: FailurePolicy, entry: ReplicaStatus, failure: Failure, now: float, *, trained: bool) -> Verdict:
    """Decide about a replica that failed; ``trained``: the job has at least one final step."""
    # No restart can help, as long as the job never trained.
    if failure.exit_code == EXIT_CONFIG and failure.reason == "Error" and not trained:
        return Verdict(give_up="ConfigError", message=f"{short(failure)}: {last_line(failure)}")
    budget = policy.per_replica
    used = recent(entry.recent_restarts, budget.window_seconds, now)
    if len(used) >= budget.limit:
        return Verdict(
            give_up="RestartBudgetExhausted",
            message=(
                f"replica {entry.index} failed again after {len(used)} restarts within {budget.window_seconds} s"
                f" (failurePolicy.perReplica.limit is {budget.limit}), last: {short(failure)}"
            ),
        )
    return Verdict(restart_at=now + wait_before(len(used), policy.backoff))


def last_line(failure: Failure) -> str:
    """Return what a failure's message comes down to: a traceback ends with the error."""
    return failure.message.rpartition("\n")[2].strip()


def short(failure: Failure) -> str:
    """Say in a few words what happened to which pod."""
    ended = "" if failure.exit_code is None else f" exit {failure.exit_code}"
    return f"{failure.pod} {failure.reason}{ended}"


def recent(times: Sequence[float], window: float, now: float) -> tuple[float, ...]:
    """Return those within the window."""
    return tuple(time for time in times if now - time < window)


def wait_before(done: int, backoff: Backoff) -> float:
    """Return the seconds to wait after ``done`` restarts within the window: none before the first."""
    if done == 0:
        return 0.0
    # The exponent is cut where any factor has long reached maxSeconds, so that no number grows without bound.
    return float(min(backoff.max_seconds, backoff.initial_seconds * backoff.factor ** min(done - 1, 40)))
