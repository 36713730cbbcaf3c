"""A collection of an API server, as ``informer`` wants it: lists in pages, and watches that end by themselves."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from fthsdp_operator.cluster import ClusterError, Forbidden
from fthsdp_operator.informers.informer import Gap
from fthsdp_operator.kube.requests import Gone, Requests

__all__ = ["PAGE", "Collection"]

PAGE = 500
"""Objects that are asked for at a time: a page of pods has some MiB."""

Manifest = Mapping[str, Any]


class Collection:
    """Implements ``fthsdp_operator.informers.informer.Source``."""

    def __init__(self, requests: Requests, path: str, *, selector: str = "") -> None:
        """``selector``: of labels; empty: everything."""
        self._requests = requests
        self._path = path
        self._query = {"labelSelector": selector} if selector else {}

    async def list(self) -> AsyncGenerator[tuple[list[Manifest], str]]:
        """Yield all objects as they are at one moment, in pages, each with the version that stands for that moment."""
        more = ""
        while True:
            query = {**self._query, "limit": str(PAGE), **({"continue": more} if more else {})}
            try:
                answer = await self._requests.make("GET", self._path, query=query)
            except Gone as error:  # the first pages are too old for the next one
                raise Gap(str(error)) from error
            metadata, page = _metadata(answer), answer.get("items") or []
            if not _has_version(answer) or not isinstance(page, list) or not all(map(_is_object, page)):
                raise ClusterError(f"GET {self._path}: this is no list: {str(answer)[:200]}")
            yield page, metadata["resourceVersion"]
            more = metadata.get("continue") or ""
            if not more:
                return

    async def newest(self) -> str:
        """Return the version at which the server is now."""
        answer = await self._requests.make("GET", self._path, query={"limit": "1"})
        if not _has_version(answer):
            raise ClusterError(f"GET {self._path}: this is no list: {str(answer)[:200]}")
        version: str = answer["metadata"]["resourceVersion"]
        return version

    async def watch(
        self, version: str, *, seconds: int, silence: float, opened: Callable[[], None]
    ) -> AsyncGenerator[tuple[str, Manifest]]:
        """Yield kind and object of each event since, bookmarks included; ends after ``seconds``.

        ``opened`` is called once the server has agreed to it, which may be long before the first event.
        Raises Gap, and ClusterError when the connection breaks or says nothing for ``silence`` seconds.
        """
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        answer = self._requests.lines(self._path, query=query, silence=silence, opened=opened)
        try:
            async with aclosing(answer) as lines:
                async for line in lines:
                    yield _event(self._path, line)
        except Gone as error:
            raise Gap(str(error)) from error


_ERRORS: Mapping[object, type[ClusterError]] = {403: Forbidden, 410: Gap}


def _event(path: str, line: bytes) -> tuple[str, Manifest]:
    try:
        event = json.loads(line)
        kind, it = event["type"], event["object"]
    except (ValueError, KeyError, TypeError):
        raise Gap(f"watch of {path}: this is no event: {line[:200]!r}") from None
    if kind == "ERROR" and isinstance(it, Mapping):
        words = f"watch of {path}: {it.get('code', '')} {it.get('reason', '')}: {it.get('message', '')}"
        raise _ERRORS.get(it.get("code"), ClusterError)(words)
    if kind == "BOOKMARK" and _has_version(it):
        return kind, it
    if kind not in ("ADDED", "MODIFIED", "DELETED") or not _is_object(it):
        raise Gap(f"watch of {path}: this is no event: {line[:200]!r}")
    return kind, it


def _is_object(it: object) -> bool:
    """It has what a mirror needs of each."""
    metadata = _metadata(it)
    return _has_version(it) and all(isinstance(metadata.get(field), str) for field in ("name", "uid"))


def _has_version(it: object) -> bool:
    version = _metadata(it).get("resourceVersion")
    return isinstance(version, str) and version.isdecimal()


def _metadata(it: object) -> Mapping[str, Any]:
    metadata = it.get("metadata") if isinstance(it, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}
