"""The rules about names of pods that others have: an earlier job's of the same name that does not go, or a stranger's.

Pure. What an earlier job has left behind is removed by force where the job's own would be; a stranger's pod never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fthsdp_operator.api import Job, Role
from fthsdp_operator.observed.observe import Observed, PodView
from fthsdp_operator.rules import nodes
from fthsdp_operator.rules.actions import Create, Delete, Step, by_force
from fthsdp_operator.rules.deadlines import HELD, LONGEST, kept_by_finalizers

__all__ = ["forced", "in_the_way", "said"]


def in_the_way(observed: Observed, steps: Iterable[Step]) -> tuple[PodView, ...]:
    """Return the pods that are not the job's own, and have names of those that it is about to create."""
    others = {pod.name: pod for pod in observed.others}
    if not others:
        return ()
    new = (action.manifest for step in steps for action in step.actions if isinstance(action, Create))
    names = (manifest["metadata"]["name"] for manifest in new if manifest["kind"] == "Pod")
    return tuple(others[name] for name in names if name in others)


def forced(job: Job, observed: Observed, pods: Iterable[PodView], now: float) -> Iterator[Delete]:
    """Yield the deletions by force of an earlier job's pods that nobody else takes away."""
    for pod in pods:
        coordinator = pod.role is Role.COORDINATOR and pod.gone_by is not None and now >= pod.gone_by + nodes.OVERDUE
        if pod.job_uid and (coordinator or nodes.is_forced(job, observed, pod, now)):
            yield by_force(pod, "it is an earlier job's, its grace period is over, and its node does not take it away")


def said(pods: Sequence[PodView], now: float) -> str:
    """Return a sentence about the first of these pods that does not go; empty for none."""
    stuck = [pod for pod in pods if _stays(pod, now)]
    if not stuck:
        return ""
    pod, more = stuck[0], f" (and {len(stuck) - 1} more)" if len(stuck) > 1 else ""
    if pod.gone_by is None:
        return f"{pod.name} is there already and not of this job{more}: delete it, or give the job another name"
    whose = "of an earlier job of this name" if pod.job_uid else "not of this job"
    return f"{pod.name} is {whose} and does not go{more}: {_why(pod)}"[:LONGEST]


def _stays(pod: PodView, now: float) -> bool:
    """An earlier job's pod that nobody has deleted is a matter of seconds: the garbage collector is on its way."""
    return not pod.job_uid if pod.gone_by is None else now >= pod.gone_by + HELD


def _why(pod: PodView) -> str:
    if kept := kept_by_finalizers(pod):
        return kept
    if pod.job_uid and pod.role is Role.COORDINATOR:
        return f"node {pod.node} does not take it away, and it is removed by force"
    helps = "nodePolicy.forceDelete, or kubectl delete --force" if pod.job_uid else "kubectl delete --force"
    return f"node {pod.node} does not take it away; {helps}, removes it"
