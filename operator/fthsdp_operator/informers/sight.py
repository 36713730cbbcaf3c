"""What the operator sees of a cluster: the pods of all jobs, and the nodes, each collection followed by an informer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from fthsdp_operator.cluster import ClusterError
from fthsdp_operator.informers.cache import Mirror, Pods
from fthsdp_operator.informers.informer import Informer, Source
from fthsdp_operator.observed.known import JobPods, KnownNodes
from fthsdp_operator.observed.observe import JobKey, NodeView, PodView, node_view, view

__all__ = ["Listener", "Sight"]

Manifest = Mapping[str, Any]
Listener = Callable[[JobKey, PodView | None, bool], None]
"""Takes a job of which something has changed; the pod that is gone, as it was seen last, if one is; and whether it can
wait for more to come: a pod that comes up tells a handful of times, and is one of thousands."""
EVERYWHERE = ""
"""In place of a namespace."""


class Sight:
    """Pods of all jobs of some namespaces, and nodes."""

    def __init__(
        self,
        *,
        pods: Mapping[str, Source],
        nodes: Source | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """``pods`` by namespace, or under ``EVERYWHERE`` those of all; ``chance`` returns numbers from 0 to 1."""
        self._pods, self._nodes = Pods(), KnownNodes()
        self._tell: Listener = lambda job, gone, can_wait: None
        how = {"clock": clock, "chance": chance}
        self._followed = {
            namespace: Informer(source, Mirror(view, self._pod_changed), what=_pods_of(namespace), **how)
            for namespace, source in pods.items()
        }
        self._nodes_followed = (
            None if nodes is None else Informer(nodes, Mirror(node_view, self._node_changed), what="nodes", **how)
        )

    # --- what there is ---

    def pods(self, namespace: str, job: str) -> JobPods:
        """Return all pods labelled with the job's name; raises ClusterError while they are not known."""
        followed = self._of(namespace)
        if followed is None:
            raise ClusterError(f"the pods of namespace {namespace} are not followed")
        if not followed.known:
            why = f": we may not see them: {followed.refused}" if followed.refused else " yet"
            raise ClusterError(f"the pods of namespace {namespace} are not known{why}")
        return self._pods.of((namespace, job))

    def nodes(self) -> Mapping[str, NodeView]:
        """Return the nodes that are known, by name."""
        followed = self._nodes_followed
        return self._nodes if followed is not None and followed.known else {}

    def put(self, pod: Manifest) -> None:
        """Take in a pod that the API server answered to a call of our own."""
        followed = self._of(pod["metadata"]["namespace"])
        if followed is not None:
            followed.mirror.put(pod)

    def forget(self, namespace: str, uid: str) -> None:
        """Take in that a pod is gone, by what the API server answered to us."""
        followed = self._of(namespace)
        if followed is not None:
            followed.mirror.forget(uid)

    def age(self) -> float:
        """Return for how many seconds the collection that is silent longest has been so."""
        return max((informer.age() for informer in self._informers()), default=0.0)

    def refusals(self) -> Mapping[tuple[str, str], bool]:
        """Return of each collection, by resource and namespace (empty: all), whether the API server refuses it."""
        pods = {("pods", namespace): bool(followed.refused) for namespace, followed in self._followed.items()}
        nodes = self._nodes_followed
        return pods if nodes is None else {**pods, ("nodes", ""): bool(nodes.refused)}

    # --- following it ---

    def listen(self, tell: Listener) -> None:
        """Tell this of all changes from now on."""
        self._tell = tell

    async def follow(self) -> NoReturn:
        """Follow everything until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers():
                group.create_task(informer.follow())
        raise AssertionError("informers never end")

    async def settled(self) -> None:
        """Wait until each collection is known, or cannot be."""
        await asyncio.gather(*(informer.settled.wait() for informer in self._informers()))

    def _informers(self) -> Iterator[Informer[Any]]:
        yield from self._followed.values()
        if self._nodes_followed is not None:
            yield self._nodes_followed

    def _of(self, namespace: str) -> Informer[PodView] | None:
        return self._followed.get(namespace) or self._followed.get(EVERYWHERE)

    def _pod_changed(self, before: PodView | None, now: PodView, gone: bool) -> None:
        self._pods.changed(before, now, gone)
        for job in dict.fromkeys((pod.namespace, pod.job) for pod in (before, now) if pod is not None):
            self._tell(job, now if gone else None, not gone and now.alive and not now.ended)

    def _node_changed(self, before: NodeView | None, now: NodeView, gone: bool) -> None:
        if gone:
            self._nodes.drop(now.name)
        else:
            self._nodes.put(now)
        for job in sorted(self._pods.jobs_on(now.name)):
            self._tell(job, None, False)


def _pods_of(namespace: str) -> str:
    return f"pods of {namespace}" if namespace else "pods"
