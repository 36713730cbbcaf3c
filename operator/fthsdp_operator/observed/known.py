"""Pods and nodes by what rules ask of them: at each look most are as they were at the one before.

A job may have twelve thousand pods, and is looked at every other second though nothing happens. So what is worked out
of the pods of an attempt is kept with them, for as long as they are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from fthsdp_operator.api import Role

if TYPE_CHECKING:
    from fthsdp_operator.observed.observe import NodeView, PodView

__all__ = ["AttemptKey", "AttemptPods", "JobPods", "KnownNodes", "NodeKind", "attempt_key"]

AttemptKey = tuple[int | None, int]
"""A replica and the number of its attempt; None for the coordinator."""


def attempt_key(pod: PodView) -> AttemptKey:
    """Return the attempt that a pod belongs to."""
    return pod.replica if pod.role is Role.TRAINER else None, pod.attempt


class AttemptPods(tuple["PodView", ...]):
    """The pods of one attempt of a replica. Each thing about them is worked out when it is asked for first."""

    @cached_property
    def indices(self) -> frozenset[int]:
        """Their numbers."""
        return frozenset(pod.index for pod in self)

    def missing(self, count: int) -> list[int]:
        """Return which numbers from 0 to ``count`` - 1 none of them has."""
        numbers = range(count)
        return [] if self.indices.issuperset(numbers) else [it for it in numbers if it not in self.indices]

    @cached_property
    def leaving(self) -> tuple[PodView, ...]:
        """Those that have ended, or were asked to stop."""
        return tuple(pod for pod in self if not pod.alive)

    @cached_property
    def pending(self) -> tuple[PodView, ...]:
        """Those that have still to start, by number."""
        return tuple(sorted((pod for pod in self if pod.phase == "Pending" and pod.alive), key=lambda pod: pod.index))

    @cached_property
    def all_run(self) -> bool:
        """Each runs, and none was asked to stop."""
        return all(pod.phase == "Running" and pod.alive for pod in self)

    @cached_property
    def named(self) -> Mapping[str, PodView]:
        """By name."""
        return {pod.name: pod for pod in reversed(self)}

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes that they are on."""
        return frozenset(pod.node for pod in self if pod.node is not None)

    @cached_property
    def job_uids(self) -> frozenset[str]:
        """The jobs that they belong to: one, unless somebody writes labels."""
        return frozenset(pod.job_uid for pod in self)

    @cached_property
    def stems(self) -> frozenset[str]:
        """Their names without their numbers: one, unless somebody writes labels."""
        return frozenset(pod.name.removesuffix(f"-{pod.index}") for pod in self)


_NONE = AttemptPods()


class JobPods(Collection["PodView"]):
    """The pods labelled with the name of one job, by attempt."""

    def __init__(self, attempts: Mapping[AttemptKey, AttemptPods]) -> None:
        self.attempts = attempts
        self._replicas: dict[int | None, dict[int, AttemptPods]] = {}
        for (replica, attempt), pods in attempts.items():
            self._replicas.setdefault(replica, {})[attempt] = pods

    @classmethod
    def of(cls, pods: Iterable[PodView]) -> JobPods:
        """Arrange pods, which stay in their order."""
        if isinstance(pods, JobPods):
            return pods
        attempts: dict[AttemptKey, list[PodView]] = {}
        for pod in pods:
            attempts.setdefault(attempt_key(pod), []).append(pod)
        return cls({key: AttemptPods(its) for key, its in attempts.items()})

    def __iter__(self) -> Iterator[PodView]:
        return chain.from_iterable(self.attempts.values())

    def __len__(self) -> int:
        return sum(map(len, self.attempts.values()))

    def __contains__(self, pod: object) -> bool:
        return any(pod in its for its in self.attempts.values())

    def replica(self, replica: int | None) -> tuple[PodView, ...]:
        """Return the pods of all attempts of a replica; the coordinator's under None."""
        return tuple(chain.from_iterable(self._replicas.get(replica, {}).values()))

    def older(self, replica: int, attempt: int) -> Iterator[PodView]:
        """Yield the pods of the attempts of a replica before this one."""
        return chain.from_iterable(its for other, its in self._replicas.get(replica, {}).items() if other < attempt)

    def attempt(self, replica: int | None, attempt: int) -> AttemptPods:
        """Return the pods of one attempt of a replica."""
        return self.attempts.get((replica, attempt), _NONE)

    def of_replicas(self) -> Iterator[PodView]:
        """Yield all but the coordinator's."""
        return chain.from_iterable(pods for (replica, _), pods in self.attempts.items() if replica is not None)

    def named(self, name: str) -> PodView | None:
        """Return the pod of this name."""
        return next((pods.named[name] for pods in self.attempts.values() if name in pods.named), None)

    def of_job(self, uid: str) -> JobPods:
        """Return those of the job itself, without those of an earlier one of its name, and copies."""
        whole = {key: pods for key, pods in self.attempts.items() if pods.job_uids == {uid}}
        if len(whole) == len(self.attempts):
            return self
        mixed = {key: pods for key, pods in self.attempts.items() if key not in whole and uid in pods.job_uids}
        whole |= {key: AttemptPods(pod for pod in pods if pod.job_uid == uid) for key, pods in mixed.items()}
        return JobPods({key: whole[key] for key in self.attempts if key in whole})

    def not_of_job(self, uid: str) -> Iterator[PodView]:
        """Yield those that are not the job's own."""
        others = (pods for pods in self.attempts.values() if pods.job_uids != {uid})
        return (pod for pods in others for pod in pods if pod.job_uid != uid)


class NodeKind(NamedTuple):
    """What a node is judged by. Thousands of nodes are of one kind."""

    cordoned: bool
    conditions: frozenset[tuple[str, str]]
    """Type and status of each."""
    taints: frozenset[tuple[str, str, str]]
    """Key, value and effect of each."""


class KnownNodes(Mapping[str, "NodeView"]):
    """Nodes by name, and by kind."""

    def __init__(self, nodes: Iterable[NodeView] = ()) -> None:
        self._named: dict[str, NodeView] = {}
        self._alike: dict[NodeKind, set[str]] = {}
        for node in nodes:
            self.put(node)

    @property
    def kinds(self) -> Mapping[NodeKind, Collection[str]]:
        """The names of those of each kind."""
        return self._alike

    def put(self, node: NodeView) -> None:
        """Note a node as it is now."""
        self.drop(node.name)
        self._named[node.name] = node
        self._alike.setdefault(node.kind, set()).add(node.name)

    def drop(self, name: str) -> None:
        """Note that a node is gone."""
        before = self._named.pop(name, None)
        if before is not None:
            alike = self._alike[before.kind]
            alike.discard(name)
            if not alike:
                del self._alike[before.kind]

    def __getitem__(self, name: str) -> NodeView:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)
