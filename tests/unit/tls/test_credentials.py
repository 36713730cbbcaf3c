"""What the folder of certificates has to hold, and that a renewed one is taken up."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.local.certificates import Authority

from fthsdp.errors import ConfigError
from fthsdp.tls import Credentials, Tls


def test_without_the_variable_there_is_no_tls() -> None:
    assert Tls.from_environment({}) is None
    assert Tls.from_environment({"FTHSDP_TLS_DIR": ""}) is None


def spoil(name: str, content: bytes | None) -> Callable[[Path, Authority], None]:
    def change(folder: Path, authority: Authority) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return change


def take_the_key_of_another(folder: Path, authority: Authority) -> None:
    other = authority.issue(folder.parent / "other")
    (folder / "tls.key").write_bytes((other / "tls.key").read_bytes())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil("tls.crt", None), "tls.crt: No such file or directory"),
        (spoil("tls.key", None), "tls.key: No such file or directory"),
        (spoil("ca.crt", None), "ca.crt: No such file or directory"),
        (spoil("tls.crt", b"nonsense"), "tls.crt holds no certificate that can be read"),
        (
            spoil("tls.crt", b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----"),
            "tls.crt holds no certificate that can be read",
        ),
        (spoil("tls.key", b"nonsense"), "tls.key holds no private key that can be read without a password"),
        (spoil("ca.crt", b""), "ca.crt holds no certificate"),
        (spoil("ca.crt", b"\xff\xfe nonsense"), "ca.crt holds no certificate"),
        (take_the_key_of_another, "tls.key is not the key of tls.crt"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_that_names_the_folder(
    authority: Authority, tmp_path: Path, change: Callable[[Path, Authority], None], words: str
) -> None:
    folder = authority.issue(tmp_path / "mine")
    change(folder, authority)
    with pytest.raises(ConfigError) as error:
        Tls.from_environment({"FTHSDP_TLS_DIR": str(folder)})
    assert str(error.value).startswith(f"FTHSDP_TLS_DIR={folder}: ")
    assert str(error.value).endswith(words)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(authority: Authority, tmp_path: Path) -> None:
    folder = authority.issue(tmp_path / "mine")
    authority.lock_key(folder)
    with pytest.raises(ConfigError, match=r"tls\.key holds no private key that can be read without a password"):
        Tls(folder)


def test_a_renewed_certificate_is_taken_up_and_one_that_did_not_change_is_not_read_into_a_new_context(
    authority: Authority, tmp_path: Path
) -> None:
    tls = Tls(authority.issue(tmp_path / "mine"))
    first = tls.certificates()
    assert tls.certificates() is first
    authority.issue(tmp_path / "mine")
    second = tls.certificates()
    assert second.own != first.own
    assert tls.certificates() is second


def test_a_key_does_not_show_where_its_credentials_are_printed(authority: Authority, tmp_path: Path) -> None:
    credentials = Credentials.read(authority.issue(tmp_path / "mine"))
    assert credentials.key not in repr(credentials).encode()
    assert "PRIVATE KEY" not in repr(credentials)
    assert Tls(credentials).certificates().credentials == credentials


def test_files_that_do_not_fit_together_for_a_moment_leave_the_last_good_ones_in_use(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(authority.issue(tmp_path / "mine"))
    first = tls.certificates()
    take_the_key_of_another(tmp_path / "mine", authority)
    with caplog.at_level(logging.WARNING):
        assert tls.certificates() is first
    assert "tls.key is not the key of tls.crt" in caplog.text


def test_a_renewed_certificate_waits_until_there_are_files_to_be_opened_again(
    authority: Authority, tmp_path: Path
) -> None:
    tls = Tls(authority.issue(tmp_path / "mine"))
    before = tls.certificates()
    authority.issue(tmp_path / "mine")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))  # one: OpenSSL needs another beside ours
    try:
        during = tls.certificates()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert during is before
    assert tls.certificates() is not before
