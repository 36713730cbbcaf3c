"""Machines: a scheduler that places pods, kubelets that run them, and the controllers that give up on lost nodes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from tests.simulation.operator.server import name_of, uid_of

from fthsdp.exit_codes import EXIT_CONFIG
from fthsdp.launcher.supervisor import PATIENCE
from fthsdp_operator.api import (
    ATTEMPT_LABEL,
    CONTAINER_ANNOTATION,
    JOB_UID_LABEL,
    POD_INDEX_LABEL,
    REPLICA_LABEL,
    format_time,
)
from fthsdp_operator.cluster import Manifest
from fthsdp_operator.observed.observe import NodeView

if TYPE_CHECKING:
    from tests.simulation.operator.world import World

__all__ = ["BAD_IMAGES", "Node", "Nodes", "Process"]

BAD_IMAGES = ("typo", "fails", "fails-later")
"""Images of training pods: one that does not exist, one whose program ends with 1, and one that does so in its first
step."""
UNHEARD = 8.0
"""Seconds for which nothing is heard of a kubelet until its node is called not Ready."""
TRY_AGAIN = 5.0
"""Seconds after which a scheduler or kubelet tries again what did not work."""


@dataclass(eq=False)
class Process:
    """What runs in a pod. It may outlive the pod's object, on a node that nobody reaches."""

    pod: str
    uid: str
    job: str
    """UID of the job."""
    node: Node
    who: tuple[int, int] | None
    """Replica and attempt; None: the coordinator."""
    index: int
    image: str = ""
    alive: bool = True
    launched: bool = False
    """It is a launcher, and what it launched is what trains."""
    crashed: int | None = None
    """Exit code of what it launched, until it launches that again."""
    told: bool = False
    """It got a SIGTERM."""
    ended: tuple[int, str, str] = (0, "", "")
    """Exit code, the kubelet's reason for the container, and the one for the pod."""


@dataclass(eq=False)
class Node:
    """One machine."""

    name: str
    clock: float
    """Seconds by which its clock is ahead."""
    room: int
    reachable: bool = True
    cordoned: bool = False
    gone: bool = False
    ill: bool = False
    """It says that it has lost a GPU."""
    not_ready_since: float | None = None
    outages: int = 0
    processes: dict[str, Process] = field(default_factory=dict)
    """By the pod's uid."""

    def view(self) -> NodeView:
        """What the operator sees of it."""
        ready = "True" if self.not_ready_since is None else "Unknown"
        return NodeView(
            name=self.name,
            ready=ready,
            not_ready_since=self.not_ready_since,
            unschedulable=self.cordoned,
            conditions=frozenset({("Ready", ready), ("GPUMissing", str(self.ill))}),
        )


class Nodes:
    """All machines, and who looks after them."""

    def __init__(self, world: World, *, number: int, room: int) -> None:
        self._world = world
        self._room = room
        self._number = 0
        self.all: dict[str, Node] = {}
        self.full = False
        """There is no room on any node."""
        self.images_broken = False
        """No training image can be pulled."""
        self.refusals = 0
        """So many of the next pods are refused by their kubelets."""
        self.suspects: set[str] = set()
        """Nodes that were cordoned, ill or called not Ready although nothing was wrong with them."""
        for _ in range(number):
            self._add()

    def _add(self) -> None:
        self._number += 1
        clock = self._world.random.choice([0.0, 0.0, -3.0, 90.0])
        node = Node(name=f"node-{self._number}", clock=clock, room=self._room)
        self.all[node.name] = node

    # --- the scheduler ---

    def created(self, pod: Manifest) -> None:
        """A pod wants a place."""
        self._world.after(self._world.random.uniform(0.05, 1.0), self._schedule, uid_of(pod))

    def _schedule(self, uid: str) -> None:
        pod = self._world.server.pod(uid)
        if pod is None:
            return
        used = [it["spec"].get("nodeName") for it in self._world.server.pods()]
        places = [node for node in self.all.values() if self._fits(node, used.count(node.name))]
        if not places:
            self._world.blame_pod(pod, "there is no room")
            self._world.server.change(pod, status={"conditions": [_scheduled("False", "Unschedulable")]})
            self._world.after(TRY_AGAIN, self._schedule, uid)
            return
        avoided = _avoided(pod)
        place = self._world.random.choice([node for node in places if node.name not in avoided] or places)
        self._world.server.change(pod, spec={"nodeName": place.name}, status={"conditions": [_scheduled("True", "")]})
        self._world.after(self._world.random.choice([0.3, 1.0, 1.0, 10.0]), self._start, uid, place)

    def _fits(self, node: Node, used: int) -> bool:
        well = node.reachable and node.not_ready_since is None and not node.cordoned
        return well and not self.full and used < node.room

    # --- the kubelet ---

    def _start(self, uid: str, node: Node) -> None:
        pod = self._world.server.pod(uid)
        if pod is None or node.gone or "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] != "Pending":
            return
        labels = pod["metadata"]["labels"]
        trains = REPLICA_LABEL in labels
        image = pod["spec"]["containers"][0]["image"]
        broken = trains and (self.images_broken or image == "typo")
        if not node.reachable or broken:
            if node.reachable:
                self._world.blame_pod(pod, "its image cannot be pulled")
                waiting = {"name": "main", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
                self._world.server.change(pod, status={"containerStatuses": [waiting]})
            self._world.after(TRY_AGAIN, self._start, uid, node)
            return
        if trains and self.refusals:
            self.refusals -= 1
            self._world.happened_to(pod, "refused by the kubelet")
            self._world.server.change(pod, status={"phase": "Failed", "reason": "UnexpectedAdmissionError"})
            return
        process = Process(
            pod=name_of(pod),
            uid=uid,
            job=labels[JOB_UID_LABEL],
            node=node,
            who=(int(labels[REPLICA_LABEL]), int(labels[ATTEMPT_LABEL])) if trains else None,
            index=int(labels.get(POD_INDEX_LABEL, 0)),
            image=image,
            launched=trains and any("fthsdp.launcher" in it.get("command", ()) for it in pod["spec"]["containers"]),
        )
        node.processes[uid] = process
        self._world.server.change(pod, status={"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": []})
        self._world.training.started(process)
        if trains and image == "fails":
            self._world.after(self._world.random.uniform(0.2, 2.0), self.ends_with, process, 1)

    def ends(self, pod: Manifest) -> float | None:
        """Return when a pod's grace period ends; None when nobody asked it to stop."""
        end = pod["metadata"].get("deletionTimestamp")
        return None if end is None else datetime.fromisoformat(end).timestamp()

    def stop(self, pod: Manifest, end: float) -> None:
        """A pod was asked to stop by then; its kubelet hears of it if it hears anything."""
        self._world.after(self._world.random.uniform(0.05, 0.5), self._stop, uid_of(pod))
        self._world.after(end - self._world.now, self._stop, uid_of(pod))

    def _stop(self, uid: str) -> None:
        pod = self._world.server.pod(uid)
        node = None if pod is None else self.all.get(pod["spec"].get("nodeName", ""))
        if pod is None or node is None or not node.reachable:
            return
        process, end = node.processes.get(uid), self.ends(pod)
        if process is None:
            self._world.after(0.3, self._world.server.remove, pod)
        elif process.alive and end is not None and self._world.now >= end:
            self.ends_with(process, 137)
        elif process.alive and not process.told:
            process.told = True
            if process.crashed is None:
                self._world.training.told(process)
            else:
                self.ends_with(process, process.crashed)
        elif not process.alive:
            self._report(process)

    def ends_with(self, process: Process, code: int, reason: str = "", pod_reason: str = "") -> None:
        """A process ends; its kubelet says so when it can."""
        if not process.alive:
            return
        process.alive = False
        process.ended = (code, reason or ("Completed" if code == 0 else "Error"), pod_reason)
        self._world.note(f"{process.pod} ends with {code} {reason or pod_reason}".rstrip())
        if process.crashed is None:
            self._world.training.ended(process)
        elif process.who is not None:
            self._world.blame(process.job, process.who, "its launcher has given up")
        if process.node.reachable:
            self._world.after(self._world.random.uniform(0.05, 1.0), self._report, process)

    # --- launchers ---

    def command_ends(self, process: Process, code: int, reason: str = "") -> None:
        """What a container runs ends; a launcher stays, and tells of it, where that may help."""
        if not process.launched or process.told or code in (0, EXIT_CONFIG):
            self.ends_with(process, code, reason)
        elif process.alive and process.crashed is None:
            process.crashed, process.ended = code, (code, reason or "Error", "")
            self._world.note(f"what {process.pod} runs ends with {code}")
            self._world.training.ended(process)
            self._world.after(self._world.random.choice([0.05, 0.05, 2.0]), self._world.training.tell_crash, process)
            self._world.after(PATIENCE, self._give_up, process)

    def _give_up(self, process: Process) -> None:
        if process.crashed is not None:
            self.ends_with(process, process.crashed)

    def labelled(self, pod: Manifest) -> None:
        """A pod has another label; its kubelet shows it, in time."""
        self._world.after(self._world.random.choice([0.2, 1.0, 1.0, 45.0]), self._show_label, uid_of(pod))

    def _show_label(self, uid: str) -> None:
        pod = self._world.server.pod(uid)
        node = None if pod is None else self.all.get(pod["spec"].get("nodeName", ""))
        old = None if node is None else node.processes.get(uid)
        if pod is None or node is None or old is None or old.who is None or not node.reachable:
            return
        attempt = int(pod["metadata"]["labels"][ATTEMPT_LABEL])
        if not old.alive or old.told or attempt <= old.who[1] or self._world.training.stands_still(old):
            return
        fresh = replace(old, who=(old.who[0], attempt), crashed=None, ended=(0, "", ""))
        old.alive, node.processes[uid] = False, fresh
        self._world.note(f"{fresh.pod} runs attempt {attempt}")
        self._world.training.started(fresh)

    def _report(self, process: Process) -> None:
        pod = self._world.server.pod(process.uid)
        if not process.node.reachable or process.node.gone:
            return
        if pod is None:
            process.node.processes.pop(process.uid, None)
            return
        code, reason, pod_reason = process.ended
        going = "deletionTimestamp" in pod["metadata"]
        if process.who is None and code != 0 and not going:
            self._world.after(self._world.random.uniform(1.0, 10.0), self._restart, process)
            return
        lingers = self._world.meshed and not going and not pod_reason
        if pod["status"]["phase"] == "Running" and not (lingers and pod["status"].get("containerStatuses")):
            at = format_time(self._world.now + process.node.clock)
            state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}
            main = {"name": pod["metadata"]["annotations"][CONTAINER_ANNOTATION], "state": state}
            phase = "Running" if lingers else "Succeeded" if code == 0 else "Failed"
            status = {"phase": phase, "containerStatuses": [main], **({"reason": pod_reason} if pod_reason else {})}
            pod = self._world.server.change(pod, status=status)
        if going:
            self._world.after(self._world.random.uniform(0.1, 1.5), self._world.server.remove, pod)

    def _restart(self, process: Process) -> None:
        """A coordinator's container is restarted in its pod."""
        pod = self._world.server.pod(process.uid)
        if process.alive or pod is None or "deletionTimestamp" in pod["metadata"] or not process.node.reachable:
            return
        process.alive, process.told = True, False
        self._world.training.started(process)

    def removed(self, pod: Manifest) -> None:
        """A pod's object is gone: whatever still runs is killed where somebody can."""
        node = self.all.get(pod["spec"].get("nodeName", ""))
        if node is not None:
            self._world.after(self._world.random.uniform(0.1, 2.0), self._kill_strays, node)

    def _kill_strays(self, node: Node) -> None:
        if not node.reachable:
            return
        for process in list(node.processes.values()):
            if self._world.server.pod(process.uid) is None:
                self.ends_with(process, 137)
                node.processes.pop(process.uid, None)

    # --- what happens to nodes ---

    def lose(self, node: Node, *, power: bool, patience: float) -> None:
        """Nobody reaches a node any more. After ``patience`` seconds its pods are evicted, which it does not hear."""
        if not node.reachable:
            return
        node.reachable = False
        node.outages += 1
        self._world.note(f"{node.name} is lost{' without power' if power else ''}")
        if power:
            for process in list(node.processes.values()):
                self.ends_with(process, 255, "Unknown")
        for pod in self._world.server.pods():
            if pod["spec"].get("nodeName") == node.name:
                self._world.blame_pod(pod, f"{node.name} was lost")
        self._world.training.unreachable(node)
        self._world.after(UNHEARD, self._call_not_ready, node, node.outages)
        self._world.after(patience, self._evict, node, node.outages)

    def _call_not_ready(self, node: Node, outage: int) -> None:
        if not node.reachable and node.outages == outage:
            node.not_ready_since = self._world.now

    def lie(self, node: Node, seconds: float) -> None:
        """A node is called not Ready for a time, and nothing is wrong with it."""
        self.suspects.add(node.name)
        node.not_ready_since = node.not_ready_since or self._world.now
        self._world.after(seconds, self._call_ready, node)

    def _call_ready(self, node: Node) -> None:
        if node.reachable:
            node.not_ready_since = None

    def cordon(self, node: Node, seconds: float) -> None:
        """A user keeps new pods away from a node for a time."""
        self.suspects.add(node.name)
        node.cordoned = True
        self._world.after(seconds, setattr, node, "cordoned", False)

    def fall_ill(self, node: Node, seconds: float) -> None:
        """A node says for a time that it is ill."""
        self.suspects.add(node.name)
        node.ill = True
        self._world.after(seconds, setattr, node, "ill", False)

    def is_suspect(self, job: str, who: tuple[int, int]) -> bool:
        """Whether a pod of an attempt is on a node that it may have to leave."""
        for pod in self._world.server.pods():
            labels = pod["metadata"]["labels"]
            if labels[JOB_UID_LABEL] != job or REPLICA_LABEL not in labels:
                continue
            mine = (int(labels[REPLICA_LABEL]), int(labels[ATTEMPT_LABEL])) == who
            if mine and pod["spec"].get("nodeName") in self.suspects:
                return True
        return False

    def _evict(self, node: Node, outage: int) -> None:
        if node.reachable or node.outages != outage:
            return
        for pod in self._world.server.pods():
            if pod["spec"].get("nodeName") == node.name and "deletionTimestamp" not in pod["metadata"]:
                self.disrupt(pod, "DeletionByTaintManager")
                self._world.server.delete("Pod", name_of(pod))

    def disrupt(self, pod: Manifest, reason: str, **status: str) -> None:
        """Kubernetes itself takes a pod away, and says why."""
        self._world.happened_to(pod, reason)
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": ""}
        self._world.server.change(pod, status={"conditions": [condition], **status})

    def back(self, node: Node) -> None:
        """A node is reached again, and does what it was asked to meanwhile."""
        if node.reachable or node.gone:
            return
        node.reachable = True
        self._world.after(1.0, self._call_ready, node)
        self._world.note(f"{node.name} is back")
        self._kill_strays(node)
        for pod in self._world.server.pods():
            if pod["spec"].get("nodeName") != node.name:
                continue
            process = node.processes.get(uid_of(pod))
            if REPLICA_LABEL in pod["metadata"]["labels"]:
                self._world.after(0.5, self._show_label, uid_of(pod))
            if "deletionTimestamp" in pod["metadata"]:
                self._world.after(0.3, self._stop, uid_of(pod))
            elif process is not None and not process.alive:
                self._world.after(0.3, self._report, process)
        self._world.training.reachable(node)

    def remove(self, node: Node) -> None:
        """A machine is taken away for good, and another one comes; in time its pods are taken off the books."""
        if node.gone:
            return
        self.lose(node, power=True, patience=300.0)
        node.gone, node.reachable = True, False
        self._add()
        self._world.after(self._world.random.uniform(20.0, 60.0), self._forget, node)

    def _forget(self, node: Node) -> None:
        for pod in self._world.server.pods():
            if pod["spec"].get("nodeName") == node.name:
                if pod["status"]["phase"] not in ("Succeeded", "Failed"):
                    self.disrupt(pod, "DeletionByPodGC", phase="Failed")
                self._world.server.delete("Pod", name_of(pod), grace=0)
        self.all.pop(node.name, None)

    def heal(self) -> None:
        """All nodes are there and have room."""
        self.full = self.images_broken = False
        self.refusals = 0
        for node in list(self.all.values()):
            node.cordoned = node.ill = False
            self.back(node)
            self._call_ready(node)


def _scheduled(status: str, reason: str) -> dict[str, str]:
    return {"type": "PodScheduled", "status": status, "reason": reason, "message": "no node has room"}


def _avoided(pod: Manifest) -> set[str]:
    """Names of the nodes that a pod had rather not go to."""
    wishes = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).values()
    fields = (it for terms in wishes for term in terms for it in term["preference"]["matchFields"])
    return {name for it in fields for name in it["values"]}
