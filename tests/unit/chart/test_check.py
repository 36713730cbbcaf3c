"""What ``helm test`` runs says in one sentence what is wrong, asked of a server with a certificate as in a cluster."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.local.certificates import Authority

CHECK = Path(__file__).parents[3] / "charts" / "fthsdp-operator" / "files" / "check.py"
SERVED = {"/apis/fthsdp.dev/v1alpha1": {"resources": [{"name": "fthsdpjobs"}, {"name": "fthsdpjobs/status"}]}}


@contextmanager
def serving(answers: dict[str, object], *, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve JSON on loopback; asked without the right token, or for anything else, it refuses."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = tls is None or self.headers["Authorization"] == "Bearer word"
            answer = answers.get(self.path)
            self.send_response(401 if not known else 404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def api_server(folder: Path, authority: Authority, answers: dict[str, object]) -> Iterator[dict[str, str]]:
    """Serve as an API server; gives the environment of a pod that talks to it."""
    (folder / "token").write_text("word\n")
    files = authority.issue(folder / "server", address="127.0.0.1")
    (folder / "ca.crt").write_bytes((files / "ca.crt").read_bytes())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files / "tls.crt", files / "tls.key")
    with serving(answers, tls=tls) as port:
        yield {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(port),
            "FTHSDP_ACCOUNT": str(folder),
        }


def check(environment: dict[str, str], *urls: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHECK.read_text(), *urls]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def test_a_served_definition_and_a_healthy_operator_pass(tmp_path: Path, authority: Authority) -> None:
    with api_server(tmp_path, authority, dict(SERVED)) as environment, serving({"/healthz": {}}) as port:
        done = check(environment, f"http://127.0.0.1:{port}/healthz")
    assert done.returncode == 0, done.stderr
    assert "/healthz answers" in done.stdout


@pytest.mark.parametrize("answers", [{}, {"/apis/fthsdp.dev/v1alpha1": {"resources": []}}])
def test_a_missing_definition_is_named(tmp_path: Path, authority: Authority, answers: dict[str, object]) -> None:
    with api_server(tmp_path, authority, answers) as environment:
        done = check(environment)
    assert done.returncode == 1
    assert done.stderr == "the API server does not serve fthsdpjobs: install the chart with crds.install=true\n"


def test_an_operator_that_is_not_healthy_is_named(tmp_path: Path, authority: Authority) -> None:
    with api_server(tmp_path, authority, dict(SERVED)) as environment, serving({}) as port:
        url = f"http://127.0.0.1:{port}/healthz"
        done = check(environment, url)
    assert done.returncode == 1
    assert done.stderr == f"{url}: HTTP Error 404: Not Found; see the operator's log\n"
