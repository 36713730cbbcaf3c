"""Addresses are said once on a connection, and not with each epoch: those of 100,000 ranks fill megabytes.

Both ends keep a book. The sender leaves out what the receiver has in its own, which is the newest attempt of each
replica that was ever named on this connection; so both books always hold the same.
"""

from __future__ import annotations

from fthsdp.coordinator.messages import Announce, EpochRecord, FromCoordinator, Install, Member
from fthsdp.errors import WireError
from fthsdp.wire import frame_text

__all__ = ["AddressBook", "Frames", "complete"]


class AddressBook:
    """What has been said on one connection."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, tuple[str, ...]]] = {}
        """Attempt and addresses by replica."""

    def abridge(self, record: EpochRecord) -> EpochRecord:
        """Leave out the addresses that the other end has, and take those that stay as said."""
        return record.with_addresses(lambda member: () if self._has(member) else self._put(member))

    def complete(self, record: EpochRecord) -> EpochRecord:
        """Put in what the other end has left out; raises WireError where it was never said."""
        return record.with_addresses(lambda member: self._put(member) if member.addresses else self._get(member))

    def _has(self, member: Member) -> bool:
        return self._known.get(member.replica) == (member.attempt, member.addresses)

    def _put(self, member: Member) -> tuple[str, ...]:
        self._known[member.replica] = (member.attempt, member.addresses)
        return member.addresses

    def _get(self, member: Member) -> tuple[str, ...]:
        attempt, addresses = self._known.get(member.replica, (-1, ()))
        if attempt != member.attempt:
            raise WireError(f"an epoch has replica {member.replica} attempt {member.attempt}, which has no address")
        return addresses


class Frames:
    """Puts messages of the coordinator into bytes: what goes to many leaders in turn only once."""

    def __init__(self) -> None:
        self._last: tuple[FromCoordinator | None, bytes] = (None, b"")

    def encode(self, message: FromCoordinator, book: AddressBook) -> bytes:
        """Return the frame for the connection that ``book`` belongs to."""
        if isinstance(message, Announce | Install):
            message = message.model_copy(update={"record": book.abridge(message.record)})
        if message != self._last[0]:
            self._last = message, frame_text(message.model_dump_json())
        return self._last[1]


def complete(message: FromCoordinator, book: AddressBook) -> FromCoordinator:
    """Return what was meant by a message that arrived on the connection of ``book``; raises WireError."""
    if isinstance(message, Announce | Install):
        return message.model_copy(update={"record": book.complete(message.record)})
    return message
