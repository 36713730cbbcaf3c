"""All that a cluster holds, so that two moments can be compared: what was added, what was left behind."""

from __future__ import annotations

from tests.cluster.kube.kubectl import Kubectl
from tests.cluster.kube.shell import until

__all__ = ["Inventory", "inventory", "wait_until_left"]

Inventory = frozenset[tuple[str, str, str]]
"""Kind, namespace (``<none>`` where there is none) and name of each object."""

_PASSING = ("events", "componentstatuses", "leases", "apiservices", "bindings")
"""Kinds that come and go by themselves, or that mirror others."""


def inventory(kubectl: Kubectl, *, namespaces: frozenset[str]) -> Inventory:
    """List everything in these namespaces, and everything that is in none."""
    kinds = [
        name
        for name in kubectl("api-resources", "--verbs=list", "--output=name").split()
        if name.partition(".")[0] not in _PASSING
    ]
    columns = "--output=custom-columns=KIND:.kind,NAMESPACE:.metadata.namespace,NAME:.metadata.name"
    listing = kubectl("get", ",".join(kinds), "--all-namespaces", "--no-headers", "--ignore-not-found", columns)
    found = [tuple(line.split()) for line in listing.splitlines()]
    return frozenset((kind, namespace, name) for kind, namespace, name in found if namespace in namespaces | {"<none>"})


def wait_until_left(kubectl: Kubectl, *, namespaces: frozenset[str], expected: Inventory) -> None:
    """Wait until just this is there; raises ClusterError that names what is too much or missing."""
    difference: Inventory = frozenset()

    def only_that() -> bool:
        nonlocal difference
        difference = inventory(kubectl, namespaces=namespaces) ^ expected
        return not difference

    until(only_that, "nothing else is left", timeout=60, detail=lambda: str(sorted(difference)))
