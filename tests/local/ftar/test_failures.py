"""What the survivors see when a member's process is killed or frozen: real processes, real signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from tests.local.forks import FORKS
from tests.local.ftar.nursery import SETTINGS, be_a_member

pytestmark = pytest.mark.local

DEADLINE = 60.0
SILENCE = SETTINGS.silence_timeout


class Nursery:
    """The processes and what they tell."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self.pipes = list(pipes)
        self._seen: list[dict[str, Any]] = []
        addresses = self.await_events("listens", set(range(len(pipes))))
        for pipe in pipes:
            pipe.send([addresses[replica]["address"] for replica in range(len(pipes))])

    def await_events(self, event: str, replicas: set[int]) -> dict[int, dict[str, Any]]:
        """Wait until each of these replicas has told of this event."""
        deadline = time.monotonic() + DEADLINE
        while True:
            found = {told["replica"]: told for told in self._seen if told["event"] == event}
            if replicas <= set(found):
                return found
            ready = wait(self.pipes, deadline - time.monotonic())
            assert ready, f"no {event} from {replicas - set(found)}; seen: {self._seen}"
            for pipe in ready:
                self._take(pipe)

    def _take(self, pipe: Any) -> None:
        try:
            self._seen.append(pipe.recv())
        except (EOFError, ConnectionResetError):  # its process has ended
            self.pipes.remove(pipe)


@contextmanager
def nursery(n: int, mode: str) -> Iterator[Nursery]:
    pairs = [FORKS.Pipe() for _ in range(n)]
    members = [
        FORKS.Process(target=be_a_member, args=(replica, theirs, mode == "busy"), daemon=True)
        for replica, (_, theirs) in enumerate(pairs)
    ]
    try:
        for member, (_, theirs) in zip(members, pairs, strict=True):
            member.start()
            theirs.close()
        yield Nursery([ours for ours, _ in pairs])
    finally:
        for member, (ours, _) in zip(members, pairs, strict=True):
            member.kill()
            member.join()
            ours.close()


@pytest.mark.parametrize("mode", ["busy", "idle"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_survivors_see_a_killed_member_long_before_the_silence_timeout(n: int, mode: str) -> None:
    with nursery(n, mode) as members:
        pids = {r: told["pid"] for r, told in members.await_events("connected", set(range(n))).items()}
        if mode == "busy":
            members.await_events("busy", set(range(n)))
        killed = time.time()
        os.kill(pids[1], signal.SIGKILL)
        survivors = set(range(n)) - {1}
        broken = members.await_events("broken", survivors)
        assert {broken[r]["at"] - killed < SILENCE / 2 for r in survivors} == {True}
        # Its neighbours name it; the others name the one that passed the break on.
        assert all(abs(broken[r]["suspect"] - r) in (1, n - 1) for r in survivors)
        assert 1 in {broken[r]["suspect"] for r in survivors}
        closed = members.await_events("closed", survivors)
        assert {closed[r]["threads"] for r in survivors} == {1}


@pytest.mark.parametrize("mode", ["busy", "idle"])
def test_all_others_see_a_frozen_member_after_the_silence_timeout(mode: str) -> None:
    with nursery(3, mode) as members:
        pids = {r: told["pid"] for r, told in members.await_events("connected", {0, 1, 2}).items()}
        if mode == "busy":
            members.await_events("busy", {0, 1, 2})
        frozen = time.time()
        os.kill(pids[1], signal.SIGSTOP)
        broken = members.await_events("broken", {0, 2})
        assert all(told["at"] - frozen > SILENCE / 2 for r, told in broken.items() if r != 1)
        assert any("replica 1: silent for" in told["reason"] for told in broken.values())
        # Thawed, it finds that it was left behind.
        os.kill(pids[1], signal.SIGCONT)
        members.await_events("closed", {0, 1, 2})


def test_a_pause_of_everybody_breaks_nothing() -> None:
    with nursery(2, "busy") as members:
        pids = {r: told["pid"] for r, told in members.await_events("connected", {0, 1}).items()}
        members.await_events("busy", {0, 1})
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(SILENCE * 1.5)
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
        resumed = time.time()
        # Only what is killed afterwards is seen.
        threading.Event().wait(1.0)
        os.kill(pids[1], signal.SIGKILL)
        broken = members.await_events("broken", {0})
        assert broken[0]["at"] > resumed + 1.0
        assert "silent" not in broken[0]["reason"]
