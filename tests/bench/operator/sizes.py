"""How much is to be measured: the size that is promised, a tenth of it, or a handful of pods."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SIZES", "Size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Jobs, their pods, and how often things are repeated."""

    name: str
    replicas: int = 12
    """Of the large job."""
    pods_per_replica: int
    deletions: int
    """Pods of the large job that are deleted, one after the other; each costs its group."""
    restarts: int
    """Of the operator, each while a pod is deleted."""
    idle: float
    """Seconds over which a processor is watched that has nothing to do."""
    peer_groups: int = 12
    peer_sizes: tuple[int, int]
    """Pods of a group, next to LeaderWorkerSet."""
    peer_failures: int
    """Groups that fail, of each system and size."""
    told: int
    """Pods that are deleted to see how soon the other replicas are told."""
    jobs: int
    """Of eight pods each."""
    jobs_hit: int
    """Of those, how many lose a pod."""

    @property
    def pods(self) -> int:
        """Training pods of the large job."""
        return self.replicas * self.pods_per_replica


SIZES = {
    size.name: size
    for size in (
        Size(
            name="full",
            pods_per_replica=1042,
            deletions=12,
            restarts=3,
            idle=60.0,
            peer_sizes=(26, 104),
            peer_failures=3,
            told=30,
            jobs=500,
            jobs_hit=50,
        ),
        Size(
            name="quarter",
            pods_per_replica=260,
            deletions=12,
            restarts=2,
            idle=30.0,
            peer_sizes=(26, 104),
            peer_failures=1,
            told=12,
            jobs=125,
            jobs_hit=20,
        ),
        Size(
            name="quick",
            pods_per_replica=104,
            deletions=6,
            restarts=1,
            idle=20.0,
            peer_sizes=(3, 10),
            peer_failures=1,
            told=6,
            jobs=50,
            jobs_hit=10,
        ),
        Size(
            name="smoke",
            replicas=3,
            pods_per_replica=4,
            deletions=3,
            restarts=1,
            idle=3.0,
            peer_groups=2,
            peer_sizes=(2, 3),
            peer_failures=1,
            told=2,
            jobs=4,
            jobs_hit=2,
        ),
    )
}
"""By name. ``quick`` is a tenth of ``full``; ``smoke`` only shows that everything runs."""
