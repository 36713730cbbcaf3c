"""Rings of several epochs: connected ahead, switched at different moments, cancelled, closed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from fthsdp.errors import NotReady, RingBroken
from fthsdp.ftar import FtarSettings

pytestmark = pytest.mark.local


def all_sum(members: Any, *, step: int, numel: int = 50_001) -> None:
    outs = [torch.empty(numel) for _ in members]
    works = [
        m.engine.all_reduce(step=step, bucket=0, source=torch.ones(numel), out=out)
        for m, out in zip(members, outs, strict=True)
    ]
    for work, out in zip(works, outs, strict=True):
        work.wait(20)
        assert out.eq(len(outs)).all()


def test_the_next_epoch_is_connected_while_this_one_works(make_ring: Any, make_member: Any) -> None:
    with make_ring(2) as ring:
        all_sum(ring, step=1)
        ring.members.append(make_member(2))
        together = list(ring)
        old = together[:2]
        for member in together:
            member.engine.connect(2, [m.place for m in together])
        all_sum(old, step=2)
        for member in together:
            member.await_connected(2)
        all_sum(old, step=3)
        for member in together:
            member.engine.activate(2)
        all_sum(together, step=4)
        assert [member.broken for member in together] == [[], [], []]


def test_whoever_switches_first_does_not_break_the_old_epoch_for_the_others(make_ring: Any) -> None:
    numel = 3_000_001
    with make_ring(3) as ring:
        for epoch in range(2, 8):
            for member in ring:
                member.engine.connect(epoch, [m.place for m in ring])

            def finish_and_switch(member: Any, epoch: int = epoch) -> None:
                out = torch.empty(numel)
                member.engine.all_reduce(step=epoch, bucket=0, source=torch.ones(numel), out=out).wait(20)
                member.engine.activate(epoch)

            threads = [threading.Thread(target=finish_and_switch, args=(member,)) for member in ring]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        all_sum(ring, step=9)
        assert [member.broken for member in ring] == [[], [], []]


def test_an_epoch_can_be_activated_before_it_is_connected(make_member: Any) -> None:
    a, b = make_member(0), make_member(1)
    line = [a.place, b.place]
    a.engine.connect(1, line)
    a.engine.activate(1)
    work = a.engine.all_gather(step=1, payload=b"a")
    assert not work.done()
    b.engine.connect(1, line)
    b.engine.activate(1)
    assert b.engine.all_gather(step=1, payload=b"b").wait(20) == [b"a", b"b"]
    assert work.wait(20) == [b"a", b"b"]


def test_a_dial_that_comes_early_is_kept_and_kept_alive(make_member: Any, quick: FtarSettings) -> None:
    a, b = make_member(0, settings=quick), make_member(1, settings=quick)
    a.engine.connect(1, [a.place, b.place])
    # b hears of the epoch later than a silence would be forgiven.
    assert not threading.Event().wait(quick.silence_timeout * 1.5)
    b.engine.connect(1, [a.place, b.place])
    a.await_connected(1)
    b.await_connected(1)


def test_connecting_twice_has_no_effect(make_ring: Any) -> None:
    with make_ring(2) as ring:
        for member in ring:
            member.engine.connect(1, [m.place for m in ring])
        all_sum(ring, step=1)
        assert [member.connected for member in ring] == [[1], [1]]


def test_cancelling_ends_a_wait_that_blocks_and_the_break_reaches_everybody(make_ring: Any) -> None:
    with make_ring(5) as ring:
        works = [m.engine.all_gather(step=1, payload=b"") for m in ring.members[:4]]
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                works[0].wait()
            except RingBroken as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        began = time.monotonic()
        ring[0].engine.cancel(1)
        thread.join(20)
        assert str(caught[0]) == "epoch 1 was cancelled"
        for member in ring.members[1:]:
            member.await_broken(1)
        assert time.monotonic() - began < 1.0
        assert not ring[0].broken
        with pytest.raises(RingBroken) as broken:
            works[1].wait(20)
        assert broken.value.suspect in (0, 2)


def test_a_cancelled_epoch_never_comes_back(make_ring: Any) -> None:
    with make_ring(2) as ring:
        ring[0].engine.cancel(3)
        line = [m.place for m in ring]
        for epoch in (1, 2, 3):
            with pytest.raises(RingBroken, match=f"epoch {epoch} was cancelled: everything up to 3 is"):
                ring[0].engine.connect(epoch, line)
            # Who learns of the cancel only now meets it where it waits.
            ring[0].engine.activate(epoch)
            with pytest.raises(RingBroken, match=f"epoch {epoch} was cancelled"):
                ring[0].engine.all_gather(step=1, payload=b"").wait(20)
        ring[1].await_broken(1)
        ring[1].engine.cancel(3)
        for member in ring:
            member.broken.clear()
        ring.enter(4)
        all_sum(ring, step=1)


def test_after_a_break_the_same_members_go_on_in_a_new_epoch(make_ring: Any) -> None:
    with make_ring(3) as ring:
        out = torch.empty(100_000)
        work = ring[0].engine.all_reduce(step=1, bucket=0, source=torch.ones(100_000), out=out)
        ring[1].engine.cancel(1)
        for member in (ring[0], ring[2]):
            member.await_broken(1)
            member.broken.clear()
        for member in ring:
            member.engine.cancel(1)
        with pytest.raises(RingBroken):
            work.wait(20)
        ring.enter(2)
        all_sum(ring, step=1)


def test_what_is_submitted_to_a_broken_ring_fails_with_its_error(make_ring: Any) -> None:
    with make_ring(2) as ring:
        ring[1].engine.cancel(1)
        error = ring[0].await_broken(1)
        with pytest.raises(RingBroken) as again:
            ring[0].engine.all_gather(step=1, payload=b"").wait(20)
        assert (str(again.value), again.value.suspect) == (str(error), 1)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_closing_first_does_not_break_the_last_collective_of_the_others(make_ring: Any, n: int) -> None:
    numel = 2_000_003
    with make_ring(n) as ring:
        outs = [torch.empty(numel) for _ in ring]
        errors: list[BaseException] = []

        def last_one(member: Any, out: Any) -> None:
            try:
                work = member.engine.all_reduce(step=1, bucket=0, source=torch.ones(numel), out=out)
                gathered = member.engine.all_gather(step=1, payload=b"")
                if member.replica:
                    work.wait(20)
                    gathered.wait(20)
                # Replica 0 does not even wait: lingering finishes what was submitted.
                member.close(linger=20)
                work.wait(0)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=last_one, args=(m, o)) for m, o in zip(ring, outs, strict=True)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert all(out.eq(n).all() for out in outs)
        assert time.monotonic() - began < 10.0, "the linger ran out"
        assert [member.broken for member in ring] == [[]] * n


def test_who_has_left_is_missed_only_when_needed(make_ring: Any) -> None:
    with make_ring(3) as ring:
        all_sum(ring, step=1)
        ring[2].close(linger=20)
        assert not ring[0].broken
        work = ring[0].engine.all_gather(step=2, payload=b"")
        with pytest.raises(RingBroken, match="replica 2: it left while a collective still needed it"):
            work.wait(20)
        assert ring[0].await_broken(1).suspect == 2
        assert ring[1].await_broken(1).suspect in (0, 2)


def test_closing_without_linger_ends_everything_at_once(make_ring: Any) -> None:
    with make_ring(2) as ring:
        work = ring[0].engine.all_gather(step=1, payload=b"")
        ring[0].engine.close()
        ring[0].engine.close()
        with pytest.raises(RingBroken, match="closed"):
            work.wait(0)
        assert not ring[0].broken
        assert ring[1].await_broken(1).suspect == 0
        with pytest.raises(NotReady, match="closed"):
            ring[0].engine.all_gather(step=1, payload=b"")
        with pytest.raises(NotReady, match="closed"):
            ring[0].engine.connect(2, [ring[0].place])
        ring[0].engine.cancel(5)


def test_closing_at_once_says_no_goodbye_in_a_turn_of_the_loop_that_began_before(make_ring: Any) -> None:
    with make_ring(2) as ring:
        engine, begun, queued = ring[1].engine, threading.Event(), threading.Event()
        engine._mailbox.leave(lambda: (begun.set(), queued.wait(10)))
        assert begun.wait(10)
        closing = threading.Thread(target=engine.close)
        closing.start()
        while not engine._closing:
            threading.Event().wait(0.001)
        queued.set()
        closing.join()
        assert ring[0].await_broken(1).suspect == 1


def test_lingering_for_a_neighbour_that_never_comes_ends_with_the_linger(make_ring: Any) -> None:
    with make_ring(2) as ring:
        work = ring[0].engine.all_gather(step=1, payload=b"")
        ring[0].engine.close(linger=0.3)
        with pytest.raises(RingBroken, match="closed"):
            work.wait(0)


def test_lingering_does_not_wait_for_an_epoch_that_is_still_connecting(make_ring: Any) -> None:
    with make_ring(2) as ring:
        line = [ring[0].place, ring[1].place]
        ring[0].engine.connect(2, line)
        began = time.monotonic()
        ring[0].close(linger=20)
        assert time.monotonic() - began < 10.0


def test_an_idle_ring_is_kept_alive_past_the_silence_timeout(make_ring: Any, quick: FtarSettings) -> None:
    with make_ring(3, settings=quick) as ring:
        all_sum(ring, step=1)
        assert not threading.Event().wait(quick.silence_timeout * 2.5)
        # Also with work waiting on some of the members.
        waiting = ring[0].engine.all_gather(step=2, payload=b"")
        assert not threading.Event().wait(quick.silence_timeout * 1.5)
        for member in ring.members[1:]:
            member.engine.all_gather(step=2, payload=b"")
        waiting.wait(20)
        assert [member.broken for member in ring] == [[], [], []]


def test_callbacks_may_call_back(make_member: Any) -> None:
    a, b = make_member(0), make_member(1)
    a.engine._on_broken = lambda epoch, error: (a.engine.cancel(epoch), a._on_broken(epoch, error))
    for member in (a, b):
        member.engine.connect(1, [a.place, b.place])
    for member in (a, b):
        member.await_connected(1)
    b.engine.cancel(1)
    a.await_broken(1)
    with pytest.raises(RingBroken, match="was cancelled"):
        a.engine.connect(1, [a.place, b.place])
