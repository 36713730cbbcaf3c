"""What has to survive a coordinator: the current epoch, and the one that was proposed after it.

A proposal is kept next to the epoch it would follow, because nobody knows after a restart whether it has begun: it is
void unless a member reports having entered it, or all members are still there to finish it.

Addresses are left out: each leader says its own in its hello, and those of 100,000 ranks are more than a Kubernetes
object may hold. A fingerprint of them tells the process that is meant from another one of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    processes: dict[int, str] = {}
    """By replica, the fingerprint of its addresses."""
    ranks: int = 0
    """Of each replica: who has another number is turned away even before a member has come back. 0: not known."""
    replaced: tuple[int, ...] | None = None
    """Of an epoch with which the run starts: who had another state. None: the run has started before."""

    @property
    def number(self) -> int:
        """The highest epoch number given out."""
        return self.current.number if self.proposal is None else self.proposal.number

    @classmethod
    def of(
        cls,
        current: EpochRecord,
        proposal: EpochRecord | None = None,
        *,
        lost: Mapping[int, int],
        processes: Mapping[int, str],
        ranks: int,
        replaced: tuple[int, ...] | None = None,
    ) -> Ledger:
        """Put down these epochs, without the addresses in them."""
        return cls(
            current=current.with_addresses(lambda member: ()),
            proposal=None if proposal is None else proposal.with_addresses(lambda member: ()),
            lost=dict(lost),
            processes=dict(processes),
            ranks=ranks,
            replaced=replaced,
        )

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
