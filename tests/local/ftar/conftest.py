"""Members of a ring as engines in this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.errors import RingBroken
from fthsdp.ftar import Engine, FtarSettings, RailMember
from fthsdp.tls import Tls

KEY = b"a key that only tests use"
DEADLINE = 20.0
"""Seconds after which a test takes something for not coming."""

QUICK = FtarSettings(keepalive_interval=0.1, silence_timeout=1.0, connect_timeout=3.0)
PATIENT = FtarSettings(keepalive_interval=1.0, silence_timeout=60.0, connect_timeout=20.0)
"""Nothing here is found by silence."""


class MemberOfTest:
    """One engine, and what it has called back."""

    def __init__(
        self,
        replica: int,
        *,
        attempt: int = 0,
        rank: int = 0,
        key: bytes = KEY,
        settings: FtarSettings = PATIENT,
        tls: Tls | None = None,
    ) -> None:
        self.replica, self.attempt = replica, attempt
        self.changed = threading.Condition()
        self.connected: list[int] = []
        self.broken: list[tuple[int, RingBroken]] = []
        self.endpoint = Endpoint(host="127.0.0.1", key=key, job="test", tls=tls)
        self.engine = Engine(
            identity=Identity(
                job="test",
                replica=replica,
                attempt=attempt,
                rank=rank,
                world_size=rank + 1,
                coordinator="127.0.0.1:1",
                host="127.0.0.1",
            ),
            key=key,
            endpoint=self.endpoint,
            settings=settings,
            on_connected=self._on_connected,
            on_broken=self._on_broken,
        )

    @property
    def place(self) -> RailMember:
        return RailMember(replica=self.replica, attempt=self.attempt, address=self.endpoint.address)

    def _on_connected(self, epoch: int) -> None:
        with self.changed:
            self.connected.append(epoch)
            self.changed.notify_all()

    def _on_broken(self, epoch: int, error: RingBroken) -> None:
        with self.changed:
            self.broken.append((epoch, error))
            self.changed.notify_all()

    def await_connected(self, epoch: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: epoch in self.connected or self.broken, DEADLINE), "not connected"
        assert epoch in self.connected, self.broken

    def await_broken(self, epoch: int, timeout: float = DEADLINE) -> RingBroken:
        with self.changed:
            assert self.changed.wait_for(lambda: self.broken, timeout), "not broken"
            ((number, error),) = self.broken
        assert number == epoch
        return error

    def close(self, linger: float = 0.0) -> None:
        self.engine.close(linger=linger)
        self.endpoint.close()


class RingOfTest:
    """Several members, connected and active in an epoch."""

    def __init__(self, members: Sequence[MemberOfTest]) -> None:
        self.members = list(members)

    def __iter__(self) -> Iterator[MemberOfTest]:
        return iter(self.members)

    def __getitem__(self, index: int) -> MemberOfTest:
        return self.members[index]

    def enter(self, epoch: int) -> None:
        line = [member.place for member in self.members]
        for member in self.members:
            member.engine.connect(epoch, line)
        for member in self.members:
            member.await_connected(epoch)
        for member in self.members:
            member.engine.activate(epoch)


@contextmanager
def ring_of(
    n: int, *, settings: FtarSettings = PATIENT, epoch: int | None = 1, tls: Tls | None = None
) -> Iterator[RingOfTest]:
    """Yield ``n`` members; at the end no thread and no descriptor may be left."""
    threads, descriptors = set(threading.enumerate()), _descriptors()
    ring = RingOfTest([MemberOfTest(replica, settings=settings, tls=tls) for replica in range(n)])
    try:
        if epoch is not None:
            ring.enter(epoch)
        yield ring
    finally:
        for member in ring:
            member.close()
    await_true(lambda: set(threading.enumerate()) <= threads, "threads are left behind")
    await_true(lambda: _descriptors() <= descriptors, "descriptors are left behind")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def await_true(condition: Callable[[], bool], message: str, timeout: float = DEADLINE) -> None:
    """Poll until it holds; for what has no event of its own."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)


RingFactory = Callable[..., AbstractContextManager[RingOfTest]]


@pytest.fixture
def make_ring() -> RingFactory:
    """``make_ring(n)`` is a context with ``n`` engines, connected and active in epoch 1 unless told otherwise."""
    return ring_of


@pytest.fixture
def make_member() -> Iterator[Callable[..., MemberOfTest]]:
    """Make single members that are closed at the end."""
    made: list[MemberOfTest] = []

    def make(replica: int, **options: object) -> MemberOfTest:
        made.append(MemberOfTest(replica, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for member in made:
        member.close()


@pytest.fixture
def quick() -> FtarSettings:
    """Short times: what silence finds is found soon."""
    return QUICK


@pytest.fixture
def key() -> bytes:
    """The job's key."""
    return KEY
