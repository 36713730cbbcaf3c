"""When a run that is over was a success."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from fthsdp_operator.api.parts import SpecPart

__all__ = ["Success", "SuccessPolicy"]


class SuccessPolicy(StrEnum):
    """Who has to finish."""

    FIRST = "First"
    """One replica that trained to the end."""
    ALL = "All"
    """All of them, but for those that were abandoned."""


class Success(SpecPart):
    """When a run that is over was a success."""

    policy: SuccessPolicy = Field(default=SuccessPolicy.FIRST, strict=False)
    """First: the job is Complete when one replica has finished, since all have the same state; All: when all have that
    had begun, those left out that were abandoned, and otherwise it is Failed. Either way none is restarted after the
    first has finished: nobody is left to train with."""
