"""A plan is carried out only after its status was written, and what fails is said and tried again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.operator.world import NAME, World

from fthsdp_operator.api import KIND
from fthsdp_operator.cluster import ClusterError, Conflict, Manifest


class Quota(World):
    """A namespace in which no more pods may be created."""

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        if manifest["kind"] == "Pod" and len(self.pods) >= 2:
            raise ClusterError("403 Forbidden: exceeded quota: pods=2")
        return await super().create(manifest)


class Contested(World):
    """Somebody changes the job between our look and our write."""

    async def patch_status(
        self, namespace: str, name: str, status: Mapping[str, Any], *, resource_version: str
    ) -> Manifest:
        raise Conflict("somebody else was faster")


def test_nothing_is_done_when_the_status_could_not_be_written() -> None:
    async def story() -> None:
        world = Contested()
        assert await world.look() == 0
        assert list(world.objects) == [(KIND, NAME)]
        assert world.events == []

    asyncio.run(story())


def test_a_job_that_is_gone_is_forgotten() -> None:
    async def story() -> None:
        world = World()
        world.vanish(NAME, kind=KIND)
        assert await world.look() == math.inf
        assert world.writes == []

    asyncio.run(story())


def test_a_call_that_fails_is_told_and_the_others_of_its_kind_are_made() -> None:
    async def story() -> None:
        world = Quota()
        with pytest.raises(ClusterError, match="exceeded quota"):
            await world.look()
        assert [(event.reason, event.message) for event in world.events] == [
            ("CallFailed", "403 Forbidden: exceeded quota: pods=2")
        ]
        assert len(world.pods) == 2
        assert world.job.status.restarts == 0

    asyncio.run(story())


def test_it_goes_on_when_calls_succeed_again() -> None:
    async def story() -> None:
        world = Quota()
        with pytest.raises(ClusterError):
            await world.look()
        free = World()
        free.objects = world.objects
        await free.settle()
        assert len(free.pods) == 6

    asyncio.run(story())
