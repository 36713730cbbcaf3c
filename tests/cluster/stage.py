"""What the tests of the operator on a cluster share: where it is installed, the example as they run it, a diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.kube.cluster import Cluster
from tests.cluster.kube.helm import Helm
from tests.cluster.kube.images import PROJECT
from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.shell import until
from tests.cluster.kube.training import Training

__all__ = [
    "DEFINITION",
    "ENDLESS",
    "NAMESPACE",
    "NOTICED",
    "RELEASE",
    "SYSTEM",
    "acting",
    "another_acts",
    "diagnosis",
    "example",
    "helm_and_namespaces",
    "image_values",
    "no_new_pods",
    "refused_by_quota",
]

Object = dict[str, Any]
ENDLESS = ("--steps", "100000", "--batch-size", "4", "--micro-batch-size", "4", "--emulate-compute", "0.5")
"""Arguments with which the example trains for longer than any test, in steps that can be watched."""
SYSTEM, NAMESPACE, RELEASE = "fthsdp-system", "training", "fthsdp"
QUOTA = "no-new-pods"
NOTICED = 60.0
"""Seconds within which Kubernetes, or the operator, says what it has seen."""
TAKEN_OVER = 90.0
"""Seconds within which an operator takes over from one that was killed: the Lease is the dead one's for 15 of them."""
DEFINITION = ("CustomResourceDefinition", "<none>", "fthsdpjobs.fthsdp.dev")


@contextmanager
def helm_and_namespaces(cluster: Cluster) -> Iterator[Helm]:
    """Give Helm and two fresh namespaces; the operator's lets in nothing but restricted pods. All goes afterwards."""
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    names = {SYSTEM: restricted, NAMESPACE: {}}
    cluster.kubectl.apply(
        *(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
            for name, labels in names.items()
        )
    )
    helm = Helm(kubeconfig=cluster.kubeconfig, namespace=SYSTEM)
    try:
        cluster.kubectl("wait", "serviceaccount/default", "--for=create", "--namespace", NAMESPACE, "--timeout=30s")
        yield helm
    finally:
        helm.uninstall(RELEASE)
        cluster.kubectl("delete", "crd", DEFINITION[2], "--ignore-not-found", "--timeout=60s")
        cluster.kubectl("delete", "namespace", *names, "--timeout=120s")


def image_values(cluster: Cluster, source: Path = PROJECT) -> dict[str, str | int]:
    """Return the chart's values that name the operator's image, made of a folder's code."""
    repository, _, tag = cluster.operator_image(source).rpartition(":")
    return {"image.repository": repository, "image.tag": tag}


def acting(kubectl: Kubectl) -> str:
    """Return the name of the operator's pod that acts; empty while none does."""
    lease = kubectl.get("lease", f"{RELEASE}-operator", "--namespace", SYSTEM)
    return str(lease.get("spec", {}).get("holderIdentity", "")).partition("_")[0]


@contextmanager
def another_acts(kubectl: Kubectl) -> Iterator[None]:
    """Kill the operator that acts, let the block look, and wait for the one that takes over."""
    before = acting(kubectl)
    kubectl("delete", "pod", before, "--namespace", SYSTEM, "--grace-period=0", "--force")
    yield
    until(lambda: acting(kubectl) not in ("", before), "another operator acts", timeout=TAKEN_OVER)


@contextmanager
def no_new_pods(kubectl: Kubectl) -> Iterator[None]:
    """Have each further pod of the namespace refused for as long as the block; those that are there stay."""
    here = ("--namespace", NAMESPACE)
    metadata = {"name": QUOTA, "namespace": NAMESPACE}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": {"pods": "0"}}}
    kubectl.apply(quota)
    try:
        kubectl("wait", f"resourcequota/{QUOTA}", "--for=jsonpath={.status.hard.pods}=0", "--timeout=30s", *here)
        yield
    finally:
        kubectl("delete", "resourcequota", QUOTA, "--timeout=30s", *here)


def refused_by_quota(status: Object) -> bool:
    """Return whether a job waits for pods that its namespace does not take."""
    return any(
        (it["type"], it["status"], it["reason"]) == ("Stalled", "True", "QuotaExceeded") for it in status["conditions"]
    )


def example(training: Training, arguments: Sequence[str], source: Path = PROJECT) -> Object:
    """Return the example of a folder's code, with torch from where this cluster has it, and with other arguments."""
    job: Object = yaml.safe_load((source / "examples" / "tiny-llama.yaml").read_text())
    job["metadata"]["namespace"] = NAMESPACE
    pod = job["spec"]["template"]["spec"]
    pod["volumes"] = training.volumes
    (container,) = pod["containers"]
    container["image"] = training.image
    container["command"][0] = training.python
    container["args"] = list(arguments)
    container["env"] = [*container.get("env", []), *training.env]
    container["volumeMounts"] = training.mounts
    container["resources"] = {"requests": {"cpu": "50m", "memory": "128Mi"}}
    return job


def diagnosis(kubectl: Kubectl, *jobs: str) -> str:
    """Return what somebody wants to see of a run that failed."""
    here = ("--namespace", NAMESPACE)
    questions = (
        ("get", "fthsdp,pods,nodes", "--all-namespaces", "--output=wide"),
        ("get", "events", *here, "--sort-by=.lastTimestamp"),
        ("logs", f"deployment/{RELEASE}-operator", "--namespace", SYSTEM, "--tail=60"),
        *(("logs", f"{job}-coordinator", *here, "--tail=40") for job in jobs),
        ("logs", "--selector=fthsdp.dev/role=trainer", *here, "--tail=20", "--prefix"),
        *(("get", "fthsdp", job, *here, "--output=yaml") for job in jobs),
    )
    return "\n\n".join(kubectl.answer(*question) for question in questions)
