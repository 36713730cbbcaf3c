"""What has to survive a coordinator: the current epoch, and the one that was proposed after it.

A proposal is kept next to the epoch it would follow, because nobody knows after a restart whether it has begun: it is
void unless a member reports having entered it, or all members are still there to finish it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from fthsdp.coordinator.messages import EpochRecord
from fthsdp.errors import ConfigError

__all__ = ["Ledger"]


class Ledger(BaseModel):
    """The epochs of one job that count. Each new ledger has a higher number than all before it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    current: EpochRecord
    proposal: EpochRecord | None = None
    lost: dict[int, int] = {}
    """By replica, the newest attempt that is known to be gone: the next coordinator lets none of them in again."""

    @property
    def number(self) -> int:
        """The highest epoch number given out."""
        return self.current.number if self.proposal is None else self.proposal.number

    def encode(self) -> str:
        """Return the JSON text that ``decode`` reads."""
        return self.model_dump_json()

    @classmethod
    def decode(cls, text: str | bytes, *, origin: str) -> Ledger:
        """Read what ``encode`` wrote; raises ConfigError that names where the text came from."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ConfigError(f"{origin} holds no epoch record: {where}: {first['msg']}") from error
