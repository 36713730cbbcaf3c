"""What a user says about ports."""

from __future__ import annotations

from pydantic import Field

from fthsdp_operator.api.parts import SpecPart

__all__ = ["LAST_PORT", "PORTS_CEL", "PORTS_PER_ATTEMPT", "PORTS_PER_REPLICA", "PORTS_RULE", "NetworkSpec", "last_port"]

PORTS_PER_ATTEMPT = 2
"""Where pods share the network of their node: a process group that is built anew in a pod does not use the port of the
one before, which may still be listened on."""
PORTS_PER_REPLICA = 2 * PORTS_PER_ATTEMPT
"""New pods take turns, since those before may still be there while they start."""
LAST_PORT = 65535
PORTS_RULE = (
    "network.masterPort is too high: with hostNetwork each replica and spare has four ports from there on, so lower it"
)
PORTS_CEL = (
    "!has(self.template.spec.hostNetwork) || !self.template.spec.hostNetwork"
    f" || self.network.masterPort + {PORTS_PER_REPLICA} * (self.replicas + self.spares) - 1 <= {LAST_PORT}"
)


class NetworkSpec(SpecPart):
    """Ports that have to be fixed; everything else listens on a free one."""

    master_port: int = Field(default=29500, ge=1024, le=LAST_PORT)
    """Port of torch's rendezvous on the first pod of a replica (MASTER_PORT). With hostNetwork it is the first of four
    for each replica and spare, which the scheduler keeps apart from those of other pods on the same node."""


def last_port(master_port: int, groups: int) -> int:
    """Return the highest port that a job of so many groups takes with hostNetwork."""
    return master_port + PORTS_PER_REPLICA * groups - 1
