"""Addresses travel once on a connection, and both of its ends know the same."""

from __future__ import annotations

import pytest

from fthsdp.coordinator.addressbook import AddressBook, Frames, complete
from fthsdp.coordinator.messages import Announce, Bye, EpochRecord, Install, Member, Role, parse_from_coordinator
from fthsdp.errors import WireError
from fthsdp.wire import decode_body


def member(replica: int, attempt: int = 0) -> Member:
    addresses = tuple(f"10.{replica}.{attempt}.{rank}:1" for rank in range(3))
    return Member(replica=replica, attempt=attempt, role=Role.ACTIVE, addresses=addresses)


def epoch(number: int, *members: Member) -> EpochRecord:
    return EpochRecord(number=number, members=members)


def test_what_was_said_is_left_out_and_put_in_again() -> None:
    ours, theirs = AddressBook(), AddressBook()
    first = epoch(1, member(0), member(1))
    assert theirs.complete(ours.abridge(first)) == first
    second = epoch(2, member(0), member(1, attempt=1), member(2))
    abridged = ours.abridge(second)
    assert [len(m.addresses) for m in abridged.members] == [0, 3, 3]
    assert theirs.complete(abridged) == second


def test_an_older_attempt_is_said_again_after_a_newer_one() -> None:
    ours, theirs = AddressBook(), AddressBook()
    for record in (epoch(1, member(0)), epoch(2, member(0, attempt=1)), epoch(3, member(0))):
        assert theirs.complete(ours.abridge(record)) == record


@pytest.mark.parametrize("known", [(), (member(0),)], ids=["never said", "another attempt"])
def test_a_member_without_any_address_is_refused_by_name(known: tuple[Member, ...]) -> None:
    book = AddressBook()
    book.complete(epoch(1, *known))
    nowhere = member(0, attempt=1).model_copy(update={"addresses": ()})
    with pytest.raises(WireError, match="replica 0 attempt 1, which has no address"):
        book.complete(epoch(2, nowhere))


def test_each_connection_gets_what_it_lacks() -> None:
    frames, old, new = Frames(), AddressBook(), AddressBook()
    record = epoch(1, member(0), member(1))
    frames.encode(Announce(record=record), old)
    for book, size in ((old, 0), (new, 3), (old, 0)):
        message = parse_from_coordinator(decode_body(frames.encode(Install(record=record), book)[4:]))
        assert isinstance(message, Install)
        assert [len(m.addresses) for m in message.record.members] == [size, size]


def test_messages_without_an_epoch_are_left_as_they_are() -> None:
    assert complete(Bye(), AddressBook()) == Bye()
