"""Faults to order: ``--inject KIND:replica=R[,pod=P]@step=N``.

Parsing and the question "is it time" are pure; ``LocalCluster`` carries them out.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum

from fthsdp.errors import ConfigError

__all__ = ["Injection", "Kind", "check_targets", "due", "parse_injection"]


class Kind(StrEnum):
    """What is done to the pod."""

    KILL = "kill"
    """SIGKILL, as the kernel does when memory is short."""
    FREEZE = "freeze"
    """SIGSTOP: the process is there and silent."""
    TERM = "term"
    """SIGTERM to the process, without the pod being deleted."""
    DELETE = "delete"
    """The pod is deleted, as by ``kubectl delete pod``."""

    @property
    def signal(self) -> int | None:
        """The signal to send, or None where the pod is deleted instead."""
        return {Kind.KILL: signal.SIGKILL, Kind.FREEZE: signal.SIGSTOP, Kind.TERM: signal.SIGTERM}.get(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault."""

    kind: Kind
    replica: int
    pod: int | None
    """Index of the pod inside the replica; None means all of them."""
    step: int
    """It happens as soon as this step is final."""

    def __str__(self) -> str:
        pod = "" if self.pod is None else f",pod={self.pod}"
        return f"{self.kind}:replica={self.replica}{pod}@step={self.step}"


_FORM = "KIND:replica=R[,pod=P]@step=N"
_PATTERN = re.compile(
    r"(?P<kind>[a-z]+):replica=(?P<replica>[0-9]{1,9})(,pod=(?P<pod>[0-9]{1,9}))?@step=(?P<step>-?[0-9]{1,9})"
)


def parse_injection(text: str) -> Injection:
    """Read one ``--inject`` argument; raises ConfigError."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"--inject {text!r} is not of the form {_FORM}, for example kill:replica=2@step=20")
    if match["kind"] not in list(Kind):
        raise ConfigError(f"--inject {text!r}: {match['kind']!r} is none of {', '.join(Kind)}")
    if int(match["step"]) < 1:
        raise ConfigError(f"--inject {text!r}: step {match['step']} is not positive; the first step is 1")
    pod = None if match["pod"] is None else int(match["pod"])
    return Injection(kind=Kind(match["kind"]), replica=int(match["replica"]), pod=pod, step=int(match["step"]))


def check_targets(injections: list[Injection], *, replicas: int, pods_per_replica: int) -> None:
    """Raise ConfigError for a target that the job does not have."""
    for one in injections:
        if one.replica >= replicas:
            raise ConfigError(
                f"--inject {one}: there is no replica {one.replica}; this job has {_range('replica', replicas)}"
            )
        if one.pod is not None and one.pod >= pods_per_replica:
            raise ConfigError(
                f"--inject {one}: there is no pod {one.pod}; each replica of this job has"
                f" {_range('pod', pods_per_replica)}"
            )


def _range(noun: str, count: int) -> str:
    return f"{noun} 0 only" if count == 1 else f"{noun}s 0 to {count - 1}"


def due(waiting: list[Injection], step: int) -> tuple[list[Injection], list[Injection]]:
    """Split into those whose step is final and those that still wait."""
    return [i for i in waiting if i.step <= step], [i for i in waiting if i.step > step]
