"""Fault-tolerant HSDP: what runs inside the pods.

A training script needs ``replica_group`` and ``TrainState``; the rest is how they work. ``group`` is the step loop that
users see, ``protocol`` what a replica promises and does behind it, ``ftar`` the all-reduce across replicas, ``catchup``
how a newcomer gets the state, ``checkpoint`` how it outlives all replicas, ``data`` who trains which samples,
``coordinator`` who is a member. Names are loaded when they are used, so that the coordinator runs without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fthsdp.data.stream import StreamDataset
    from fthsdp.errors import ConfigError, FthsdpError
    from fthsdp.ftar import FtarSettings
    from fthsdp.group import ReplicaGroup, Step, replica_group
    from fthsdp.state import TrainState

__all__ = [
    "ConfigError",
    "FtarSettings",
    "FthsdpError",
    "ReplicaGroup",
    "Step",
    "StreamDataset",
    "TrainState",
    "replica_group",
]

_HOMES = {
    "ConfigError": "fthsdp.errors",
    "FtarSettings": "fthsdp.ftar",
    "FthsdpError": "fthsdp.errors",
    "ReplicaGroup": "fthsdp.group",
    "Step": "fthsdp.group",
    "StreamDataset": "fthsdp.data.stream",
    "TrainState": "fthsdp.state",
    "replica_group": "fthsdp.group",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fthsdp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
