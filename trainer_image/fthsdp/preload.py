"""Imports what a training process imports sooner or later: an interpreter that waits for its command has all of it.

More than half of the time in which a training process starts is spent here. ``torch._dynamo`` is what torch imports
when it is first asked for an optimizer, and takes as long as all of torch.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["MODULES"]

MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "fthsdp.group",
    "fthsdp.state",
    "fthsdp.checkpoint",
)

for name in MODULES:
    import_module(name)
