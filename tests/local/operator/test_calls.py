"""What the operator makes of an API server's answers, and of those that never come, over real connections."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import pytest
from aiohttp import web
from kubernetes.aio.config import incluster_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from tests.local.certificates import Authority
from tests.serving import Answer, kubeconfig_for, serving

from fthsdp_operator.cluster import (
    AlreadyExists,
    Busy,
    ClusterError,
    Conflict,
    Forbidden,
    Manifest,
    NamespaceEnding,
    Refused,
    Unanswered,
)
from fthsdp_operator.kube.apiserver import KubernetesCluster
from fthsdp_operator.kube.requests import Access, Requests

pytestmark = pytest.mark.local

DEADLINE = 20.0
POD: Manifest = {"kind": "Pod", "metadata": {"name": "p", "namespace": "n"}}


class Ended(BaseException):
    """The process ended."""


def end() -> NoReturn:
    raise Ended


@asynccontextmanager
async def cluster_at(answer: Answer, folder: Path) -> AsyncIterator[KubernetesCluster]:
    """Connect to a server that answers every request so."""
    async with serving(answer) as address:
        access = Access(kubeconfig=kubeconfig_for(address, folder))
        cluster = await KubernetesCluster.connect(access, coordinator_image="x")
        try:
            yield cluster
        finally:
            await cluster.close()


def status(code: int, reason: str = "", **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        words = {"kind": "Status", "reason": reason, "message": "said the server", "code": code}
        return web.json_response(words, status=code, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


async def ending(request: web.Request) -> web.Response:
    details = {"causes": [{"reason": "NamespaceTerminating", "message": "namespace n is being terminated"}]}
    words = {"kind": "Status", "reason": "Forbidden", "message": "said the server", "code": 403, "details": details}
    return web.json_response(words, status=403)


async def reset(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def page(request: web.Request) -> web.Response:
    return web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html")


async def welcome(request: web.Request) -> web.Response:
    return web.Response(text="<html>Please log in</html>", content_type="text/html")


async def gateway(request: web.Request) -> web.Response:
    return web.json_response({"message": "said a gateway", "details": "no upstream"}, status=403)


async def made(request: web.Request) -> web.Response:
    return web.json_response(await request.json())


async def silence(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("answer", "error", "words", "retry_after"),
    [
        (status(409, "AlreadyExists"), AlreadyExists, "409 AlreadyExists: said the server", 0),
        (status(409, "Conflict"), Conflict, "409 Conflict: said the server", 0),
        (status(429, "TooManyRequests", Retry_After="7"), Busy, "429 TooManyRequests: said the server", 7),
        (status(429, "TooManyRequests", Retry_After="86400"), Busy, "429", 60),
        (status(503, "ServiceUnavailable", Retry_After="soon"), Busy, "503", 0),
        (status(500, "InternalError"), Busy, "500 InternalError: said the server", 0),
        (page, Busy, "502 : <html>Bad Gateway</html>", 0),
        (welcome, ClusterError, "200 : <html>Please log in</html>", 0),
        (gateway, Forbidden, "403 : said a gateway", 0),
        (status(403, "Forbidden"), Forbidden, "403 Forbidden: said the server", 0),
        (status(422, "Invalid"), Refused, "422 Invalid: said the server", 0),
        (ending, NamespaceEnding, "403 Forbidden: said the server", 0),
        (reset, Unanswered, "the API server does not answer: ", 0),
    ],
)
def test_an_answer_that_is_no_success_is_an_error_in_its_words(
    answer: Answer, error: type[ClusterError], words: str, retry_after: float, tmp_path: Path
) -> None:
    async def story() -> None:
        async with cluster_at(answer, tmp_path) as cluster:
            with pytest.raises(error) as raised:
                await cluster.create(POD)
            assert type(raised.value) is error
            assert f"POST api/v1/namespaces/n/pods: {words}" in str(raised.value)
            assert raised.value.retry_after == retry_after

    asyncio.run(story())


def test_a_call_that_hangs_ends_with_the_time_that_is_left_and_no_other_is_made_after_it(tmp_path: Path) -> None:
    async def story() -> None:
        begun = time.monotonic()
        calls = 0

        def time_left() -> float:
            left = begun + 0.5 - time.monotonic()
            return left if left > 0 else end()

        async def hang(request: web.Request) -> web.Response:
            nonlocal calls
            calls += 1
            return await silence(request)

        async with cluster_at(hang, tmp_path) as cluster:
            cluster.only_while(time_left)
            with pytest.raises(ClusterError, match="the API server does not answer"):
                await cluster.create(POD)
            assert 0.4 < time.monotonic() - begun < 5
            with pytest.raises(Ended):
                await cluster.create(POD)
            assert calls == 1

    asyncio.run(story())


def test_what_an_answer_repeats_of_an_object_is_cut_off(tmp_path: Path) -> None:
    async def long(request: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "message": "x" * 2**20, "code": 422}, status=422)

    async def story() -> None:
        async with cluster_at(long, tmp_path) as cluster:
            with pytest.raises(Refused) as raised:
                await cluster.create(POD)
            assert len(str(raised.value)) < 3000

    asyncio.run(story())


def server_of(authority: Authority, folder: Path) -> ssl.SSLContext:
    """Return how a server talks whose certificate this authority has signed."""
    authority.issue(folder, address="127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def test_a_new_authority_of_the_cluster_is_trusted_once_its_file_names_it(tmp_path: Path) -> None:
    async def story() -> None:
        before, after = (Authority(tmp_path / name, name) for name in ("before", "after"))
        trusted = tmp_path / "ca.crt"
        trusted.write_bytes(before.certificate.read_bytes())
        context = server_of(before, tmp_path / "server")
        async with serving(made, tls=context) as address:
            access = Access(kubeconfig=kubeconfig_for(address, tmp_path, authority=trusted))
            cluster = await KubernetesCluster.connect(access, coordinator_image="x")
            await cluster.create(POD)
            await cluster.close()

            cluster = await KubernetesCluster.connect(access, coordinator_image="x")
            renewed = after.issue(tmp_path / "server", address="127.0.0.1")
            context.load_cert_chain(renewed / "tls.crt", renewed / "tls.key")
            for _ in range(2):
                with pytest.raises(Unanswered, match="CERTIFICATE_VERIFY_FAILED"):
                    await cluster.create(POD)
            trusted.write_bytes(before.certificate.read_bytes() + after.certificate.read_bytes())
            with pytest.raises(Unanswered, match="CERTIFICATE_VERIFY_FAILED"):
                await cluster.create(POD)
            assert await cluster.create(POD) == POD
            await cluster.close()

    asyncio.run(story())


def test_a_token_that_the_kubelet_has_renewed_is_used_and_one_that_is_missing_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        tokens.append(request.headers["Authorization"])
        return await made(request)

    async def story() -> None:
        authority = Authority(tmp_path / "authority")
        async with serving(answer, tls=server_of(authority, tmp_path / "server")) as address:
            token = tmp_path / "token"
            token.write_text("first")
            monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
            monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority.certificate))
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", address.rpartition(":")[2])
            read_at_once = property(lambda loader: datetime.min, lambda loader, time: None)  # not after a minute
            monkeypatch.setattr(InClusterConfigLoader, "token_expires_at", read_at_once, raising=False)
            cluster = await KubernetesCluster.connect(Access(kubeconfig=None), coordinator_image="x")
            await cluster.create(POD)
            for word in ("", None):
                token.unlink() if word is None else token.write_text(word)
                with pytest.raises(Unanswered):
                    await cluster.create(POD)
            token.write_text("second")
            await cluster.create(POD)
            await cluster.close()
        assert tokens == ["bearer first", "bearer second"]

    asyncio.run(story())


def test_calls_are_made_while_there_is_time(tmp_path: Path) -> None:
    async def story() -> None:
        async with cluster_at(made, tmp_path) as cluster:
            cluster.only_while(lambda: 10.0)
            assert await cluster.create(POD) == POD

    asyncio.run(story())


BEGUN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n"


def frozen(listener: socket.socket, context: ssl.SSLContext, answer: bytes, asked: Event, free: Event) -> None:
    """Begin an answer without an end, or none, and then say and hear nothing until somebody is free to go."""
    connection, _ = listener.accept()
    with context.wrap_socket(connection, server_side=True) as secured:
        secured.recv(65536)
        secured.sendall(answer)
        asked.set()
        free.wait(DEADLINE)


@pytest.mark.parametrize("answer", [BEGUN, b""], ids=["that has begun", "that was asked for"])
def test_a_watch_that_is_given_up_leaves_no_connection_that_waits_for_its_server(tmp_path: Path, answer: bytes) -> None:
    """TLS ends with a word of both, and a server that is frozen has none."""
    authority, asked, free = Authority(tmp_path / "authority"), Event(), Event()
    context = server_of(authority, tmp_path / "server")

    async def story(address: str) -> None:
        access = Access(kubeconfig=kubeconfig_for(address, tmp_path, authority=authority.certificate))
        requests = await Requests.connect(access)
        lines = requests.lines("api/v1/pods", query={"watch": "true"}, silence=DEADLINE, opened=lambda: None)
        first = asyncio.create_task(anext(lines))
        if answer:
            assert await first == b"{}"
            await lines.aclose()
        else:
            await asyncio.to_thread(asked.wait, DEADLINE)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await requests.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        server = pool.submit(frozen, listener, context, answer, asked, free)
        try:
            asyncio.run(story(f"https://127.0.0.1:{listener.getsockname()[1]}"))
            gc.collect()  # a connection that is left warns then, and that fails the test
        finally:
            free.set()
        server.result(DEADLINE)


class NoThreads(ThreadPoolExecutor):
    """A pool of which nobody may take a thread."""

    def submit(self, *some: Any, **more: Any) -> NoReturn:
        raise AssertionError(f"a thread is asked for: {some}")


def test_a_call_needs_no_thread(tmp_path: Path) -> None:
    async def story() -> None:
        async with cluster_at(made, tmp_path) as cluster:
            with NoThreads() as none:
                asyncio.get_running_loop().set_default_executor(none)
                assert await cluster.create(POD) == POD

    asyncio.run(story())


def test_calls_go_through_the_proxy_that_the_environment_names_but_for_whom_it_excepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def proxy(request: web.Request) -> web.StreamResponse:
        asked.append(str(request.url))
        return await made(request)

    async def story() -> None:
        async with serving(proxy) as address, cluster_at(made, tmp_path) as direct:
            monkeypatch.setenv("http_proxy", address)
            access = Access(kubeconfig=kubeconfig_for("http://api.nowhere.example", tmp_path))
            cluster = await KubernetesCluster.connect(access, coordinator_image="x")
            try:
                assert await cluster.create(POD) == POD
                assert asked == ["http://api.nowhere.example/api/v1/namespaces/n/pods"]
                assert await direct.create(POD) == POD  # which had looked before
            finally:
                await cluster.close()
            for exceptions in ("127.0.0.1", "example.com, 127.0.0.0/8", "nonsense/99,::1/128,127.0.0.1/31"):
                monkeypatch.setenv("no_proxy", exceptions)
                async with cluster_at(made, tmp_path) as excepted:
                    assert await excepted.create(POD) == POD
        assert len(asked) == 1

    asyncio.run(story())
