"""The objects of a job on this machine: what the API server's storage is to a cluster.

Objects go in and out as copies, so that nobody changes what is stored but through here; each change gives the object a
new resourceVersion.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

__all__ = ["Objects", "timestamp"]

Json = dict[str, Any]


def timestamp(*, after: float = 0) -> str:
    """Return the time ``after`` seconds from now as Kubernetes writes it."""
    return (datetime.now(UTC) + timedelta(seconds=after)).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Objects:
    """Manifests by kind, namespace and name."""

    def __init__(self) -> None:
        self._stored: dict[tuple[str, str, str], Json] = {}
        self._versions = itertools.count(1)

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return a copy of an object, or None."""
        return deepcopy(self._stored.get((kind, namespace, name)))

    def list(self, kind: str, namespace: str, labels: Mapping[str, str]) -> list[Json]:
        """Return copies of the objects that carry all of these labels, in the order of their creation."""
        return [
            deepcopy(item)
            for (its_kind, its_namespace, _), item in self._stored.items()
            if (its_kind, its_namespace) == (kind, namespace)
            and labels.items() <= item["metadata"].get("labels", {}).items()
        ]

    def add(self, manifest: Json) -> Json | None:
        """Store a new object and return a copy of it; None when one of that name exists."""
        item = deepcopy(manifest)
        meta = item["metadata"]
        key = (item["kind"], meta.setdefault("namespace", "default"), meta["name"])
        if key in self._stored:
            return None
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp(), "generation": 1}
        self._stored[key] = item
        self._touch(item)
        return deepcopy(item)

    def change(self, kind: str, namespace: str, name: str, edit: Callable[[Json], None]) -> Json | None:
        """Let ``edit`` change the stored object and return a copy of it; None when there is none."""
        item = self._stored.get((kind, namespace, name))
        if item is None:
            return None
        edit(item)
        self._touch(item)
        return deepcopy(item)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Forget an object; one that is not there is fine."""
        self._stored.pop((kind, namespace, name), None)

    def _touch(self, item: Json) -> None:
        item["metadata"]["resourceVersion"] = str(next(self._versions))
