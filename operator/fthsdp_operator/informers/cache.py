"""What the API server told of objects, kept: of one collection in a ``Mirror``, and indexed by what is asked for.

To LIST the pods of a job for every look at it costs a second for ten thousand of them. A mirror holds instead what
rules look at of each. It is fed by a LIST, then a watch, and after each gap a LIST again. Two things make it safe:

- After a LIST whatever is not in it is gone, also what was deleted while nobody watched, and is reported as gone.
- What we wrote ourselves is taken in at once, from the API server's answer, so that the next look does not write it
  again. Such an answer can come late. It counts only when it is newer than everything that was told: else the watch
  has told of it already, or of its end.

So a mirror never goes back in time, and what it has once shown it shows until that has changed. It is late by as much
as the watch is, which is harmless: nothing is concluded from a pod that is missing unless its end was told, or the API
server was asked (``execute``). Of a server that goes back itself, nothing that was heard holds any more: ``Restored``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fthsdp.errors import FthsdpError
from fthsdp_operator.observed.known import AttemptKey, AttemptPods, JobPods, attempt_key
from fthsdp_operator.observed.observe import JobKey, PodView

__all__ = ["Mirror", "Pods", "Restored", "Seen"]

log = logging.getLogger(__name__)

Manifest = Mapping[str, Any]
V = TypeVar("V")
Changed = Callable[[V | None, V, bool], None]
"""Takes an object as it was known before, as it is now or was last, and whether it is gone."""


class Restored(FthsdpError):
    """The server has gone back to an earlier version than it has told of."""

    def __init__(self, what: str, told: str | int, now: str | int) -> None:
        """``what``: the collection; both versions."""
        super().__init__(
            f"the API server has gone back from version {told} to {now} of {what}: its data was restored from a copy,"
            " so all that was heard of it is forgotten"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Generic[V]):
    """An object as it was at one moment: what is kept of it."""

    uid: str
    version: int
    it: V


class Mirror(Generic[V]):
    """The objects that one watch tells of, by uid."""

    def __init__(self, view: Callable[[Manifest], V | None], changed: Changed[V]) -> None:
        """``view`` returns what is kept of an object; None for one that is of no interest."""
        self._view = view
        self._changed = changed
        self._known: dict[str, Seen[V]] = {}
        self._forgotten: dict[str, int] = {}
        """What we know to be gone, and was not told of yet, with the version at which it was seen last."""
        self._told = 0
        """Everything up to this version was told."""

    def see(self, manifest: Manifest) -> Seen[V] | None:
        """Return what is kept of an object; None for one that is of no interest, or that cannot be understood."""
        metadata = manifest["metadata"]
        try:
            it = self._view(manifest)
        except (AttributeError, KeyError, TypeError, ValueError):  # it must not take all others with it
            log.exception("%s %s is passed over", metadata.get("namespace", ""), metadata["name"])
            return None
        return None if it is None else Seen(uid=metadata["uid"], version=_number(metadata["resourceVersion"]), it=it)

    def replace(self, found: Iterable[Seen[V]], version: str) -> None:
        """Take in a LIST of everything as it was at ``version``; raises Restored when that is before what was told."""
        as_of = _number(version)
        if as_of < self._told:
            raise Restored("a list", self._told, as_of)
        listed = {seen.uid: seen for seen in found}
        for uid, seen in list(self._known.items()):
            if uid not in listed and seen.version <= as_of:
                self._end(uid, None)
        self._forgotten = {uid: version for uid, version in self._forgotten.items() if uid in listed or version > as_of}
        for seen in listed.values():
            self._take(seen)
        self._told = as_of

    def hear(self, kind: str, manifest: Manifest) -> None:
        """Take in the next event of the watch: ADDED, MODIFIED, DELETED or BOOKMARK."""
        metadata = manifest["metadata"]
        self._told = max(self._told, _number(metadata["resourceVersion"]))
        if kind == "BOOKMARK":
            return
        seen, uid = self.see(manifest), metadata["uid"]
        if kind == "DELETED" or seen is None:
            self._end(uid, None if seen is None else seen.it)
            self._forgotten.pop(uid, None)
        else:
            self._take(seen)

    def put(self, manifest: Manifest) -> None:
        """Take in what the API server answered to a call of our own."""
        seen = self.see(manifest)
        if seen is not None and seen.version > self._told:
            self._take(seen)

    def forget(self, uid: str) -> None:
        """Take in that an object is gone, by what the API server answered to us; the watch will tell of it as well."""
        if uid in self._known:
            self._forgotten[uid] = self._known[uid].version
            self._end(uid, None)

    def _take(self, seen: Seen[V]) -> None:
        before = self._known.get(seen.uid)
        if seen.uid in self._forgotten or (before is not None and before.version > seen.version):
            return
        self._known[seen.uid] = seen
        if before is None or before.it != seen.it:
            self._changed(None if before is None else before.it, seen.it, False)

    def _end(self, uid: str, last: V | None) -> None:
        before = self._known.pop(uid, None)
        known = None if before is None else before.it
        final = known if last is None else last
        if final is not None:
            self._changed(known, final, True)


def _number(version: str) -> int:
    """Return a resourceVersion as the number that it is; Kubernetes promises since 1.35 that they can be compared."""
    return int(version)


class Pods:
    """Pods by job and by node, kept by ``changed``, which mirrors call."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, dict[AttemptKey, dict[str, PodView]]] = {}
        """By attempt, and uid."""
        self._arranged: dict[JobKey, dict[AttemptKey, AttemptPods]] = {}
        """Attempts as they were asked for, until one of their pods changes."""
        self._nodes: dict[str, dict[str, JobKey]] = {}
        """Jobs of the pods on each node, by the pods' uids."""

    def of(self, job: JobKey) -> JobPods:
        """Return the pods labelled with this job's name; some may be those of an earlier job of that name."""
        attempts = self._jobs.get(job, {})
        known = self._arranged.setdefault(job, {}) if attempts else {}
        for key, pods in attempts.items():
            if key not in known:
                known[key] = AttemptPods(pods.values())
        return JobPods(dict(known))

    def jobs_on(self, node: str) -> set[JobKey]:
        """Return the jobs that have pods on a node."""
        return set(self._nodes.get(node, {}).values())

    def changed(self, before: PodView | None, now: PodView, gone: bool) -> None:
        """Note a change of a pod."""
        job, known = (now.namespace, now.job), before or now
        if gone or (_place(known), known.node) != (_place(now), now.node):
            self._remove(_place(known), now.uid)
            _drop(self._nodes, known.node, now.uid)
        if gone:
            return
        self._jobs.setdefault(job, {}).setdefault(attempt_key(now), {})[now.uid] = now
        self._arranged.get(job, {}).pop(attempt_key(now), None)
        if now.node is not None:
            self._nodes.setdefault(now.node, {})[now.uid] = job

    def _remove(self, place: tuple[JobKey, AttemptKey], uid: str) -> None:
        job, attempt = place
        self._arranged.get(job, {}).pop(attempt, None)
        if job in self._jobs:
            _drop(self._jobs[job], attempt, uid)
            if not self._jobs[job]:
                del self._jobs[job]
                self._arranged.pop(job, None)


def _place(pod: PodView) -> tuple[JobKey, AttemptKey]:
    return (pod.namespace, pod.job), attempt_key(pod)


K = TypeVar("K")


def _drop(index: dict[K, dict[str, V]], key: K | None, uid: str) -> None:
    if key in index:
        index[key].pop(uid, None)
        if not index[key]:
            del index[key]
