"""A key is handed out once, never to two workers, and comes back slowly when it keeps failing."""

from __future__ import annotations

import asyncio

import pytest

from fthsdp_operator.process.queue import WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def nothing(queue: WorkQueue[str]) -> bool:
    """Nothing is handed out now."""
    getter = asyncio.create_task(queue.get())
    for _ in range(5):
        await asyncio.sleep(0)
    if getter.done():
        return False
    getter.cancel()
    await asyncio.gather(getter, return_exceptions=True)
    return True


def test_a_key_added_many_times_is_handed_out_once() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for _ in range(3):
            queue.add("a")
        assert await queue.get() == "a"
        assert await nothing(queue)

    asyncio.run(story())


def test_a_key_added_while_it_is_worked_on_is_handed_out_afterwards() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        await queue.get()
        queue.add("a")
        assert await nothing(queue)
        queue.done("a")
        assert await queue.get() == "a"

    asyncio.run(story())


def test_a_key_that_is_worked_on_holds_up_no_other() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        await queue.get()
        queue.add("a")
        queue.add("b")
        assert await queue.get() == "b"

    asyncio.run(story())


def test_a_delayed_key_is_handed_out_when_it_is_due() -> None:
    async def story() -> None:
        clock = Clock()
        queue: WorkQueue[str] = WorkQueue(clock=clock)
        queue.add("a", delay=5)
        assert await nothing(queue)
        clock.now = 5.0
        assert await queue.get() == "a"

    asyncio.run(story())


def test_an_event_hurries_a_delayed_key_and_the_delay_is_forgotten() -> None:
    async def story() -> None:
        clock = Clock()
        queue: WorkQueue[str] = WorkQueue(clock=clock)
        queue.add("a", delay=5)
        queue.add("a")
        assert await queue.get() == "a"
        queue.done("a")
        clock.now = 10.0
        assert await nothing(queue)

    asyncio.run(story())


def test_a_later_delay_does_not_put_a_key_off() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        queue.add("a", delay=60)
        assert await queue.get() == "a"

    asyncio.run(story())


def test_waiting_workers_are_woken_by_a_key() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue()
        getters = [asyncio.create_task(queue.get()) for _ in range(3)]
        await asyncio.sleep(0)
        for key in "abc":
            queue.add(key)
        assert sorted(await asyncio.wait_for(asyncio.gather(*getters), 5)) == ["a", "b", "c"]

    asyncio.run(story())


def test_a_failing_key_comes_back_ever_more_slowly_until_it_succeeds() -> None:
    async def story() -> None:
        clock = Clock()
        queue: WorkQueue[str] = WorkQueue(first_retry=1, longest_retry=5, clock=clock)
        waits = []
        for _ in range(5):
            queue.add("a")
            await queue.get()
            waits.append(queue.failed("a"))
            clock.now += waits[-1]
        assert waits == [1, 2, 4, 5, 5]
        await queue.get()
        queue.done("a")
        queue.add("a")
        await queue.get()
        assert queue.failed("a") == 1

    asyncio.run(story())


def test_a_failure_that_says_how_long_it_lasts_is_waited_for() -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue(first_retry=1, longest_retry=5, clock=Clock())
        queue.add("a")
        await queue.get()
        assert queue.failed("a", at_least=20) == 20

    asyncio.run(story())


@pytest.mark.parametrize("failures", [100, 5000])
def test_a_key_that_fails_for_ever_is_still_tried(failures: int) -> None:
    async def story() -> None:
        queue: WorkQueue[str] = WorkQueue(first_retry=0.0, longest_retry=60)
        for _ in range(failures):
            queue.add("a")
            await queue.get()
            assert queue.failed("a") == 0

    asyncio.run(story())


def test_only_keys_that_are_due_and_free_are_waiting() -> None:
    async def story() -> None:
        clock = Clock()
        queue: WorkQueue[str] = WorkQueue(clock=clock)
        for key in "ab":
            queue.add(key)
        queue.add("c", delay=5)
        assert queue.depth == 2
        await queue.get()
        assert queue.depth == 1
        clock.now = 5.0
        assert queue.depth == 2

    asyncio.run(story())


def test_how_long_a_key_was_overdue_is_told_when_it_is_handed_out() -> None:
    async def story() -> None:
        clock, waits = Clock(), list[float]()
        queue: WorkQueue[str] = WorkQueue(clock=clock, waited=waits.append)
        queue.add("a", delay=5)
        clock.now = 7.0
        await queue.get()
        assert waits == [2.0]

    asyncio.run(story())


def test_a_queue_is_stuck_while_there_is_work_and_nothing_ends() -> None:
    async def story() -> None:
        clock = Clock()
        queue: WorkQueue[str] = WorkQueue(clock=clock, first_retry=1)
        queue.add("later", delay=1000)
        clock.now = 900.0
        assert queue.stuck() == 0
        queue.add("a")
        clock.now = 910.0
        assert queue.stuck() == 10  # nobody takes it
        await queue.get()
        clock.now = 930.0
        assert queue.stuck() == 30  # nobody finishes it
        queue.failed("a")
        assert queue.stuck() == 0
        clock.now = 936.0
        assert queue.stuck() == 5  # it failed, which was an end, and it is due again
        await queue.get()
        queue.done("a")
        assert queue.stuck() == 0

    asyncio.run(story())


def test_a_long_piece_of_work_among_others_that_end_is_not_stuck() -> None:
    async def story() -> None:
        clock = Clock()
        queue: WorkQueue[str] = WorkQueue(clock=clock)
        for key in ("long", "short"):
            queue.add(key)
            await queue.get()
        clock.now = 100.0
        queue.done("short")
        clock.now = 130.0
        assert queue.stuck() == 30

    asyncio.run(story())


def test_a_key_that_comes_again_and_again_is_handed_out_twice_at_once_and_then_waits() -> None:
    async def story() -> None:
        clock, waits = Clock(), list[float]()
        queue: WorkQueue[str] = WorkQueue(twice_in=0.2, clock=clock, waited=waits.append)
        for now in (10.0, 10.05):
            clock.now = now
            queue.add("a")
            assert await queue.get() == "a"
            queue.done("a")
        clock.now = 10.1
        queue.add("a")
        queue.add("b")
        assert await queue.get() == "b"
        assert await nothing(queue)
        assert queue.depth == 0
        clock.now = 10.2
        assert await queue.get() == "a"
        queue.done("a")
        assert waits == [0.0, 0.0, 0.0, 0.0]
        clock.now = 20.0
        queue.add("a")
        assert await queue.get() == "a"

    asyncio.run(story())
