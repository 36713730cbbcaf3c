"""A job whose pods are as people have them: with all that a real kubelet treats differently from a single container.

Both pods of both replicas are on one node and use its network. Each has an init container, a native sidecar, a proxy
that never exits as webhooks put it beside the training, and shared memory of its own. The job's name is as long as it
may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.cluster.kube.training import Training
from tests.cluster.stage import example

from fthsdp_operator.api.names import MAX_JOB_NAME

__all__ = ["CROWDED", "SHARED_MEMORY", "crowded"]

Object = dict[str, Any]
CROWDED = "crowded".ljust(MAX_JOB_NAME, "x")
SHARED_MEMORY = 48 << 20
"""Bytes that the template gives to /dev/shm."""
_TEXT = "/prepared/text"
_PREPARE = f"print('the quick brown fox jumps over the lazy dog. ' * 2000, file=open('{_TEXT}', 'w'))"
_NEVER_EXITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(60)
"""


def crowded(training: Training, node: str, arguments: Sequence[str], *, interface: str | None) -> Object:
    """Return its manifest, to run on one node.

    ``interface``: of the node's network, where the node's name does not lead there.
    """
    job = example(training, [*arguments, "--data", _TEXT])
    job["metadata"]["name"] = CROWDED
    job["spec"] |= {"replicas": 2, "minReplicas": 2, "podsPerReplica": 2}
    pod = job["spec"]["template"]["spec"]
    pod |= {"hostNetwork": True, "nodeSelector": {"kubernetes.io/hostname": node}}
    memory = {"medium": "Memory", "sizeLimit": str(SHARED_MEMORY)}
    pod["volumes"] = [*pod["volumes"], {"name": "shm", "emptyDir": memory}, {"name": "prepared", "emptyDir": {}}]
    prepared = {"name": "prepared", "mountPath": "/prepared"}
    (trainer,) = pod["containers"]
    trainer["volumeMounts"] = [*trainer["volumeMounts"], {"name": "shm", "mountPath": "/dev/shm"}, prepared]
    if interface is not None:
        trainer["env"].append({"name": "GLOO_SOCKET_IFNAME", "value": interface})
    pod["initContainers"] = [
        _beside(training, "prepare", _PREPARE) | {"volumeMounts": [prepared]},
        _beside(training, "native", _NEVER_EXITS) | {"restartPolicy": "Always"},
    ]
    pod["containers"].append(_beside(training, "injected", _NEVER_EXITS))
    return job


def _beside(training: Training, name: str, program: str) -> Object:
    return {
        "name": name,
        "image": training.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", program],
        "resources": {"requests": {"cpu": "5m", "memory": "16Mi"}},
    }
