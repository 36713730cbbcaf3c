"""The rules for the job's disruption budget: it is there where the job asks for one, with the right number.

No pod leans on it: whatever becomes of it, replicas start. A job that is suspended or over has no pods that could be
evicted, so its budget is left alone, and goes with the job.
"""

from __future__ import annotations

from fthsdp_operator.api import Job
from fthsdp_operator.manifests import render
from fthsdp_operator.observed.observe import BudgetView, Observed
from fthsdp_operator.rules.actions import Action, Create, Delete

__all__ = ["concerns", "fits", "keep_budget", "recorded", "taken"]


def concerns(job: Job) -> bool:
    """Whether it matters what there is: the job wants a budget, or had one."""
    if job.spec.suspend or job.status.terminal:
        return False
    return render.min_available(job) is not None or job.status.disruption_budget is not None


def fits(job: Job, budget: BudgetView) -> bool:
    """Whether this is what the job asks for."""
    wanted = render.min_available(job)
    ours = bool(budget.uid) and not budget.foreign and not budget.going
    return wanted is not None and ours and budget.min_available == wanted


def keep_budget(job: Job, observed: Observed) -> tuple[Action, ...]:
    """Make the budget; one with another number is deleted and made anew, one that is not wanted any more deleted."""
    wanted, there = render.min_available(job), observed.budget
    if there is None or there.foreign or there.going or fits(job, there):
        return ()
    why = "the job wants no disruption budget" if wanted is None else f"minAvailable has to be {wanted}"
    gone = Delete(kind=render.BUDGET, name=render.budget_name(job.name), uid=there.uid, why=why)
    made = () if wanted is None else (Create(manifest=render.disruption_budget(job)),)
    return (gone, *made) if there.uid else made


def recorded(job: Job, observed: Observed) -> int | None:
    """Return what the status says of the budget: as long as it says something, what there is is looked at."""
    before, wanted, there = job.status.disruption_budget, render.min_available(job), observed.budget
    if there is None:
        return before
    if there.foreign:
        return None
    return wanted if wanted is not None or not there.uid else before


def taken(job: Job, observed: Observed) -> str:
    """Say who has the name of a budget that the job wants; empty when nobody has."""
    if observed.budget is None or not observed.budget.foreign or render.min_available(job) is None:
        return ""
    name = f"{render.BUDGET} {render.budget_name(job.name)}"
    return f"{name}: there already and not of this job, which has no disruption budget; delete it"
