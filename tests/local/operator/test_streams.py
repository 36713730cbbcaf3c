"""Watches over real connections that break anywhere: what was not whole was not heard."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.serving import Answer, kubeconfig_for, serving

from fthsdp_operator.cluster import Busy, ClusterError, Forbidden, Unanswered
from fthsdp_operator.informers.informer import Gap
from fthsdp_operator.kube.collection import PAGE, Collection
from fthsdp_operator.kube.requests import LONGEST_LINE, Access, Requests

pytestmark = pytest.mark.local

Object = dict[str, Any]


def pod(version: int, note: str = "") -> Object:
    metadata = {"name": "a", "uid": "u", "resourceVersion": str(version), "annotations": {"note": note}}
    return {"kind": "Pod", "metadata": metadata}


def event(kind: str, it: Object) -> bytes:
    return json.dumps({"type": kind, "object": it}).encode() + b"\n"


@asynccontextmanager
async def collection_at(answer: Answer, folder: Path) -> AsyncIterator[Collection]:
    async with serving(answer) as address:
        requests = await Requests.connect(Access(kubeconfig=kubeconfig_for(address, folder)))
        try:
            yield Collection(requests, "api/v1/pods", selector="mine")
        finally:
            await requests.close()


def sending(*parts: bytes, then: str = "end") -> Answer:
    """Answer a watch with this, then end it, cut the connection or say no more."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        if then == "cut":
            assert request.transport is not None
            request.transport.abort()
        if then == "silence":
            await asyncio.Event().wait()
        return response

    return answer


def heard(answer: Answer, folder: Path, *, silence: float = 30.0) -> tuple[list[str], ClusterError | None]:
    """Return the versions of the events of a watch, and what it ended with."""

    async def story() -> tuple[list[str], ClusterError | None]:
        versions: list[str] = []
        async with collection_at(answer, folder) as collection:
            try:
                watch = collection.watch("7", seconds=60, silence=silence, opened=lambda: None)
                async with aclosing(watch) as events:
                    async for _, it in events:
                        versions.append(it["metadata"]["resourceVersion"])
            except ClusterError as error:
                return versions, error
        return versions, None

    return asyncio.run(story())


def test_a_watch_that_the_server_ends_is_no_error(tmp_path: Path) -> None:
    events = event("ADDED", pod(8)), event("BOOKMARK", pod(9)), event("DELETED", pod(10))
    assert heard(sending(*events), tmp_path) == (["8", "9", "10"], None)


def test_events_are_put_together_however_they_are_cut_into_pieces(tmp_path: Path) -> None:
    whole = event("ADDED", pod(8)) + event("MODIFIED", pod(9))
    for size in (1, 7, len(whole) - 1):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert heard(sending(*pieces), tmp_path) == (["8", "9"], None)


def test_an_event_may_be_longer_than_any_buffer(tmp_path: Path) -> None:
    assert heard(sending(event("ADDED", pod(8, "x" * 3 * 2**20)), event("DELETED", pod(9))), tmp_path) == (
        ["8", "9"],
        None,
    )


@pytest.mark.parametrize("then", ["cut", "end"])
def test_an_event_that_is_cut_off_was_not_heard(tmp_path: Path, then: str) -> None:
    versions, error = heard(sending(event("ADDED", pod(8)), event("DELETED", pod(9))[:-5], then=then), tmp_path)
    assert versions == ["8"]
    assert isinstance(error, Unanswered)


def test_a_stream_on_which_nothing_comes_is_given_up(tmp_path: Path) -> None:
    began = time.monotonic()
    versions, error = heard(sending(event("ADDED", pod(8)), then="silence"), tmp_path, silence=1.0)
    assert versions == ["8"]
    assert isinstance(error, Unanswered)
    assert 0.9 < time.monotonic() - began < 10


def test_a_line_without_an_end_is_given_up(tmp_path: Path) -> None:
    piece = b"x" * 2**20
    _, error = heard(sending(*[piece] * (LONGEST_LINE // len(piece) + 2), then="silence"), tmp_path)
    assert error is not None
    assert "a line is longer than" in str(error)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}), Gap),
        (event("ERROR", {"kind": "Status", "code": 403, "reason": "Forbidden"}), Forbidden),
        (event("ERROR", {"kind": "Status", "code": 500, "reason": "InternalError"}), ClusterError),
        (b"<html>\n", Gap),
        (b"[]\n", Gap),
        (event("ADDED", {"metadata": {"name": "a", "resourceVersion": "9"}}), Gap),
        (event("ADDED", {"metadata": {"name": "a", "uid": "u", "resourceVersion": "newest"}}), Gap),
        (event("ADDED", {"metadata": "a"}), Gap),
        (event("BOOKMARK", {"metadata": {}}), Gap),
        (b'{"type": "BOOKMARK", "object": []}\n', Gap),
        (b'{"type": "ERROR", "object": "overloaded"}\n', Gap),
        (event("RENAMED", pod(9)), Gap),
    ],
)
def test_what_is_no_event_leaves_a_gap(tmp_path: Path, line: bytes, kind: type[ClusterError]) -> None:
    versions, error = heard(sending(event("ADDED", pod(8)), line, event("DELETED", pod(10))), tmp_path)
    assert versions == ["8"]
    assert type(error) is kind


@pytest.mark.parametrize(("status", "kind"), [(410, Gap), (403, Forbidden), (429, Busy), (503, Busy)])
def test_a_watch_that_is_refused_says_why(tmp_path: Path, status: int, kind: type[ClusterError]) -> None:
    async def refuse(request: web.Request) -> web.Response:
        words = {"kind": "Status", "reason": "x", "message": "said the server", "code": status}
        return web.json_response(words, status=status, headers={"Retry-After": "7"})

    versions, error = heard(refuse, tmp_path)
    assert versions == []
    assert type(error) is kind
    assert "said the server" in str(error)


def test_a_watch_asks_for_what_it_wants(tmp_path: Path) -> None:
    asked: dict[str, str] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.update(request.query)
        return await sending()(request)

    heard(answer, tmp_path)
    assert asked == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "labelSelector": "mine",
        "resourceVersion": "7",
        "timeoutSeconds": "60",
    }


class Pages:
    """Lists pods in pages of the size that is asked for; may have forgotten the first when it is asked for more."""

    def __init__(self, number: int, *, forgets: bool = False) -> None:
        self.asked: list[dict[str, str]] = []
        self._pods = [pod(version) for version in range(number)]
        self._forgets = forgets

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.query))
        first, size = int(request.query.get("continue", 0)), int(request.query["limit"])
        if first and self._forgets:
            return web.json_response({"kind": "Status", "reason": "Expired", "code": 410}, status=410)
        more = {"continue": str(first + size)} if first + size < len(self._pods) else {}
        page = self._pods[first : first + size]
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": "99", **more}, "items": page})


def listed(answer: Answer, folder: Path) -> list[tuple[int, str]]:
    """Return the length and the version of each page."""

    async def story() -> list[tuple[int, str]]:
        async with collection_at(answer, folder) as collection:
            return [(len(page), version) async for page, version in collection.list()]

    return asyncio.run(story())


def test_a_list_comes_in_pages(tmp_path: Path) -> None:
    pages = Pages(2 * PAGE + 1)
    assert listed(pages.answer, tmp_path) == [(PAGE, "99"), (PAGE, "99"), (1, "99")]
    assert [it.get("continue") for it in pages.asked] == [None, str(PAGE), str(2 * PAGE)]
    assert {it["labelSelector"] for it in pages.asked} == {"mine"}


def test_a_list_of_nothing_is_a_list(tmp_path: Path) -> None:
    assert listed(Pages(0).answer, tmp_path) == [(0, "99")]


def test_a_list_that_is_too_old_for_its_next_page_is_a_gap(tmp_path: Path) -> None:
    with pytest.raises(Gap):
        listed(Pages(PAGE + 1, forgets=True).answer, tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        {"kind": "Status", "metadata": {}},
        {"metadata": "none"},
        {"metadata": {"resourceVersion": "1"}, "items": {"a": 1}},
    ],
)
def test_what_is_no_list_is_not_taken_for_an_empty_one(tmp_path: Path, words: Object) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(words)

    with pytest.raises(ClusterError, match="this is no list"):
        listed(answer, tmp_path)
