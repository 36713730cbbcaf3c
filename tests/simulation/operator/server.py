"""The API server: objects, versions, graceful deletion, watches, and the garbage collector behind it.

Objects are never changed in place: each change puts a new one there, so whoever has read one keeps what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tests.unit.operator.templates import with_proxy

from fthsdp_operator.api import JOB_LABEL, KIND, format_time
from fthsdp_operator.cluster import AlreadyExists, Conflict, Manifest

if TYPE_CHECKING:
    from tests.simulation.operator.world import World

__all__ = ["Server", "name_of", "uid_of"]

GRACE = 30
"""Seconds that a pod has to stop where its spec says nothing."""

Watcher = Callable[[str, Manifest], None]


def name_of(thing: Manifest) -> str:
    """Name of an object."""
    return str(thing["metadata"]["name"])


def uid_of(thing: Manifest) -> str:
    """UID of an object."""
    return str(thing["metadata"]["uid"])


class Server:
    """Everything that the cluster knows."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.version = 0
        self._made = 0
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.watchers: list[Watcher] = []

    # --- reading ---

    def get(self, kind: str, name: str) -> Manifest | None:
        """Return an object, or None."""
        return self.objects.get((kind, name))

    def pods(self, job: str | None = None) -> list[Manifest]:
        """Return all pods, or those labelled with this job's name."""
        pods = (it for (kind, _), it in self.objects.items() if kind == "Pod")
        return [pod for pod in pods if job is None or pod["metadata"]["labels"].get(JOB_LABEL) == job]

    def pod(self, uid: str) -> Manifest | None:
        """Return the pod with this uid, or None."""
        return next((pod for pod in self.pods() if uid_of(pod) == uid), None)

    def jobs(self) -> Iterator[Manifest]:
        """Return the job; there is never more than one."""
        return (it for (kind, _), it in self.objects.items() if kind == KIND)

    # --- writing ---

    def create(self, manifest: Mapping[str, Any]) -> Manifest:
        """Create an object; raises AlreadyExists."""
        key = (manifest["kind"], manifest["metadata"]["name"])
        if key in self.objects:
            raise AlreadyExists(" ".join(key))
        self._made += 1
        made = {**manifest, "metadata": {**manifest["metadata"], "uid": f"{key[0].lower()}-{self._made}"}}
        if made["kind"] == "Pod" and self._world.meshed:
            made = with_proxy(made)
        if made["kind"] == "Pod":
            made["status"] = {"phase": "Pending"}
            made["metadata"]["creationTimestamp"] = format_time(float(int(self._world.now)))
        if made["kind"] == KIND:
            made["metadata"]["generation"] = 1
        self._put(key, made, "ADDED")
        self._orphaned(made)
        return self.objects[key]

    def patch_status(self, name: str, status: Mapping[str, Any], *, version: str) -> Manifest:
        """Replace the status of a job that is still at this version; raises Conflict."""
        job = self.objects.get((KIND, name))
        if job is None or job["metadata"]["resourceVersion"] != version:
            raise Conflict(name)
        return self._put((KIND, name), {**job, "status": dict(status)}, "MODIFIED")

    def change_job(self, name: str, **spec: Any) -> None:
        """A user edits a job."""
        job = self.objects[KIND, name]
        metadata = {**job["metadata"], "generation": job["metadata"]["generation"] + 1}
        self._put((KIND, name), {**job, "metadata": metadata, "spec": {**job["spec"], **spec}}, "MODIFIED")

    def change(self, thing: Manifest, **parts: Mapping[str, Any]) -> Manifest:
        """Merge these fields into parts of an object."""
        merged = {part: {**(thing.get(part) or {}), **fields} for part, fields in parts.items()}
        return self._put((thing["kind"], name_of(thing)), {**thing, **merged}, "MODIFIED")

    def delete(self, kind: str, name: str, *, uid: str | None = None, grace: int | None = None) -> None:
        """Ask for a deletion, as an API server does: pods get time to stop, unless none of their containers can run."""
        thing = self.objects.get((kind, name))
        if thing is None or (uid is not None and uid_of(thing) != uid):
            return
        if kind != "Pod":
            self.remove(thing)
            return
        ended = thing["status"]["phase"] in ("Succeeded", "Failed") or not thing["spec"].get("nodeName")
        own = thing["spec"].get("terminationGracePeriodSeconds", GRACE)
        self._stop(thing, 0 if ended else own if grace is None else grace)

    def _stop(self, pod: Manifest, grace: int) -> None:
        if grace == 0:
            self.remove(pod)
            return
        end, before = self._world.now + grace, self._world.nodes.ends(pod)
        if before is None or end < before:
            mark = {"deletionTimestamp": format_time(end), "deletionGracePeriodSeconds": grace}
            self._world.nodes.stop(self.change(pod, metadata=mark), end)

    def remove(self, thing: Manifest) -> None:
        """An object is gone, and in time what it owns goes too."""
        key = (thing["kind"], name_of(thing))
        there = self.objects.get(key)
        if there is None or uid_of(there) != uid_of(thing):
            return
        del self.objects[key]
        self.version += 1
        self._tell("DELETED", {**there, "metadata": {**there["metadata"], "resourceVersion": str(self.version)}})
        if key[0] == KIND:
            self._world.after(self._world.random.uniform(0.2, 8.0), self.collect_garbage)
        if key[0] == "Pod":
            self._world.nodes.removed(there)

    def delete_in_foreground(self, name: str) -> None:
        """A user deletes a job after all that it owns: ``--cascade=foreground``."""
        job = self.objects[KIND, name]
        job = self.change(job, metadata={"deletionTimestamp": format_time(self._world.now)})
        self._world.after(self._world.random.uniform(0.2, 3.0), self._collect_before, job)

    def _collect_before(self, job: Manifest) -> None:
        owned = [thing for thing in self.objects.values() if _owner(thing) == uid_of(job)]
        for thing in owned:
            self.delete(thing["kind"], name_of(thing))
        if owned:
            self._world.after(2.0, self._collect_before, job)
        else:
            self.remove(job)

    def collect_garbage(self) -> None:
        """Delete what belongs to jobs that are gone."""
        jobs = {uid_of(job) for job in self.jobs()}
        for thing in list(self.objects.values()):
            if _owner(thing) not in (None, *jobs):
                self.delete(thing["kind"], name_of(thing))

    def _orphaned(self, made: Manifest) -> None:
        if _owner(made) not in (None, *map(uid_of, self.jobs())):
            self._world.after(self._world.random.uniform(0.2, 8.0), self.collect_garbage)

    def _put(self, key: tuple[str, str], thing: Manifest, event: str) -> Manifest:
        self.version += 1
        thing["metadata"] = {**thing["metadata"], "resourceVersion": str(self.version)}
        self.objects[key] = thing
        self._tell(event, thing)
        return thing

    def _tell(self, event: str, thing: Manifest) -> None:
        if thing["kind"] in (KIND, "Pod"):
            for watcher in list(self.watchers):
                watcher(event, thing)


def _owner(thing: Manifest) -> str | None:
    owners = thing["metadata"].get("ownerReferences") or ()
    return owners[0]["uid"] if owners else None
