"""The command line answers every mistake with one sentence and exit code 2."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fthsdp_operator import cli


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No kubeconfig of whoever runs the tests, no service account."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cli, "IN_CLUSTER", tmp_path / "token")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["operator", "--nonsense"], ["operator", "--log-level=loud"]])
def test_what_is_no_command_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(arguments)
    assert refused.value.code == 2
    assert "usage: fthsdp" in capsys.readouterr().err


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"    {command} " in said for command in ("run", "report", "plan", "operator", "version"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("fthsdp ")


def test_output_that_nobody_reads_to_its_end_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert cli.main(["version"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["operator"], ["report", "tiny-llama", "--out", "runs/nowhere"]])
@pytest.mark.parametrize("option", [[], ["--kubeconfig", "nowhere.yaml"]])
def test_without_a_kubeconfig_a_command_says_how_to_name_one(
    command: list[str], option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command + option) == 2
    said = capsys.readouterr().err
    assert said.startswith("fthsdp: there is no kubeconfig at ")
    assert said.endswith(": name one with --kubeconfig FILE\n")


@pytest.mark.parametrize("text", ["", "apiVersion: v1", "[1, 2]", "{{", "\0"])
def test_a_kubeconfig_of_nonsense_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config").write_text(text)
    assert cli.main(["operator", "--kubeconfig", str(tmp_path / "config")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fthsdp: kubeconfig ")
    assert said.count("\n") == 1


def test_an_api_server_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config").write_text("""
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
""")
    assert cli.main(["operator", "--kubeconfig", str(tmp_path / "config")]) == 2
    said = capsys.readouterr().err
    assert "the API server does not answer" in said
    assert "127.0.0.1:1" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--leader-elect"],
            "--leader-elect outside of a cluster: say where the Lease is, with --lease-namespace N",
        ),
        (["--lease-namespace", "n"], "--lease-namespace says something about a Lease: add --leader-elect"),
        (["--lease-name", "n"], "--lease-name says something about a Lease: add --leader-elect"),
    ],
)
def test_half_a_leader_election_is_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config").touch()
    assert cli.main(["operator", "--kubeconfig", str(tmp_path / "config"), *options]) == 2
    assert capsys.readouterr().err == f"fthsdp: {words}\n"


@pytest.mark.parametrize(("package", "extra"), [("kopf", "operator"), ("torch", "trainer")])
def test_a_missing_package_is_named_with_how_to_install_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(chosen: object) -> int:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(cli, "_print_version", missing)
    assert cli.main(["version"]) == 2
    assert capsys.readouterr().err == (
        f"fthsdp: this needs the Python package {package}: install it with 'pip install \"fthsdp[{extra}]\"'\n"
    )
