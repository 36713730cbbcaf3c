"""What is allowed and most likely a mistake. Said once for each generation of a job, as a warning."""

from __future__ import annotations

from collections.abc import Iterator

from fthsdp_operator.api.spec import JobSpec
from fthsdp_operator.api.template import gpus

__all__ = ["advice"]


def advice(spec: JobSpec) -> Iterator[str]:
    """Yield a sentence for each thing that is probably not meant."""
    pod, given = spec.template["spec"], gpus(spec.template)
    if given and spec.ranks_per_pod != given:
        yield (
            f"processesPerPod is {spec.ranks_per_pod}, and the first container has {given} GPUs: leave processesPerPod"
            " out for one process a GPU"
        )
    if pod.get("hostNetwork") and pod.get("dnsPolicy") in ("Default", "None"):
        yield (
            f"the template has hostNetwork and dnsPolicy {pod['dnsPolicy']}: pods find each other only where that"
            " resolves the names of Services; leave dnsPolicy out for ClusterFirstWithHostNet"
        )
