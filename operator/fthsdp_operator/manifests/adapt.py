"""What a user's pod is given so that training runs in it as people expect. Pure: a pod's spec is changed in place.

Whatever the user has decided is left alone.
"""

from __future__ import annotations

from typing import Any

from fthsdp_operator.api import PORTS_PER_ATTEMPT, PORTS_PER_REPLICA, Job

__all__ = ["SHARED_MEMORY", "adapt", "lead", "master_port"]

Manifest = dict[str, Any]

SHARED_MEMORY = "fthsdp-shm"
"""Name of the volume."""
_SHM_FOLDER = "/dev/shm"  # noqa: S108
_PORT_NAME = "fthsdp-torch"


def adapt(spec: Manifest) -> None:
    """Give a pod shared memory, and names that resolve on its node's network."""
    _share_memory(spec)
    if spec.get("hostNetwork"):
        _resolve_names(spec)


def lead(spec: Manifest, *, port: int) -> None:
    """Give the pod with torch's rendezvous of its replica ports of its node, where it is on that one's network.

    The rendezvous is on ``port`` or the next one, and nobody else has those.
    """
    if spec.get("hostNetwork"):
        first, *others = spec["containers"]
        spec["containers"] = [_claiming(first, port), *others]


def master_port(job: Job, replica: int, generation: int) -> int:
    """Return the port of torch's rendezvous in pods of a replica that has got new ones so often before.

    Pods with an address of their own all use the same. On the network of a node no two may that can be there at a time:
    not two replicas, and not the pods of one and those before, which may still be on their way out.
    """
    first = job.spec.network.master_port
    if not job.spec.template["spec"].get("hostNetwork"):
        return first
    return first + PORTS_PER_REPLICA * replica + PORTS_PER_ATTEMPT * (generation % 2)


def _share_memory(spec: Manifest) -> None:
    """Let the training container have as much of it as it may have memory: the 64 MiB that it gets otherwise are less
    than what the workers of one DataLoader pass on."""
    mounts = spec["containers"][0].setdefault("volumeMounts", [])
    if spec.get("hostIPC") or any(str(it.get("mountPath", "")).rstrip("/") == _SHM_FOLDER for it in mounts):
        return
    mounts.append({"name": SHARED_MEMORY, "mountPath": _SHM_FOLDER})
    spec["volumes"] = [*(spec.get("volumes") or []), {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]


def _resolve_names(spec: Manifest) -> None:
    """ClusterFirst, which is also what a pod gets that says nothing, means the node's name server on its network."""
    if spec.get("dnsPolicy") in (None, "ClusterFirst"):
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"


def _claiming(container: Manifest, port: int) -> Manifest:
    """Declare ports of the node, so that the scheduler places no two pods on one node that would listen on the same."""
    ports = container.get("ports") or []
    taken = {number for it in ports for number in (it.get("hostPort"), it.get("containerPort"))}
    mine = ((f"{_PORT_NAME}-{turn}", port + turn) for turn in range(PORTS_PER_ATTEMPT))
    free = [{"name": name, "containerPort": it, "hostPort": it} for name, it in mine if it not in taken]
    return {**container, "ports": [*ports, *free]}
