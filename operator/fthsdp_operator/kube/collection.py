"""A collection of an API server, as ``informer`` wants it: lists in pages, and watches that end by themselves."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
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
            metadata, page = answer.get("metadata") or {}, answer.get("items") or []
            if not _is_version(metadata.get("resourceVersion")) or not all(map(_is_object, page)):
                raise ClusterError(f"GET {self._path}: this is no list: {str(answer)[:200]}")
            yield page, metadata["resourceVersion"]
            more = metadata.get("continue") or ""
            if not more:
                return

    async def watch(self, version: str, *, seconds: int, silence: float) -> AsyncGenerator[tuple[str, Manifest]]:
        """Yield kind and object of each event since, bookmarks included; ends after ``seconds``.

        Raises Gap, and ClusterError when the connection breaks or says nothing for ``silence`` seconds.
        """
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        try:
            async with aclosing(self._requests.lines(self._path, query=query, silence=silence)) as lines:
                async for line in lines:
                    yield _event(self._path, line)
        except Gone as error:
            raise Gap(str(error)) from error


def _event(path: str, line: bytes) -> tuple[str, Manifest]:
    try:
        event = json.loads(line)
        kind, it = event["type"], event["object"]
    except (ValueError, KeyError, TypeError):
        raise Gap(f"watch of {path}: this is no event: {line[:200]!r}") from None
    if kind == "ERROR":
        words = f"watch of {path}: {it.get('code', '')} {it.get('reason', '')}: {it.get('message', '')}"
        raise {403: Forbidden, 410: Gap}.get(it.get("code"), ClusterError)(words)
    if kind == "BOOKMARK" and _is_version((it.get("metadata") or {}).get("resourceVersion")):
        return kind, it
    if kind not in ("ADDED", "MODIFIED", "DELETED") or not _is_object(it):
        raise Gap(f"watch of {path}: this is no event: {line[:200]!r}")
    return kind, it


def _is_object(it: object) -> bool:
    """It has what a mirror needs of each."""
    metadata = it.get("metadata") if isinstance(it, Mapping) else None
    if not isinstance(metadata, Mapping):
        return False
    names = all(isinstance(metadata.get(field), str) for field in ("name", "uid"))
    return names and _is_version(metadata.get("resourceVersion"))


def _is_version(version: object) -> bool:
    return isinstance(version, str) and version.isdecimal()
