"""The ConfigMap store against an HTTP server that keeps resourceVersions as the API server does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from kubernetes.aio import client
from tests.serving import serving

from fthsdp.coordinator.configmap_store import LARGEST_REPORT, ConfigMapStore
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.messages import EpochRecord, Member, Outcome, Role
from fthsdp.coordinator.store import StoreConflict, StoreUnavailable
from fthsdp.errors import ConfigError

pytestmark = pytest.mark.local
PATH = "/api/v1/namespaces/ns/configmaps/job-epoch"


def ledger(number: int) -> Ledger:
    member = Member(replica=0, attempt=0, role=Role.ACTIVE, addresses=("h:1",))
    return Ledger(current=EpochRecord(number=number, members=(member,), outcome=Outcome(step=3)))


class Server:
    """One ConfigMap."""

    def __init__(self) -> None:
        self.version = 1
        self.data: dict[str, str] | None = None
        self.status = 200
        """Answered instead, unless 200."""
        self.intrusions = 0
        """How many of the next writes find that somebody else wrote first."""
        self.writes = 0

    async def handle(self, request: web.Request) -> web.Response:
        if request.path != PATH:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        if request.method == "PUT":
            body = await request.json()
            if self.intrusions:
                self.intrusions -= 1
                self.version += 1
            if body["metadata"]["resourceVersion"] != str(self.version):
                return web.json_response({"kind": "Status", "code": 409, "reason": "Conflict"}, status=409)
            self.version += 1
            self.writes += 1
            self.data = body["data"]
        metadata = {"name": "job-epoch", "namespace": "ns", "resourceVersion": str(self.version)}
        return web.json_response({"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata, "data": self.data})


def run(test: Callable[[Server, Callable[[], ConfigMapStore]], Awaitable[None]]) -> None:
    async def main() -> None:
        server, stores = Server(), list[ConfigMapStore]()
        async with serving(server.handle) as address:

            def open_store() -> ConfigMapStore:
                api = client.ApiClient(client.Configuration(host=address))
                stores.append(ConfigMapStore(api, "ns", "job-epoch"))
                return stores[-1]

            try:
                await test(server, open_store)
            finally:
                for store in stores:
                    await store.close()

    asyncio.run(main())


def test_what_was_saved_is_loaded_by_the_next_coordinator() -> None:
    async def test(server: Server, open_store: Callable[[], ConfigMapStore]) -> None:
        store = open_store()
        assert await store.load() is None
        await store.save(ledger(1), expected=0)
        await store.save(ledger(2), expected=1)
        assert await open_store().load() == ledger(2)

    run(test)


def test_of_two_coordinators_only_one_succeeds() -> None:
    async def test(server: Server, open_store: Callable[[], ConfigMapStore]) -> None:
        await open_store().save(ledger(1), expected=0)
        results = await asyncio.gather(
            *(open_store().save(ledger(2 + i), expected=1) for i in range(4)), return_exceptions=True
        )
        assert [type(r) for r in results].count(StoreConflict) == 3
        assert results.count(None) == 1

    run(test)


def test_somebody_elses_change_is_written_around_and_the_report_keeps_the_epoch() -> None:
    async def test(server: Server, open_store: Callable[[], ConfigMapStore]) -> None:
        store = open_store()
        server.intrusions = 2
        await store.save(ledger(1), expected=0)
        server.intrusions = 1
        await asyncio.gather(store.publish('{"outcome": "running"}'), store.save(ledger(2), expected=1))
        assert server.data == {"epoch.json": ledger(2).encode(), "report.json": '{"outcome": "running"}'}

    run(test)


def test_saving_again_what_is_there_writes_nothing() -> None:
    async def test(server: Server, open_store: Callable[[], ConfigMapStore]) -> None:
        store = open_store()
        await store.save(ledger(1), expected=0)
        await store.save(ledger(1), expected=0)
        assert server.writes == 1

    run(test)


def test_a_report_that_is_too_large_is_left_out() -> None:
    async def test(server: Server, open_store: Callable[[], ConfigMapStore]) -> None:
        await open_store().publish("x" * (LARGEST_REPORT + 1))
        assert server.writes == 0

    run(test)


@pytest.mark.parametrize(("status", "error"), [(500, StoreUnavailable), (429, StoreUnavailable), (403, ConfigError)])
def test_an_api_server_in_trouble_is_told_from_one_that_says_no(status: int, error: type[Exception]) -> None:
    async def test(server: Server, open_store: Callable[[], ConfigMapStore]) -> None:
        server.status = status
        with pytest.raises(error, match=f"configmap ns/job-epoch: .*{status}"):
            await open_store().load()

    run(test)


def test_no_api_server_is_no_reason_to_give_up() -> None:
    async def test(server: Server, open_store: Callable[[], ConfigMapStore]) -> None:
        api = client.ApiClient(client.Configuration(host="http://127.0.0.1:1"))
        store = ConfigMapStore(api, "ns", "job-epoch")
        with pytest.raises(StoreUnavailable):
            await store.load()
        await store.close()

    run(test)
