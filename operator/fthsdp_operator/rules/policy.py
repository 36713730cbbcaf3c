"""What failed, and what that costs. Rules about pods on one side, about the restart budget on the other; both pure.

All that a judgement needs stands in the status of the job: when its replicas were restarted, and why they failed last.
So an operator that starts anew, or another one that takes over, judges as this one would have.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from fthsdp.coordinator.messages import Crash
from fthsdp.exit_codes import EXIT_CONFIG, EXIT_LOST, EXIT_REFUSED, EXIT_TERMINATED
from fthsdp_operator.api import (
    Backoff,
    FailReason,
    Failure,
    FailurePolicy,
    Job,
    OnExhausted,
    ReplicaState,
    ReplicaStatus,
    RuleAction,
    Waiting,
    pod_name,
)
from fthsdp_operator.observed.known import AttemptPods
from fthsdp_operator.observed.observe import Observed, PodView
from fthsdp_operator.rules import failure_rules

__all__ = [
    "EARLY_EXIT_GRACE",
    "JITTER",
    "SIMULTANEOUS",
    "Verdict",
    "comes_back_at_once",
    "failure_line",
    "failure_of",
    "fitting",
    "in_a_row",
    "judge",
    "last_line",
    "recent",
    "restarted",
    "short",
    "wait_before",
    "with_exit_code",
]

EARLY_EXIT_GRACE = 60.0
"""Seconds for which a pod may have exited with 0 while others of its replica still run. At the end of a run pods finish
within moments of each other; one that stays alone means that the others wait for it in vain."""

SIMULTANEOUS = 60.0
"""Seconds within which replicas of a job that trains fail together. Longer, and two machines that break on the same day
would pass for a fault of the code; a fault of the code reaches everybody in the same step."""
JITTER = 0.25
"""The part of a wait by which it is shortened at most."""
MESSAGE_LIMIT = 1024
"""Bytes of a failure's message that are kept, from its end: there a traceback has the error."""
MESSAGES_TOGETHER = 128 * 1024
"""Bytes that the failures' messages of all replicas have, and as many those of what they wait for: an object of more
than 1.5 MiB cannot be stored, and so nothing be done."""

_EXIT_CODES = {
    EXIT_CONFIG: "a setting or an argument is wrong, see the logs",
    EXIT_LOST: "it was out of step with the others and asked to be started again",
    EXIT_REFUSED: "the coordinator refused it",
}
_SAYS_NOTHING = (EXIT_LOST, EXIT_REFUSED, EXIT_TERMINATED, 128 + signal.SIGKILL)
"""Exit codes that many replicas may well share although their code is right: two by which a trainer asks to be started
again, as all do when nobody with a state is left, and two of those that were told to stop."""
_DISRUPTIONS = {
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
}
_UNKNOWN_TIME = float("-inf")
_JSON = json.JSONEncoder(ensure_ascii=False)
_LONGEST_LIST = 8


# --- what failed ----------------------------------------------------------------------------------------------------


def failure_of(job: Job, observed: Observed, entry: ReplicaStatus, now: float, *, complete: bool) -> Failure | None:
    """Return why a replica cannot go on, and what is asked for because of that; None when nothing is wrong with it.

    ``complete``: all its pods were seen before, so one that is missing now has been deleted. Of several pods the one
    that went first is named: the others usually fall because of it.
    """
    pods = observed.group(entry.index, entry.attempt)
    failed = [pod for pod in pods.leaving if pod.phase != "Succeeded" or pod.deleted is not None]
    failed += [pod for pod in pods.leaving if pod.deleted is None and _left_alone(pod, entry, now)]
    missing = _missing(job, entry, pods) if complete else []
    causes = [_failure(pod, now) for pod in failed] + [_gone(name, observed, now) for name in missing]
    verdict = _verdict(job, observed, entry, now)
    failure = min(causes, key=lambda cause: cause[0], default=(_Order(), verdict))[1]
    if failure is None:
        return None
    homeless = any(pod.phase == "Pending" and pod.node is None for pod in pods)
    failure = failure.model_copy(update={"during": entry.state})
    return failure_rules.apply(
        job.spec.failure_policy.rules, failure, observed.last_seen(failure.pod), homeless=homeless
    )


def _verdict(job: Job, observed: Observed, entry: ReplicaStatus, now: float) -> Failure | None:
    """What the coordinator says of an attempt whose pods all seem well: it is silent, or one of its ranks hangs."""
    for verdict in observed.coordinator.verdicts if observed.coordinator else ():
        if (verdict.replica, verdict.attempt) == (entry.index, entry.attempt):
            index = verdict.crash.pod if verdict.crash is not None else 0
            pod = next((pod for pod in observed.group(entry.index, entry.attempt) if pod.index == index), None)
            failure = Failure(
                pod=pod_name(job.name, entry.index, entry.named_after, index),
                node=pod.node if pod else None,
                reason=str(verdict.cause),
                message=verdict.reason,
                time=now,
            )
            return failure if verdict.crash is None else _crashed(job, failure, verdict.crash)
    return None


def _crashed(job: Job, failure: Failure, crash: Crash) -> Failure:
    """The command of a container ended whose launcher still runs: it reads as if the container had ended."""
    words = crash.words.strip() or _EXIT_CODES.get(crash.exit_code, "")
    return failure.model_copy(
        update={
            "container": job.spec.template["spec"]["containers"][0]["name"],
            "exit_code": crash.exit_code,
            "reason": "OOMKilled" if crash.oom_killed else "Error",
            "message": words[-MESSAGE_LIMIT:],
        }
    )


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


def _missing(job: Job, entry: ReplicaStatus, pods: AttemptPods) -> list[str]:
    missing = pods.missing(job.spec.pods_per_replica)
    return [pod_name(job.name, entry.index, entry.named_after, index) for index in missing]


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


# --- what of it finds room ------------------------------------------------------------------------------------------


def fitting(entries: tuple[ReplicaStatus, ...]) -> tuple[ReplicaStatus, ...]:
    """Return the entries with as much of their messages as there is room for in the status, wherever they come from."""
    room = MESSAGES_TOGETHER // max(1, len(entries))
    return tuple(_fitting(entry, room) for entry in entries)


def _fitting(entry: ReplicaStatus, room: int) -> ReplicaStatus:
    failure, waits, update = entry.last_failure, entry.waiting, dict[str, Failure | Waiting]()
    if failure is not None and (end := _start(failure.message[::-1], room)[::-1]) != failure.message:
        update["last_failure"] = failure.model_copy(update={"message": end})
    if waits is not None and (start := _start(waits.message, room)) != waits.message:
        update["waiting"] = waits.model_copy(update={"message": start})
    return entry.model_copy(update=update) if update else entry


def _start(text: str, room: int) -> str:
    """Return what finds room of a text's beginning, in whole characters."""
    text = text.encode(errors="replace")[:MESSAGE_LIMIT].decode(errors="ignore")
    if _stored(text) <= room:
        return text
    sizes = itertools.accumulate(map(_stored, text))
    return text[: sum(1 for _ in itertools.takewhile(lambda size: size <= room, sizes))]


def _stored(text: str) -> int:
    """Return the bytes that a text takes in etcd: the API server writes JSON in UTF-8, and <, > and & as six bytes."""
    return len(_JSON.encode(text).encode()) - 2 + 5 * sum(map(text.count, "<>&"))


# --- what it costs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a replica that failed, or of the job."""

    action: RuleAction
    restart_at: float = 0.0
    """Unix time in seconds, for a restart."""
    reason: FailReason | None = None
    """One word that says why it is none."""
    message: str = ""
    """A sentence that says why it is none."""


def judge(job: Job, entry: ReplicaStatus, others: Sequence[ReplicaStatus], now: float, *, trained: bool) -> Verdict:
    """Decide about a replica that failed.

    ``entry.last_failure`` says how and what is asked for. ``others`` are the other replicas of the job: those that have
    failed in the same moment with that failure, and with what was decided about them if it has been. ``trained``: the
    job has at least one final step.
    """
    failure = entry.last_failure
    assert failure is not None
    if failure.action is RuleAction.FAIL_JOB:
        return _fail("FailedByRule", f"rule {failure.rule} of failurePolicy: {_in_words(failure)}")
    if failure.action is RuleAction.ABANDON_REPLICA:
        return _abandon(job, others, "AbandonedByRule", f"rule {failure.rule} of failurePolicy: {_in_words(failure)}")
    if failure.action is RuleAction.RESTART_REPLICA:
        verdict = _hopeless(job, entry, others, now, trained=trained) or _exhausted(job, entry, others, now)
        if verdict is not None:
            return verdict
    assert failure.action is not None
    return Verdict(action=failure.action, restart_at=now + _wait(job, entry, now))


def _fail(reason: FailReason, message: str) -> Verdict:
    return Verdict(action=RuleAction.FAIL_JOB, reason=reason, message=message)


def _abandon(job: Job, others: Sequence[ReplicaStatus], reason: FailReason, message: str) -> Verdict:
    """Go on without a replica, unless too few would be left for the job ever to train again."""
    left, least = sum(entry.state is not ReplicaState.ABANDONED for entry in others), job.spec.min_replicas
    if left < least:
        return _fail(reason, f"{message}; without it {_count(left, 'replica')} could train, and minReplicas is {least}")
    return Verdict(action=RuleAction.ABANDON_REPLICA, reason=reason, message=message)


# --- no restart can help --------------------------------------------------------------------------------------------


def _hopeless(
    job: Job, entry: ReplicaStatus, others: Sequence[ReplicaStatus], now: float, *, trained: bool
) -> Verdict | None:
    failure = entry.last_failure
    assert failure is not None
    if failure.rule is not None:
        return None  # the user has said that a restart is right
    if failure.exit_code == EXIT_CONFIG and failure.reason == "Error" and not trained:
        return _fail("ConfigError", f"{short(failure)}: {last_line(failure)}")
    return _code_fault(job, entry, failure, others, now, trained=trained)


def _code_fault(
    job: Job,
    entry: ReplicaStatus,
    failure: Failure,
    others: Sequence[ReplicaStatus],
    now: float,
    *,
    trained: bool,
) -> Verdict | None:
    fraction = job.spec.failure_policy.simultaneous_fraction
    if not fraction or not _may_be_the_code(failure, trained=trained):
        return None
    if any(other.ready_since is not None and other.revision != entry.revision for other in others):
        return None  # the code of this one may be wrong, and that of the others is another one, and works
    alike = [other for other in others if _alike(other, failure, now, trained=trained)]
    # Who was abandoned for something else would not have come anyway.
    able = 1 + sum(other.state is not ReplicaState.ABANDONED for other in others)
    able += sum(other.state is ReplicaState.ABANDONED for other in alike)
    if 1 + len(alike) < max(2, math.ceil(fraction * min(job.spec.replicas, able) - 1e-9)):
        return None
    who = _names(sorted([entry.index, *(other.index for other in alike)]))
    when = f"within {SIMULTANEOUS:g} s" if trained else "before the first step"
    return _fail(
        "CodeFault",
        f"replicas {who} of {job.spec.groups} failed {when} with exit code {failure.exit_code}, which is a fault of the"
        f" code that they run (failurePolicy.simultaneousFraction is {fraction:g}): {_in_words(failure)}",
    )


def _may_be_the_code(failure: Failure, *, trained: bool) -> bool:
    """The program ended by itself, with a code that says that something is wrong with it."""
    if failure.rule is not None or failure.action is not RuleAction.RESTART_REPLICA or not failure.exit_code:
        return False
    if trained and failure.during is ReplicaState.CATCHING_UP:
        return False  # it falls when those fall from whom it has the state, and torchrun makes 1 of the code for that
    if failure.reason == "OOMKilled":  # SIGKILL too, but for what it did
        return True
    return failure.reason == "Error" and failure.exit_code not in _SAYS_NOTHING


def _alike(other: ReplicaStatus, failure: Failure, now: float, *, trained: bool) -> bool:
    """Another replica failed in the same way, with this one, and has not shown since that its code can run."""
    before = other.last_failure
    if before is None or before.exit_code != failure.exit_code or not _may_be_the_code(before, trained=trained):
        return False
    if before.revision is not None and before.revision != failure.revision:
        return False  # it ran another template
    if before.time == now:  # at this look; a clock may have been set back since another one
        return True
    recovered = other.state in (ReplicaState.CATCHING_UP, ReplicaState.ACTIVE, ReplicaState.SPARE)
    return not recovered and (not trained or now - before.time < SIMULTANEOUS)


# --- the budgets ----------------------------------------------------------------------------------------------------


def _exhausted(job: Job, entry: ReplicaStatus, others: Sequence[ReplicaStatus], now: float) -> Verdict | None:
    policy, failure = job.spec.failure_policy, entry.last_failure
    assert failure is not None
    if policy.job is not None:
        limit, window = policy.job.limit, policy.job.window_seconds
        used = sum(len(recent(one.recent_restarts, window, now)) for one in (entry, *others))
        if used >= limit:
            return _fail(
                "JobBudgetExhausted",
                f"replica {entry.index} failed after {_count(used, 'restart')} of all replicas within {window} s"
                f" (failurePolicy.job.limit is {limit}), last: {_in_words(failure)}",
            )
    limit, window = policy.per_replica.limit, policy.per_replica.window_seconds
    used = len(recent(entry.recent_restarts, window, now))
    if used < limit:
        return None
    message = (
        f"replica {entry.index} failed again after {_count(used, 'restart')} within {window} s"
        f" (failurePolicy.perReplica.limit is {limit}), last: {_in_words(failure)}"
    )
    if policy.on_exhausted is OnExhausted.FAIL_JOB:
        return _fail("RestartBudgetExhausted", message)
    return _abandon(job, others, "RestartBudgetExhausted", message)


def restarted(job: Job, entry: ReplicaStatus, now: float) -> ReplicaStatus:
    """Return the entry with a restart for its last failure entered into the books."""
    failure = entry.last_failure
    costs = failure is not None and failure.action is RuleAction.RESTART_REPLICA
    kept = recent(entry.recent_restarts, _longest_window(job.spec.failure_policy), now)
    return entry.model_copy(
        update={
            "restarts": entry.restarts + 1,
            "recent_restarts": (*kept, now) if costs else kept,
            "restarts_in_a_row": in_a_row(entry, job.spec.failure_policy.backoff, now) + 1,
            "ready_since": None,
        }
    )


def _longest_window(policy: FailurePolicy) -> int:
    return max(policy.per_replica.window_seconds, policy.job.window_seconds if policy.job is not None else 0)


def recent(times: Sequence[float], window: float, now: float) -> tuple[float, ...]:
    """Return those within the window."""
    return tuple(time for time in times if now - time < window)


# --- the wait -------------------------------------------------------------------------------------------------------


def _wait(job: Job, entry: ReplicaStatus, now: float) -> float:
    """Return the seconds to wait before a restart, free or not: what costs nothing may still fail in a loop."""
    backoff = job.spec.failure_policy.backoff
    whole = wait_before(in_a_row(entry, backoff, now), backoff)
    return whole * (1.0 - JITTER * _chance(job.metadata.uid, entry.index, entry.attempt))


def comes_back_at_once(job: Job, entry: ReplicaStatus, now: float) -> bool:
    """Whether a restart now would not wait."""
    return _wait(job, entry, now) == 0.0


def in_a_row(entry: ReplicaStatus, backoff: Backoff, now: float) -> int:
    """Return the restarts since the replica was stable: none, if it has been until now."""
    stable = entry.ready_since is not None and now - entry.ready_since >= backoff.stable_seconds
    return 0 if stable else entry.restarts_in_a_row


def wait_before(done: int, backoff: Backoff) -> float:
    """Return the seconds to wait after ``done`` restarts in a row: none before the first."""
    if done == 0:
        return 0.0
    # The exponent is cut where any factor has long reached maxSeconds, so that no number grows without bound.
    return float(min(backoff.max_seconds, backoff.initial_seconds * backoff.factor ** min(done - 1, 40)))


def _chance(*what: object) -> float:
    """Return a number of 0 … 1 that is always the same for the same things, and for others another one."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


# --- in words -------------------------------------------------------------------------------------------------------


def last_line(failure: Failure) -> str:
    """Return what a failure's message comes down to: a traceback ends with the error."""
    return failure.message.rpartition("\n")[2].strip()


def short(failure: Failure) -> str:
    """Say in a few words what happened to which pod."""
    ended = "" if failure.exit_code is None else f" exit {failure.exit_code}"
    return f"{failure.pod} {failure.reason}{ended}"


def _in_words(failure: Failure) -> str:
    """Say what happened to which pod, and what it said last."""
    said = last_line(failure)
    return f"{short(failure)}: {said}" if said else short(failure)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(indices: Sequence[int]) -> str:
    """List replicas, as far as people read lists."""
    shown = [str(index) for index in indices[:_LONGEST_LIST]]
    more = len(indices) - len(shown)
    return f"{', '.join(shown)} and {more} more" if more else f"{', '.join(shown[:-1])} and {shown[-1]}"


def failure_line(replica: int, failure: Failure) -> str:
    """Say in one short line what happened to a replica."""
    return f"r{replica} {short(failure)}"
