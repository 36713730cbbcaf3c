"""What becomes of a step's batch, and of its learning rate, while replicas are missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from fthsdp.environment import BATCH_POLICY, LR_POLICY
from fthsdp.errors import ConfigError

__all__ = ["BatchPolicy", "LrPolicy", "Policies", "lr_factor"]


class BatchPolicy(StrEnum):
    """How many samples a step has while replicas are missing."""

    SHRINK = "Shrink"
    """What the present replicas bring: a failure repeats no work."""
    CONSTANT = "Constant"
    """The same as ever: the present replicas train the share of the missing ones too, in the same step."""


class LrPolicy(StrEnum):
    """How the learning rate follows a batch that shrank."""

    NONE = "None"
    """Not at all."""
    LINEAR = "Linear"
    """In proportion to the batch, as is usual for SGD (Goyal et al., 2017)."""
    SQRT = "Sqrt"
    """With its square root, as is usual for Adam (Malladi et al., 2022)."""


def lr_factor(policy: LrPolicy, contributors: int, wanted: int) -> float:
    """Return what a step's learning rate is multiplied by when ``contributors`` of ``wanted`` replicas were in it.

    Never above 1, so that no step is larger than the script asked for; 1 as well where ``wanted`` is 0, not known.
    """
    assert contributors >= 0
    if policy is LrPolicy.NONE or contributors >= wanted:
        return 1.0
    share = contributors / wanted
    return share if policy is LrPolicy.LINEAR else math.sqrt(share)


_Name = TypeVar("_Name", BatchPolicy, LrPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The two policies of a job; raises ConfigError where they do not go together."""

    batch: BatchPolicy = BatchPolicy.SHRINK
    lr: LrPolicy = LrPolicy.NONE

    def __post_init__(self) -> None:
        if self.batch is BatchPolicy.CONSTANT and self.lr is not LrPolicy.NONE:
            raise ConfigError(
                f"lrPolicy {self.lr} follows a batch that shrinks, and batchPolicy Constant keeps it whole"
            )

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Policies:
        """Read FTHSDP_BATCH_POLICY and FTHSDP_LR_POLICY; raises ConfigError for a name that is none."""
        return cls(
            batch=_read(env, BATCH_POLICY, BatchPolicy.SHRINK),
            lr=_read(env, LR_POLICY, LrPolicy.NONE),
        )


def _read(env: Mapping[str, str], name: str, default: _Name) -> _Name:
    text = env.get(name, default)
    try:
        return type(default)(text)
    except ValueError as error:
        known = ", ".join(type(default))
        raise ConfigError(f"{name}={text}: known are {known}") from error
