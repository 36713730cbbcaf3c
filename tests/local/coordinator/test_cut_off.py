"""A coordinator that cannot hear its leaders for a while: whoever is there afterwards keeps its place."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fthsdp.coordinator.ledger import Ledger

pytestmark = pytest.mark.local
Make = Callable[..., Any]
SILENCE = 2.0
TIMES = ("--silence-timeout", f"{SILENCE:g}", "--stall-timeout", "60")
LONG = 3 * SILENCE
"""Seconds after which everybody who is not heard has been silent for too long."""


class Cable:
    """Connects leaders to a coordinator. While it is unplugged it delivers nothing, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._plugged_in = threading.Event()
        self._plugged_in.set()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._plugged_in.wait()
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as far:
            self._ends += [near, far]
            back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
            back.start()
            self._carry(near, far)
            back.join()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(65536):
                self._plugged_in.wait()
                there.sendall(data)
        with contextlib.suppress(OSError):
            there.shutdown(socket.SHUT_RDWR)

    def unplug(self) -> None:
        self._plugged_in.clear()

    def plug_in(self, *, reset: bool = False) -> None:
        """Deliver again; with ``reset`` all connections are gone instead, and it takes a second to make others."""
        if reset:
            self.reset()
            time.sleep(1.0)
        self._plugged_in.set()

    def reset(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)  # who reads wakes up, and closes it

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        self._plugged_in.set()


@pytest.fixture
def process(coordinator: Make) -> Any:
    return coordinator(*TIMES, "--return-timeout", "20")


@pytest.fixture
def cable(process: Any) -> Iterator[Cable]:
    cable = Cable(process.port)
    yield cable
    cable.close()


@contextlib.contextmanager
def without_store(folder: Path) -> Iterator[None]:
    """Have the store answer nothing that can be read."""
    epoch, away = folder / "epoch", folder / "away"
    epoch.rename(away)
    epoch.mkdir()
    try:
        yield
    finally:
        epoch.rmdir()
        away.rename(epoch)


def train(leader: Make, *addresses: str) -> list[Any]:
    """Return leaders that train."""
    leaders = [leader(address, replica) for replica, address in enumerate(addresses)]
    for one in leaders:
        one.wait_for_epoch(1)
    return leaders


def test_a_coordinator_that_was_stopped_takes_nobody_out(process: Any, leader: Make) -> None:
    leaders = train(leader, *[process.address] * 3)
    process.popen.send_signal(signal.SIGSTOP)
    time.sleep(LONG)
    process.popen.send_signal(signal.SIGCONT)
    time.sleep(LONG)
    process.ends_undisturbed(leaders)


@pytest.mark.parametrize("reset", [False, True], ids=["the connections last", "the connections are reset"])
def test_one_that_heard_nobody_for_a_while_takes_nobody_out(
    process: Any, cable: Cable, leader: Make, reset: bool
) -> None:
    leaders = train(leader, *[cable.address] * 3)
    cable.unplug()
    time.sleep(LONG)
    cable.plug_in(reset=reset)
    time.sleep(LONG)
    process.ends_undisturbed(leaders)


@pytest.mark.parametrize("reset", [False, True], ids=["the connections last", "the connections are reset"])
def test_neither_does_one_that_hears_the_replica_beside_it_but_not_its_store(
    process: Any, cable: Cable, leader: Make, reset: bool
) -> None:
    leaders = train(leader, process.address, cable.address, cable.address)
    with without_store(process.folder):
        cable.unplug()
        time.sleep(LONG)
        assert process.logged("epoch: Is a directory; trying again"), "the store was not asked"
        cable.plug_in(reset=reset)
    time.sleep(LONG)
    process.ends_undisturbed(leaders)


def test_who_is_still_silent_when_the_store_answers_is_taken_out_and_the_others_go_on(
    process: Any, cable: Cable, leader: Make
) -> None:
    leaders = train(leader, process.address, process.address, cable.address)
    with without_store(process.folder):
        cable.unplug()
        time.sleep(LONG)
        assert not process.logged("is out")
    assert leaders[0].wait_for_epoch(2).active == (0, 1)
    process.wait_for_log(r"replica 2 attempt 0 is out \(Silent\): nothing was heard of it for 2 s")


def test_that_nobody_is_heard_is_believed_in_the_end(coordinator: Make, leader: Make) -> None:
    process = coordinator(*TIMES, "--return-timeout", "6")
    cable = Cable(process.port)
    train(leader, *[cable.address] * 3)
    cable.unplug()
    process.wait_for_log("nobody with a state is left")
    cable.close()
    assert all(process.logged(rf"replica {replica} attempt 0 is out \(Silent\)") for replica in range(3))


def test_one_that_finds_that_another_has_taken_its_place_ends(process: Any, cable: Cable, leader: Make) -> None:
    train(leader, *[cable.address] * 3)
    epoch = process.folder / "epoch"
    ledger = Ledger.decode(epoch.read_bytes(), origin="epoch")
    newer = ledger.model_copy(update={"current": ledger.current.model_copy(update={"number": 7})})
    epoch.write_text(newer.encode())
    cable.unplug()
    assert process.wait() == 1
    assert "the store holds epoch 7, not 1: another coordinator of this job is running" in process.log[-1]
