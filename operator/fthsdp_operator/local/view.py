"""What a person sees of a running job: a picture of job and coordinator as plain values. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fthsdp.coordinator.messages import Status
from fthsdp_operator.api import Job, ReplicaStatus

__all__ = ["Row", "View", "view"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One replica."""

    replica: int
    attempt: int
    state: str
    step: int | None
    """Last step applied; None while it has no full state."""
    restarts: int
    last_failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The job at one moment."""

    name: str
    state: str
    ready: str
    spares: str
    """Spares that are ready, of those wanted; empty for a job without."""
    step: int
    loss: float | None
    rows: tuple[Row, ...]

    @property
    def headline(self) -> str:
        """Everything but the replicas, in one line."""
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        spares = f"  {self.spares} spares" if self.spares else ""
        return f"{self.name}  {self.state}  {self.ready or '-'} ready{spares}  step {self.step}{loss}"


def view(job: Job, status: Status | None, *, last: Status | None = None) -> View:
    """Put together what the operator and the coordinator know; ``last``: what it said last, should it be silent now."""
    heard = status or last
    steps = {r.replica: r.step for r in status.replicas} if status else {}
    return View(
        name=job.name,
        state=job.status.state,
        ready=job.status.ready or "",
        spares=job.status.spares or "",
        step=max(heard.step if heard else 0, job.status.step),
        loss=heard.loss if heard else job.status.loss,
        rows=tuple(_row(r, steps.get(r.index)) for r in job.status.replica_statuses),
    )


def _row(replica: ReplicaStatus, step: int | None) -> Row:
    failure = replica.last_failure
    return Row(
        replica=replica.index,
        attempt=replica.attempt,
        state=replica.state,
        step=step,
        restarts=replica.restarts,
        last_failure=f"{failure.reason}, {failure.pod}" if failure else "",
    )
