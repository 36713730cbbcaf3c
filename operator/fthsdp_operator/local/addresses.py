"""Who listens where on this machine, and how pods are told.

All addresses are 127.0.0.1, so ports have to differ: the coordinator has one for the whole run (a restarted one is
found where the first was), and torch's rendezvous has one for each attempt of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fthsdp.environment import COORDINATOR, MASTER_ADDR, MASTER_PORT
from fthsdp_operator.local.ports import LOCALHOST, free_pair, free_port

__all__ = ["Addresses", "coordinator_arguments"]


class Addresses:
    """The ports of one run."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._rendezvous: dict[tuple[str, str], int] = {}
        self.coordinator_port = free_port(self._taken)

    @property
    def coordinator(self) -> str:
        """host:port"""
        return f"{LOCALHOST}:{self.coordinator_port}"

    def variables(self, replica: str, attempt: str) -> dict[str, str]:
        """Return the environment variables that name another host in the manifest of a training pod."""
        key = (replica, attempt)
        if key not in self._rendezvous:
            self._rendezvous[key] = free_pair(self._taken)  # the launcher uses both in turns
        port = str(self._rendezvous[key])
        return {
            COORDINATOR: self.coordinator,
            MASTER_ADDR: LOCALHOST,
            MASTER_PORT: port,
            "PET_MASTER_ADDR": LOCALHOST,
            "PET_MASTER_PORT": port,
        }


def coordinator_arguments(argv: Sequence[str], *, port: int, store: Path, record: Path) -> tuple[str, ...]:
    """Return the coordinator's command line with its port and its epoch store on this machine, and a record folder."""
    here = {"--port": str(port), "--store": f"file:{store}", "--record-dir": str(record)}
    kept = list(argv)
    for option in here:
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return (*kept, *(word for pair in here.items() for word in pair))
