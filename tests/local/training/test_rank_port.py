"""What the leader's control side does at a rank, over a real engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fthsdp.coordinator.messages import EpochRecord, Member, Role
from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.errors import RingBroken
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
