"""The command line: good help, and one sentence for what is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.local.coordinator.conftest import Process

pytestmark = pytest.mark.local


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KUBE")} | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "100", "HOME": "/nonexistent", **more,
    }  # fmt: skip
    command = [sys.executable, "-m", "fthsdp.coordinator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def test_help_says_what_it_is_what_it_needs_and_what_its_exit_codes_mean() -> None:
    result = run("--help")
    assert result.returncode == 0
    for text in (
        "--job NAME",
        "--replicas R",
        "--min-replicas M",
        "file:PATH or configmap:NAMESPACE/NAME",
        "Exit codes",
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--replicas": "three"}, "argument --replicas: invalid int value: 'three'"),
        ({"--replicas": "0"}, "replicas is 0: a job has at least 1"),
        ({"--min-replicas": "4"}, "min-replicas is 4: it must be between 1 and replicas (3)"),
        ({"--key-file": "/nonexistent/key"}, "--key-file /nonexistent/key: No such file or directory"),
        ({"--store": "redis:x"}, "store 'redis:x' is neither file:PATH nor configmap:NAMESPACE/NAME"),
        ({"--store": "configmap:x"}, "store 'configmap:x' is neither file:PATH nor configmap:NAMESPACE/NAME"),
        ({"--store": "configmap:a/b"}, "store configmap:a/b: no access to a cluster"),
        ({"--store": "file:/nonexistent/epoch"}, "the folder /nonexistent does not exist"),
        ({"--record-dir": "/nonexistent"}, "record-dir /nonexistent is not a folder: create it first"),
        ({"--port": "70000"}, "port is 70000: it must be between 0 and 65535"),
        ({"--silence-timeout": "0"}, "silence-timeout is 0 s: it must be at least 2 x a leader's heartbeat"),
        ({"--host": "256.1.1.1"}, "cannot listen on 256.1.1.1"),
        ({"--bogus": "x"}, "unrecognized arguments: --bogus x"),
        ({"--job": None}, "the following arguments are required: --job"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, changes: dict[str, str | None], message: str) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    arguments: dict[str, str | None] = {
        "--job": "job", "--replicas": "3", "--min-replicas": "1", "--port": "0",
        "--key-file": str(tmp_path / "key"), "--store": f"file:{tmp_path / 'epoch'}",
    }  # fmt: skip
    arguments |= changes
    result = run(*(part for name, value in arguments.items() if value is not None for part in (name, value)))
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_folder_of_certificates_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    result = run(
        "--job", "job", "--replicas", "1", "--min-replicas", "1", "--port", "0",
        "--key-file", str(tmp_path / "key"), "--store", f"file:{tmp_path / 'epoch'}", FTHSDP_TLS_DIR=str(tmp_path),
    )  # fmt: skip
    assert result.returncode == 2
    assert f"FTHSDP_TLS_DIR={tmp_path}: {tmp_path}/tls.crt: No such file or directory\n" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(
            "--job", "job", "--replicas", "1", "--min-replicas", "1", "--host", "127.0.0.1", "--port", str(port),
            "--key-file", str(tmp_path / "key"), "--store", f"file:{tmp_path / 'epoch'}",
        )  # fmt: skip
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


def test_leaders_reach_it_by_ipv4_and_by_ipv6(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = Process(tmp_path, "--host", "", port=port)
    try:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()
    finally:
        process.stop()
