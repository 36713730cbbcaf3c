"""What the leader's control side does at a rank, over a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fthsdp.coordinator.messages import EpochRecord, Member, Role
from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.errors import RingBroken, WireError
from fthsdp.ftar import Engine, FtarSettings
from fthsdp.replica import RankPort

pytestmark = pytest.mark.local
KEY = b"0123456789abcdef"


def record(number: int, *replicas: int, address: str = "127.0.0.1:1") -> EpochRecord:
    members = tuple(Member(replica=r, attempt=0, role=Role.ACTIVE, addresses=(address,)) for r in replicas)
    return EpochRecord(number=number, members=members)


IDENTITY = Identity(job="test", replica=0, attempt=0, rank=0, world_size=1, coordinator="127.0.0.1:1", host="127.0.0.1")


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The only rank of replica 0."""
    endpoint = Endpoint(host="127.0.0.1", key=KEY, job="test")
    engine = Engine(
        identity=IDENTITY,
        key=KEY,
        endpoint=endpoint,
        settings=FtarSettings(),
        on_connected=lambda epoch: None,
        on_broken=lambda epoch, error: None,
    )
    yield engine
    engine.close()
    endpoint.close()


@pytest.fixture
def port(engine: Engine) -> RankPort:
    """The port of that rank."""
    return RankPort(IDENTITY, engine)


def test_a_rank_may_be_told_to_connect_before_or_after_it_entered_the_epoch(port: RankPort, engine: Engine) -> None:
    port.connect(record(1, 0))
    engine.activate(1)
    port.connect(record(1, 0))
    assert engine.all_gather(step=0, payload=b"here").wait(10) == [b"here"]


def test_an_epoch_without_this_replica_is_known_and_not_connected(port: RankPort) -> None:
    port.connect(record(2, 1, 2))
    assert port.record(2) == record(2, 1, 2)


def test_a_fence_may_overtake_an_announcement(port: RankPort, engine: Engine) -> None:
    port.cancel(3)
    port.connect(record(3, 0))
    engine.activate(3)
    with pytest.raises(RingBroken):
        engine.all_gather(step=0, payload=b"here").wait(10)


def test_the_newest_epoch_heard_of_counts(port: RankPort) -> None:
    port.hear(4)
    port.hear(3)
    assert port.heard == 4


def test_a_rank_is_told_each_address_of_its_rail_once(engine: Engine) -> None:
    port = RankPort(replace(IDENTITY, replica=5, rank=2, world_size=3), engine)  # in none of these epochs
    port.apply({"connect": record(1, 0, 1, address="here:3").model_dump(mode="json")})
    known = record(2, 1).with_addresses(lambda member: ())
    port.apply({"connect": known.model_dump(mode="json")})
    for epoch in (1, 2):
        assert all(member.addresses[2] == "here:3" for member in port.record(epoch).members)


def test_an_address_that_was_never_said_is_missed_at_once(port: RankPort) -> None:
    unknown = record(1, 0).with_addresses(lambda member: ())
    with pytest.raises(WireError, match="replica 0 attempt 0, which has no address"):
        port.apply({"connect": unknown.model_dump(mode="json")})
