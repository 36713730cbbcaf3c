"""The rules about nodes: who leaves one that is lost, ill or cordoned, and which are avoided afterwards. Pure.

Kubernetes calls a node not Ready when it hears nothing of its kubelet. That may be the node's end, a kubelet that
crashed, or an API server that lost its view of everything. The coordinator hears the replicas themselves, each second.
So what it counts as a member is not touched for a node that is not Ready, and while it does not answer nobody is: when
the control plane loses sight of all nodes at once, training goes on.

A node that is ill or cordoned still works. To leave it is our own choice, so that is done at a step boundary, one
replica at a time, and never below minReplicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from fthsdp_operator.api import (
    COMING,
    UP,
    AvoidedNode,
    AvoidMode,
    Failure,
    Job,
    JobStatus,
    NodeFaults,
    OnCordon,
    ReplicaState,
    ReplicaStatus,
    RuleAction,
)
from fthsdp_operator.observed.known import NodeKind
from fthsdp_operator.observed.observe import NodeView, Observed, PodView
from fthsdp_operator.rules import failure_rules, policy, run
from fthsdp_operator.rules.actions import Delete, Event, by_force

__all__ = [
    "MOVE_PATIENCE",
    "OVERDUE",
    "PLANNED",
    "forced",
    "forgiven",
    "found_ill",
    "is_dead",
    "is_forced",
    "lost",
    "move",
    "news",
    "remembering",
    "wish",
    "wishes",
]

MOVE_PATIENCE = 600.0
"""Seconds for which a planned move waits until replicas are back that failed, were moved, or got another template."""
OVERDUE = 2.0
"""Seconds past its grace period after which a pod on a dead node, or a coordinator's, is removed by force."""
PLANNED = ("NodeCordoned", "NodeUnhealthy")
"""Reasons of moves that are our own choice: the replica leaves at a step boundary."""
_FAULTS = ("NodeLost", "UnexpectedAdmissionError", "Silent")
"""Reasons that speak of the machine on which the named pod was."""
_FAULTS_OF_ONE_POD = ("Frozen", "Hung", "StateDiverged")
"""These speak of one too, but of a replica with several pods nobody says of which."""
_MAY_BE_LOST = ("Silent", "ConnectionLost", "Frozen", "Hung", "Error")
"""Reasons behind which the loss of a node may be: what the coordinator notices, and what a pod ends with that misses
another one of its replica."""
_SAME_LOSS = 120.0
"""Seconds between a replica that is missed and a node that is, at most, if it is one loss."""
_SAME_TIME = 0.01
"""Seconds by which times may differ that mean the same: in a status they have milliseconds."""
_CLOCKS = 10.0
"""Seconds by which the API server's clock may be behind ours."""
_MOST_FAULTS = 64
"""Nodes whose failures are remembered; of more, the newest."""


# --- nodes that are lost --------------------------------------------------------------------------------------------


def is_dead(job: Job, node: NodeView | None, now: float) -> bool:
    """Whether a node has not been Ready for too long."""
    since = None if node is None or node.ready == "True" else node.not_ready_since
    return since is not None and now - since >= job.spec.node_policy.unreachable_seconds


def lost(job: Job, observed: Observed, entry: ReplicaStatus, now: float) -> Failure | None:
    """Return the failure of a replica that is lost with a node; None while anything says that it is not."""
    if _nobody_knows(observed) or _is_heard(observed, entry):
        return None
    for pod in observed.group(entry.index, entry.attempt):
        node = observed.nodes.get(pod.node or "")
        if node is None or not pod.alive:
            continue
        if is_dead(job, node, now):
            seconds = job.spec.node_policy.unreachable_seconds
            words = (
                f"node {node.name} has not been Ready for {seconds} s, and the coordinator does not hear the replica"
            )
            return _failure(job, pod, entry, "NodeLost", words, now)
        if _restarts_in_place(entry) and _is_same_loss(node, entry.last_failure):
            words = f"node {node.name} is not Ready, so that the restart in its pods does not come about"
            return _failure(job, pod, entry, "NodeLost", words, now)
    return None


def _restarts_in_place(entry: ReplicaStatus) -> bool:
    """It was restarted in its pods, and the coordinator does not know it so far."""
    return entry.pods_attempt is not None and entry.state is ReplicaState.STARTING


def _is_same_loss(node: NodeView | None, failure: Failure | None) -> bool:
    """Whether a node was lost at about the time of a failure: others miss a replica before Kubernetes misses a node."""
    since = None if node is None or node.ready == "True" else node.not_ready_since
    return since is not None and failure is not None and abs(since - failure.time) <= _SAME_LOSS


def _nobody_knows(observed: Observed) -> bool:
    return observed.coordinator is None


def _is_heard(observed: Observed, entry: ReplicaStatus) -> bool:
    """The coordinator drops a replica of which it hears nothing for seconds, or of which a rank hangs."""
    return observed.member(entry.index, entry.attempt) is not None


def _failure(job: Job, pod: PodView, entry: ReplicaStatus, reason: str, words: str, now: float) -> Failure:
    failure = Failure(pod=pod.name, node=pod.node, reason=reason, message=words, time=now, during=entry.state)
    return failure_rules.apply(job.spec.failure_policy.rules, failure, pod)


def forgiven(observed: Observed, entry: ReplicaStatus) -> ReplicaStatus:
    """Give back what a restart has cost, now that a node turns out to be lost on which the replica had been.

    Others miss a replica within seconds, and Kubernetes its node only after most of a minute. A pod that says how it
    ended was not lost. If it was restarted in its pods meanwhile, that was in vain, and counts in no row either.
    """
    failure = entry.last_failure
    if failure is None or failure.reason not in _MAY_BE_LOST or failure.action is not RuleAction.RESTART_REPLICA:
        return entry
    stayed = _restarts_in_place(entry)
    if failure.rule is not None or (stayed and _is_heard(observed, entry)):
        return entry
    for pod in observed.group(entry.index, entry.attempt if stayed else entry.attempt - 1):
        if not pod.over and _is_same_loss(observed.nodes.get(pod.node or ""), failure):
            words = "; ".join(filter(None, (failure.message, f"node {pod.node} is not Ready")))
            free = RuleAction.RESTART_REPLICA_FREE
            known = {"reason": "NodeLost", "action": free, "pod": pod.name, "node": pod.node, "message": words}
            known |= {"exit_code": None, "container": None}  # of a pod that has ended, which this one has not
            kept = tuple(time for time in entry.recent_restarts if abs(time - failure.time) > _SAME_TIME)
            row = entry.restarts_in_a_row - int(stayed)
            after = {"recent_restarts": kept, "restarts_in_a_row": max(row, 0)}
            return entry.model_copy(update={"last_failure": failure.model_copy(update=known), **after})
    return entry


def forced(job: Job, observed: Observed, now: float) -> tuple[Delete, ...]:
    """Return the deletions by force of pods that nobody else takes away; none unless the user allows them."""
    if not job.spec.node_policy.force_delete:
        return ()
    late = (pod for pod in observed.trainers if is_forced(job, observed, pod, now))
    return tuple(by_force(pod, "its grace period is over, and its node does not take it away") for pod in late)


def is_forced(job: Job, observed: Observed, pod: PodView, now: float) -> bool:
    """Whether the user allows to remove a pod by force that should have gone by now."""
    if pod.gone_by is None or not job.spec.node_policy.force_delete:
        return False
    late = job.spec.deadlines.termination_seconds
    if late is not None and now >= pod.gone_by + late:
        return True
    return now >= pod.gone_by + OVERDUE and is_dead(job, observed.nodes.get(pod.node or ""), now)


# --- nodes that are left by choice ----------------------------------------------------------------------------------


Wish = tuple[ReplicaStatus, Failure]
"""A replica that had better not be where it is, and why."""


def wishes(job: Job, observed: Observed, entries: Iterable[ReplicaStatus], now: float) -> list[Wish]:
    """Return all of these, those on ill nodes before those on nodes that are only cordoned."""
    illnesses = _Illnesses(job)
    bad = _bad(job, observed, illnesses)
    found = [(entry, _wish(job, observed, entry, illnesses, bad, now)) for entry in entries] if bad else []
    wished = [(entry, failure) for entry, failure in found if failure is not None]
    return sorted(wished, key=lambda wish: wish[1].reason != "NodeUnhealthy")


def move(
    job: Job,
    observed: Observed,
    entries: Sequence[ReplicaStatus],
    wished: Iterable[Wish],
    now: float,
    *,
    ready: Collection[int],
) -> Wish | None:
    """Return the one replica that leaves its node now, and why; None: nobody does.

    One that trains does not leave to wait for its next start meanwhile: it stays until that would come at once.
    ``ready``: replicas that train or stand by at this moment. It is for looks at which nobody has failed.
    """
    for entry, failure in sorted(wished, key=lambda wish: wish[0].index in ready):  # others cost nobody anything
        if _is_busy(entries, entry, ready, now) or not _keeps_the_minimum(job, observed, entry, ready):
            continue
        if entry.index not in ready or policy.comes_back_at_once(job, entry, now):
            return entry, failure
    return None


def _is_busy(entries: Iterable[ReplicaStatus], mover: ReplicaStatus, ready: Collection[int], now: float) -> bool:
    """Another replica is on its way back, from whatever it was, and has not been for so long that it may never come."""
    return any(
        now - other.away_since < MOVE_PATIENCE
        for other in entries
        if other.index != mover.index and other.state in COMING and other.index not in ready
        if other.away_since is not None
    )


def _keeps_the_minimum(job: Job, observed: Observed, mover: ReplicaStatus, ready: Collection[int]) -> bool:
    known = observed.coordinator
    if known is None or known.finished:
        return False  # nobody knows who trains, or it is not worth it any more
    if mover.index not in ready and not _is_heard(observed, mover):
        return True
    # Else the coordinator is being replaced, and nobody could let it go at a boundary.
    return run.knows_who_trains(job, observed) and len(set(ready) - {mover.index}) >= job.spec.min_replicas


def wish(job: Job, observed: Observed, entry: ReplicaStatus, now: float) -> Failure | None:
    """Return why a replica had better not be where it is; None when nothing speaks against that."""
    illnesses = _Illnesses(job)
    return _wish(job, observed, entry, illnesses, _bad(job, observed, illnesses), now)


def _bad(job: Job, observed: Observed, illnesses: _Illnesses) -> set[str]:
    """Return the nodes that are ill, or to be left."""
    kinds = observed.kinds_of_nodes.items()
    return {name for kind, names in kinds if illnesses.of(kind) or _is_left(job, kind) for name in names}


def _wish(
    job: Job, observed: Observed, entry: ReplicaStatus, illnesses: _Illnesses, bad: set[str], now: float
) -> Failure | None:
    pods = observed.group(entry.index, entry.attempt)
    if entry.state not in UP or bad.isdisjoint(pods.nodes):
        return None
    for pod in pods:
        node = observed.nodes.get(pod.node or "")
        if node is None or not pod.alive or node.name not in bad:
            continue
        ill = _ill(job, entry, pod, node, illnesses, now)
        if ill is not None:
            return ill
        if _is_left(job, node.kind) and not _had_no_choice(job, entry, pod, "NodeCordoned", now):
            return _failure(job, pod, entry, "NodeCordoned", f"node {node.name} is cordoned", now)
    return None


def _is_left(job: Job, kind: NodeKind) -> bool:
    """Whether nodes of this kind are cordoned, and to be left for that."""
    return kind.cordoned and job.spec.node_policy.on_cordon is OnCordon.MIGRATE


def _ill(
    job: Job, entry: ReplicaStatus, pod: PodView, node: NodeView, illnesses: _Illnesses, now: float
) -> Failure | None:
    words = illnesses.of(node.kind)
    if not words or _had_no_choice(job, entry, pod, "NodeUnhealthy", now):
        return None
    return _failure(job, pod, entry, "NodeUnhealthy", f"node {node.name} has {words}", now)


class _Illnesses:
    """What is wrong with nodes: thousands of them say the same, and are looked at once."""

    def __init__(self, job: Job) -> None:
        self._rules = job.spec.node_policy
        self._known: dict[NodeKind, str] = {}

    def of(self, kind: NodeKind) -> str:
        """Say which condition or taint says that a node is ill; empty when none does."""
        if kind not in self._known:
            self._known[kind] = self._illness(kind)
        return self._known[kind]

    def _illness(self, kind: NodeKind) -> str:
        for condition in sorted(kind.conditions):
            if any(one.matches(condition) for one in self._rules.unhealthy_conditions):
                return f"the condition {condition[0]}={condition[1]}"
        ill = (key for key, *_ in sorted(kind.taints) if self._rules.taint_matches(key))
        return next((f"the taint {key}" for key in ill), "")


def _had_no_choice(job: Job, entry: ReplicaStatus, pod: PodView, reason: str, now: float) -> bool:
    """The pod came to this node although the replica had left it, or while it was avoided: there is no other place.

    That counts for as long as nodes are avoided, so that a replica does not go from one bad node to the next for ever.
    """
    before, ttl = entry.last_failure, job.spec.node_policy.avoid.ttl_seconds
    if before is not None and (before.reason, before.node) == (reason, pod.node) and now - before.time < ttl:
        return True
    avoided = next((it for it in job.status.avoided_nodes if it.name == pod.node and it.since < now < it.until), None)
    return avoided is not None and pod.created is not None and pod.created + _CLOCKS >= avoided.since


# --- nodes that are avoided -----------------------------------------------------------------------------------------


def remembering(job: Job, failures: Iterable[Failure | None], now: float) -> Job:
    """Return the job with what its status keeps of bad nodes brought up to now."""
    faults, avoided = _remembered(job, now)
    for failure in failures:
        if failure is None or failure.node is None or not _is_the_nodes(job, failure):
            continue
        times = (*faults.pop(failure.node, ()), now)
        if failure.reason == "NodeUnhealthy" or len(times) >= job.spec.node_policy.avoid.threshold:
            avoided.pop(failure.node, None)  # the newest stand last
            avoided[failure.node] = _avoided(job, failure, len(times), now)
        else:
            faults[failure.node] = times
    if job.spec.node_policy.avoid.mode is AvoidMode.NONE:
        faults, avoided = {}, {}
    newest = list(faults.items())[-_MOST_FAULTS:]
    status = {
        "node_faults": tuple(NodeFaults(name=name, times=times) for name, times in newest),
        "avoided_nodes": tuple(avoided.values())[-job.spec.node_policy.avoid.max_nodes :],
    }
    return job.model_copy(update={"status": job.status.model_copy(update=status)})


def _remembered(job: Job, now: float) -> tuple[dict[str, tuple[float, ...]], dict[str, AvoidedNode]]:
    """What is not too old, by node, the oldest first."""
    ttl = job.spec.node_policy.avoid.ttl_seconds
    faults = {it.name: tuple(time for time in it.times if now - time < ttl) for it in job.status.node_faults}
    avoided = {it.name: it for it in job.status.avoided_nodes if now < it.until}
    return {name: times for name, times in faults.items() if times}, avoided


def found_ill(
    job: Job, observed: Observed, entries: Iterable[ReplicaStatus], failures: Iterable[Failure | None], now: float
) -> Iterator[Failure]:
    """Yield what ill nodes say of themselves on which replicas have failed by something else.

    Their next attempts would only have to leave again: such a node is avoided as if they had left it by choice.
    """
    illnesses = _Illnesses(job)
    for entry, failure in zip(entries, failures, strict=True):
        if failure is None or failure.reason in PLANNED or not observed.nodes:
            continue
        for pod in observed.group(entry.index, entry.attempt):
            node = observed.nodes.get(pod.node or "")
            ill = None if node is None else _ill(job, entry, pod, node, illnesses, now)
            if ill is not None:
                yield ill


def _is_the_nodes(job: Job, failure: Failure) -> bool:
    """Exit codes and memory say nothing of the machine; neither does who was asked to go."""
    alone = job.spec.pods_per_replica == 1 and failure.reason in _FAULTS_OF_ONE_POD
    return alone or failure.reason == "NodeUnhealthy" or failure.reason in _FAULTS


def _avoided(job: Job, failure: Failure, number: int, now: float) -> AvoidedNode:
    assert failure.node is not None
    ttl = job.spec.node_policy.avoid.ttl_seconds
    count = "1 failure" if number == 1 else f"{number} failures"
    many = f"{count} within {ttl} s, last: " if failure.reason != "NodeUnhealthy" else ""
    why = f"{many}{failure.pod} {failure.reason}"
    return AvoidedNode(name=failure.node, since=now, until=now + ttl, why=f"{why}: {failure.message}"[:256])


def news(before: JobStatus, after: JobStatus) -> Iterator[Event]:
    """Yield what people should hear of nodes that are avoided from now on."""
    known = {(it.name, it.since) for it in before.avoided_nodes}
    for it in after.avoided_nodes:
        if (it.name, it.since) not in known:
            yield Event(warning=True, reason="NodeAvoided", message=f"node {it.name}: {it.why}")
