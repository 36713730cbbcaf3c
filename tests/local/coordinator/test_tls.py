"""The coordinator under TLS: leaders and operator as without it, and nobody who does not belong is in their way."""

from __future__ import annotations

import asyncio
import base64
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.local.certificates import Authority

from fthsdp.coordinator.client import OperatorClient
from fthsdp.coordinator.messages import Welcome
from fthsdp.errors import Refused, Untrusted
from fthsdp.tls import Tls
from fthsdp.wire import open_blocking
from fthsdp_operator.api import API_VERSION, KIND, parse_job
from fthsdp_operator.kube.coordinators import Coordinators

pytestmark = pytest.mark.local
Make = Callable[..., Any]
KEY = b"k" * 32


@pytest.fixture
def certificates(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "tls")


@pytest.fixture
def tls(certificates: Path) -> Tls:
    return Tls(certificates)


@pytest.fixture
def process(coordinator: Make, certificates: Path) -> Any:
    return coordinator(replicas=2, certificates=certificates)


def ask(address: str, tls: Tls | None) -> Any:
    """Ask for the status, as an operator does."""

    async def question() -> Any:
        client = OperatorClient(address, KEY, job="job", timeout=10, tls=tls)
        try:
            return await client.status()
        finally:
            await client.close()

    return asyncio.run(question())


def test_leaders_and_operator_are_served_under_tls(process: Any, leaders: list[Any], tls: Tls) -> None:
    for one in leaders:
        one.steps(*range(1, 400), replicas=2)
    status = ask(process.address, tls)
    assert [(r.replica, r.attempt) for r in status.replicas] == [(0, 0), (1, 0)]
    process.ends_undisturbed(leaders)
    assert {(line["step"]) for line in process.lines} == set(range(1, 400))


def test_a_replica_whose_certificate_is_not_accepted_is_refused_for_good(
    process: Any, leaders: list[Any], leader: Make, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    folder = stranger.issue(tmp_path / "other")
    assert "its certificate is not accepted here" in leader(process.address, 1, 1, tls=Tls(folder)).refusal()
    (folder / "ca.crt").write_bytes(authority.certificate.read_bytes())
    assert "does not accept our certificate" in leader(process.address, 1, 1, tls=Tls(folder)).refusal()
    old = Tls(authority.issue(tmp_path / "old", days=-1))
    assert re.search("does not accept our .*expired", leader(process.address, 1, 1, tls=old).refusal())
    with pytest.raises(Untrusted, match=r"does not accept our certificate: .*expired"):
        ask(process.address, old)
    process.wait_for_log("who dialled: its certificate is not accepted here: certificate has expired")
    process.ends_undisturbed(leaders)


def test_tls_on_one_side_only_is_refused_in_words_that_say_so(
    process: Any, leaders: list[Any], leader: Make, coordinator: Make, tls: Tls, tmp_path: Path
) -> None:
    without = "TLS is on here, and the hello came without it: set FTHSDP_TLS_DIR in all processes of the job or in none"
    assert leader(process.address, 1, 1).refusal() == without
    with pytest.raises(Refused, match=without):
        ask(process.address, None)
    plain = coordinator(replicas=2, folder=tmp_path / "plain")
    answer = "TLS is on here, and not on the other side"
    assert f"{plain.address}: {answer}" in leader(plain.address, 1, 1, tls=tls).refusal()
    with pytest.raises(Refused, match=f"{plain.address}: {answer}"):
        ask(plain.address, tls)
    assert plain.wait_for_log("TLS is off here, and the hello came with it")
    process.ends_undisturbed(leaders)


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05nonse", b"\xff" * 1000])
def test_garbage_in_place_of_a_tls_hello_is_dropped(process: Any, leaders: list[Any], hello: bytes) -> None:
    with socket.create_connection(("127.0.0.1", process.port), timeout=30) as sock:
        sock.sendall(hello)
        try:
            while sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
    process.ends_undisturbed(leaders)


def test_half_open_connections_keep_nobody_out(process: Any, leaders: list[Any], leader: Make, tls: Tls) -> None:
    strangers = [socket.create_connection(("127.0.0.1", process.port), timeout=30) for _ in range(300)]
    for sock in strangers[:100]:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01")
    assert strangers[-1].recv(1) == b"", "more than the allowed number of strangers are closed at once"
    for sock in strangers:
        sock.close()
    assert "does not exist" in leader(process.address, 7, tls=tls).refusal()
    process.ends_undisturbed(leaders)


def test_a_leader_whose_certificate_ran_out_comes_back_with_the_renewed_one(
    process: Any, leaders: list[Any], coordinator: Make, authority: Authority, certificates: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    heard = [len(one.heard) for one in leaders]
    process.kill()
    authority.issue(certificates, days=-1)
    again = coordinator(replicas=2, port=process.port, certificates=certificates)
    again.wait_for_log("does not accept our certificate.*expired")
    authority.issue(certificates)
    for one, before in zip(leaders, heard, strict=True):
        one.wait_for(Welcome, after=before)
    assert "connection to the coordinator, trying again: 127.0.0.1" in caplog.text
    again.ends_undisturbed(leaders)


@pytest.mark.parametrize("lacking", [None, "ca.crt"])
def test_the_operator_uses_the_secret_that_the_job_names(
    process: Any, leaders: list[Any], certificates: Path, lacking: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    files = {file.name: base64.b64encode(file.read_bytes()).decode() for file in certificates.iterdir()}
    objects = {
        ("Secret", "job-key"): {"data": {"key": base64.b64encode(KEY).decode()}},
        ("Secret", "certs"): {"data": {name: text for name, text in files.items() if name != lacking}},
    }
    template = {"spec": {"containers": [{"name": "train", "image": "x"}]}}
    spec = {"replicas": 2, "tls": {"secretName": "certs"}, "template": template}
    job = parse_job({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "job"}, "spec": spec})

    async def read(kind: str, namespace: str, name: str) -> Any:
        return objects.get((kind, name))

    async def question() -> Any:
        coordinators = Coordinators(read, port=process.port)
        try:
            return await coordinators.status(job, "127.0.0.1")
        finally:
            await coordinators.close()

    status = asyncio.run(question())
    if lacking is None:
        assert [(r.replica, r.attempt) for r in status.replicas] == [(0, 0), (1, 0)]
    else:
        assert status is None
        assert "default/job: the Secret certs has no 'ca.crt'" in caplog.text
    process.ends_undisturbed(leaders)


def test_the_key_is_asked_for_under_tls_too(process: Any, leaders: list[Any], tls: Tls) -> None:
    with pytest.raises(Refused, match="does not hold this job's key"):
        open_blocking(process.address, b"x" * 32, job="job", purpose="operator", timeout=30, tls=tls)
    process.ends_undisturbed(leaders)
