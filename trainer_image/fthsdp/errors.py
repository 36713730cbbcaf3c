"""Every error that fthsdp raises on purpose.

::

    FthsdpError
    ├── ConfigError             a setting, a manifest or the environment is wrong: fix it and start again
    ├── WireError               what came over a connection is not what the protocol says
    │   ├── ConnectionLost      the peer closed, or went silent
    │   └── Refused             the peer answered, and said no: wrong job key, stale attempt, other protocol version
    │       └── Untrusted       one side does not accept the other's certificate, which a renewed one may mend
    ├── RingBroken              a collective across replicas ended early; the step protocol handles it
    ├── ReplicaLost             this replica is out of step with the others and must start again as a joiner
    │   └── StateDiverged       its digest is not the others'
    └── NotReady                something is asked for before it exists

A message names the thing, says what was wrong and what would be right.
"""

__all__ = [
    "ConfigError",
    "ConnectionLost",
    "FthsdpError",
    "NotReady",
    "Refused",
    "ReplicaLost",
    "RingBroken",
    "StateDiverged",
    "Untrusted",
    "WireError",
]


class FthsdpError(Exception):
    """The root of the tree."""


class ConfigError(FthsdpError, ValueError):
    """A setting, a manifest or the environment is wrong."""


class WireError(FthsdpError):
    """A connection carried something that the protocol does not allow."""


class ConnectionLost(WireError):
    """The peer closed the connection or stayed silent for too long."""


class Refused(WireError):
    """The peer answered and refused us; the message is its reason."""


class Untrusted(Refused):
    """One side does not accept the certificate of the other: expired, not valid yet, or of another authority."""


class RingBroken(FthsdpError):
    """A collective across replicas ended before it was complete.

    ``suspect`` is the replica on the other side of the connection that failed, or None when the collective was
    cancelled from this side.
    """

    def __init__(self, message: str, *, suspect: int | None = None) -> None:
        super().__init__(message)
        self.suspect = suspect


class ReplicaLost(FthsdpError):
    """This replica cannot go on from its own state: it has to start again and catch up from the others."""


class StateDiverged(ReplicaLost):
    """This replica's state is not bit-identical with that of the other replicas."""


class NotReady(FthsdpError):
    """Something was asked for before it exists."""
