"""Ports for the processes that tests and benchmarks start."""

from __future__ import annotations

from fthsdp_operator.local import ports

__all__ = ["free_port"]

_given: set[int] = set()


def free_port() -> int:
    """Return a port on which nobody listens: none that was given before, and none that a kernel would give a
    connection, or a listener on any port, before the process that it is for has come so far as to listen there."""
    return ports.free_port(_given)
