"""However a watch breaks, no deletion is missed; and a server that fails is not asked without end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests import timeline
from tests.shelf import Shelf
from tests.unit.operator.test_cache import pod

from fthsdp_operator.cluster import ClusterError
from fthsdp_operator.informers import informer
from fthsdp_operator.informers.cache import Restored
from fthsdp_operator.informers.sight import EVERYWHERE, Sight
from fthsdp_operator.observed.observe import JobKey, PodView

Object = dict[str, Any]
LLAMA: JobKey = ("default", "llama")


class Seeing:
    """A sight of a shelf of pods and one of nodes, and what it has told."""

    def __init__(self, pods: Shelf, nodes: Shelf) -> None:
        self.pods = pods
        self.nodes = nodes
        self.told: list[str] = []
        """Uids of pods that are gone, and "llama" for each other change."""
        self.hurry: list[bool] = []
        """Of each, whether somebody should look at once."""
        loop = asyncio.get_running_loop()
        self.sight = Sight(pods={EVERYWHERE: pods}, nodes=nodes, clock=loop.time, chance=lambda: 0.5)
        self.sight.listen(self._hear)

    async def begin(self) -> None:
        """Follow from now on, and wait until all that there is was seen."""
        self.following = asyncio.create_task(self.sight.follow())
        await self.sight.settled()
        await asyncio.sleep(1)

    async def end(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)

    def _hear(self, job: JobKey, gone: PodView | None, can_wait: bool) -> None:
        assert job == LLAMA
        self.hurry.append(not can_wait)
        self.told.append("llama" if gone is None else gone.uid)

    def shown(self) -> dict[str, str]:
        return {it.uid: it.phase for it in self.sight.pods(*LLAMA)}


@asynccontextmanager
async def seeing(*there: Object, page: int = 500, follow: bool = True) -> AsyncIterator[Seeing]:
    pods = Shelf(page=page)
    for it in there:
        pods.write("ADDED", it)
    seen = Seeing(pods, Shelf())
    try:
        if follow:
            await seen.begin()
            seen.told.clear()
        yield seen
    finally:
        await seen.end()


def story(play: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await play()

    timeline.run(whole())


def test_what_was_deleted_while_the_watch_was_down_and_the_log_is_gone_is_told() -> None:
    async def play() -> None:
        async with seeing(pod("a", 1), pod("b", 2, phase="Running")) as it:
            it.pods.down = True
            it.pods.cut()
            it.pods.write("DELETED", pod("b", 3))
            it.pods.compact()
            await asyncio.sleep(60)
            assert it.told == []
            it.pods.down = False
            await asyncio.sleep(60)
            assert it.told == ["b"]
            assert it.shown() == {"a": "Pending"}

    story(play)


def test_a_connection_that_was_cut_goes_on_where_it_stopped_without_a_list() -> None:
    async def play() -> None:
        async with seeing(pod("a", 1)) as it:
            it.pods.write("MODIFIED", pod("a", 5, phase="Running"))
            await asyncio.sleep(1)
            it.pods.cut()
            it.pods.write("DELETED", pod("a", 6, phase="Failed"))
            await asyncio.sleep(10)
            assert it.told == ["llama", "a"]
            assert it.pods.asked == ["list", "watch 1", "watch 5"]

    story(play)


def test_a_bookmark_saves_a_list_where_only_other_things_have_changed() -> None:
    async def play() -> None:
        async with seeing(pod("a", 1)) as it:
            it.pods.version = 90
            it.pods.bookmark()
            await asyncio.sleep(1)
            it.pods.compact()
            await asyncio.sleep(10)
            assert it.pods.asked == ["list", "watch 1", "watch 90"]

    story(play)


PAGES = [pod(f"p{number}", number) for number in range(1, 10)]


def test_what_happens_between_the_pages_of_a_list_is_told_after_it() -> None:
    async def play() -> None:
        def between() -> None:
            it.pods.write("DELETED", pod("p9", 20))
            it.pods.write("ADDED", pod("new", 21))

        async with seeing(*PAGES, page=2, follow=False) as it:
            it.pods.between = between
            await it.begin()
            assert it.told == ["llama"] * 9 + ["p9", "llama"]
            assert set(it.shown()) == {f"p{number}" for number in range(1, 9)} | {"new"}
            assert it.pods.asked == ["list", "watch 9"]

    story(play)


def test_a_list_whose_first_pages_are_too_old_for_the_next_begins_anew() -> None:
    async def play() -> None:
        def between() -> None:
            it.pods.write("DELETED", pod("p1", 20))
            it.pods.compact()

        async with seeing(*PAGES, page=2, follow=False) as it:
            it.pods.between = between
            await it.begin()
            assert set(it.shown()) == {f"p{number}" for number in range(2, 10)}
            assert it.pods.asked == ["list", "list", "watch 20"]

    story(play)


def test_a_stream_that_is_frozen_is_given_up_and_nothing_that_came_meanwhile_is_lost() -> None:
    async def play() -> None:
        async with seeing(pod("a", 1)) as it:
            it.pods.frozen = True
            it.pods.write("DELETED", pod("a", 2))
            await asyncio.sleep(informer.SILENCE - 1)
            assert it.sight.age() > informer.SILENCE - 2
            it.pods.frozen = False
            await asyncio.sleep(informer.WATCH_TIME)
            assert it.told == ["a"]
            assert it.sight.age() < informer.WATCH_TIME

    story(play)


@pytest.mark.parametrize(("broken", "seconds"), [(True, 5.0), (False, informer.RELIST + 2 * informer.WATCH_TIME)])
def test_a_server_that_was_restored_from_a_copy_ends_all_that_was_heard_of_it(broken: bool, seconds: float) -> None:
    async def play() -> None:
        async with seeing(pod("a", 90), pod("b", 100)) as it:
            it.pods.restore(pod("a", 40, phase="Running"), version=50, cut=broken)
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(it.following, seconds)
            assert raised.group_contains(Restored, match="has gone back from version 100 to 50")

    story(play)


def test_a_watch_goes_on_where_a_list_that_need_not_be_fails() -> None:
    class Heavy(Shelf):
        async def list(self) -> Any:
            if self.asked.count("list"):
                raise ClusterError("504: the list takes too long")
            async for page in super().list():
                yield page

    async def play() -> None:
        it = Seeing(Heavy(), Shelf())
        await it.begin()
        await asyncio.sleep(informer.RELIST + 2 * informer.WATCH_TIME)
        it.pods.write("ADDED", pod("a", 1))
        await asyncio.sleep(1)
        assert it.shown() == {"a": "Pending"}
        await it.end()

    story(play)


def test_nothing_is_known_before_the_first_list() -> None:
    async def play() -> None:
        it = Seeing(Shelf(), Shelf())
        it.pods.down = True
        following = asyncio.create_task(it.sight.follow())
        await asyncio.sleep(60)
        with pytest.raises(ClusterError, match="the pods of namespace default are not known yet"):
            it.shown()
        it.pods.down = False
        await asyncio.sleep(60)
        assert it.shown() == {}
        following.cancel()

    story(play)


def test_the_age_of_what_is_seen_begins_when_it_is_followed() -> None:
    async def play() -> None:
        it = Seeing(Shelf(), Shelf())
        it.pods.down = it.nodes.down = True
        await asyncio.sleep(100_000)  # it stands by
        following = asyncio.create_task(it.sight.follow())
        await asyncio.sleep(50)
        assert it.sight.age() == 50
        following.cancel()

    story(play)


def test_a_namespace_that_nobody_follows_has_no_pods_to_speak_of() -> None:
    with pytest.raises(ClusterError, match="the pods of namespace team are not followed"):
        Sight(pods={"default": Shelf()}).pods("team", "llama")


@pytest.mark.parametrize("fault", ["down", "gone", "ends"])
def test_a_server_that_fails_is_asked_ever_less_often(fault: str) -> None:
    class Failing(Shelf):
        async def watch(self, version: str, *, seconds: int, silence: float, opened: Callable[[], None]) -> Any:
            self.asked.append("watch")
            if fault == "gone":
                raise informer.Gap("410 Gone")
            if fault == "down":
                raise ClusterError("500")
            for nothing in ():
                yield nothing

    async def play() -> None:
        sight = Sight(pods={EVERYWHERE: (shelf := Failing())}, chance=lambda: 0.5)
        following = asyncio.create_task(sight.follow())
        await asyncio.sleep(600)
        following.cancel()
        assert 25 < shelf.asked.count("watch") < 60
        assert shelf.asked.count("list") <= shelf.asked.count("watch")

    story(play)


@pytest.mark.parametrize(("trouble", "heard"), [("busy", True), ("down", False)])
def test_a_server_that_is_busy_is_heard_and_one_that_is_down_is_not(trouble: str, heard: bool) -> None:
    async def play() -> None:
        async with seeing(pod("a", 1)) as it:
            for shelf in (it.pods, it.nodes):
                setattr(shelf, trouble, True)
                shelf.cut()
            await asyncio.sleep(400)
            assert (it.sight.age() < 60) is heard

    story(play)


@pytest.mark.parametrize(
    ("kind", "change", "hurries"),
    [
        ("MODIFIED", {"status": {"phase": "Running"}}, False),
        ("MODIFIED", {"status": {"phase": "Failed"}}, True),
        ("DELETED", {"status": {"phase": "Running"}}, True),
    ],
)
def test_a_pod_that_comes_up_can_wait_and_one_that_ends_cannot(kind: str, change: Object, hurries: bool) -> None:
    async def play() -> None:
        async with seeing(pod("a", 1)) as it:
            it.hurry.clear()
            it.pods.write(kind, {**pod("a", 2), **change})
            await asyncio.sleep(1)
            assert it.hurry == [hurries]

    story(play)


def test_a_pod_that_is_being_deleted_cannot_wait() -> None:
    async def play() -> None:
        async with seeing(pod("a", 1, phase="Running")) as it:
            it.hurry.clear()
            going = pod("a", 2, phase="Running")
            going["metadata"] |= {"deletionTimestamp": "2026-11-30T12:00:30Z", "deletionGracePeriodSeconds": 30}
            it.pods.write("MODIFIED", going)
            await asyncio.sleep(1)
            assert it.hurry == [True]

    story(play)


# --- nodes ------------------------------------------------------------------------------------------------------------


def node(version: int, ready: str) -> Object:
    condition = {"type": "Ready", "status": ready, "lastHeartbeatTime": str(version)}
    metadata = {"name": "node-7", "uid": "n", "resourceVersion": str(version)}
    return {"metadata": metadata, "status": {"conditions": [condition]}}


def test_a_node_wakes_the_jobs_that_have_pods_on_it_and_its_heartbeats_nobody() -> None:
    async def play() -> None:
        async with seeing(pod("a", 1, node="node-7")) as it:
            it.nodes.write("ADDED", node(1, "True"))
            await asyncio.sleep(1)
            it.told.clear()
            it.nodes.write("MODIFIED", node(2, "True"))
            await asyncio.sleep(1)
            assert it.told == []
            it.nodes.write("MODIFIED", node(3, "Unknown"))
            await asyncio.sleep(1)
            assert it.told == ["llama"]
            assert it.sight.nodes()["node-7"].ready == "Unknown"

    story(play)


def test_without_the_right_to_nodes_none_is_known_and_a_right_that_is_granted_later_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play() -> None:
        async with seeing(pod("a", 1, node="node-7")) as it:
            it.nodes.forbidden = True
            it.nodes.write("ADDED", node(1, "True"))
            it.nodes.cut()
            await asyncio.sleep(600)
            assert it.sight.nodes() == {}
            assert it.shown() == {"a": "Pending"}
            assert it.sight.age() < 2 * informer.FORBIDDEN_RETRY
            assert it.nodes.asked.count("list") < 20
            it.nodes.forbidden = False
            await asyncio.sleep(2 * informer.FORBIDDEN_RETRY)
            assert it.sight.nodes()["node-7"].ready == "True"
            it.nodes.forbidden = True
            it.nodes.cut()
            await asyncio.sleep(60)
            assert it.sight.nodes() == {}

    with caplog.at_level(logging.INFO):
        story(play)
    assert [line.partition(", which")[0] for line in caplog.messages if line.startswith("nodes are")] == [
        "nodes are not shown to us",
        "nodes are not known any more, until we may see them: 403 Forbidden: said the server",
        "nodes are shown to us again",
        "nodes are not shown to us",
        "nodes are not known any more, until we may see them: 403 Forbidden: said the server",
    ]


@pytest.mark.parametrize("seconds", [0.01, 1.0, 5.0])
def test_a_right_that_is_missing_for_a_moment_blinds_nobody_and_the_watch_goes_on_where_it_was(seconds: float) -> None:
    async def play() -> None:
        async with seeing(pod("a", 1)) as it:
            it.pods.forbidden = True
            it.pods.cut()
            it.pods.write("MODIFIED", pod("a", 5, phase="Running"))
            await asyncio.sleep(seconds)
            assert it.shown() == {"a": "Pending"}
            it.pods.forbidden = False
            await asyncio.sleep(2 * seconds + 1)
            assert it.shown() == {"a": "Running"}
            assert it.pods.asked.count("list") == 1
            assert it.sight.refusals() == {("pods", ""): False, ("nodes", ""): False}

    story(play)


def test_pods_that_are_refused_for_longer_are_not_known_any_more_and_it_is_said_why() -> None:
    async def play() -> None:
        async with seeing(pod("a", 1)) as it:
            it.pods.forbidden = True
            it.pods.cut()
            await asyncio.sleep(2 * informer.FORBIDDEN_GRACE)
            with pytest.raises(ClusterError, match="are not known: we may not see them: 403 Forbidden: said the serv"):
                it.shown()
            assert it.sight.refusals() == {("pods", ""): True, ("nodes", ""): False}
            it.pods.write("DELETED", pod("a", 5))
            it.pods.forbidden = False
            await asyncio.sleep(2 * informer.FORBIDDEN_GRACE)
            assert it.shown() == {}
            assert it.told == ["a"]

    story(play)


def test_what_is_refused_again_is_known_as_long_as_if_it_was_never_refused_before() -> None:
    async def play() -> None:
        async with seeing(pod("a", 1)) as it:
            for _ in range(10):
                it.pods.forbidden = True
                it.pods.cut()
                await asyncio.sleep(informer.FORBIDDEN_GRACE / 2)
                it.pods.forbidden = False
                await asyncio.sleep(informer.WATCH_TIME)
                assert it.shown() == {"a": "Pending"}

    story(play)


def test_a_watch_that_dies_of_a_mistake_of_ours_ends_all_of_them() -> None:
    class Mistaken(Shelf):
        async def list(self) -> Any:
            raise ZeroDivisionError
            yield

    async def play() -> None:
        sight = Sight(pods={"a": Shelf(), "b": Mistaken()})
        with pytest.raises(ExceptionGroup) as raised:
            await sight.follow()
        assert raised.group_contains(ZeroDivisionError)

    story(play)
