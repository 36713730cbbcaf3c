"""What a launcher is told: its command line, its environment, and the file with the attempt that is to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fthsdp.errors import ConfigError
from fthsdp.launcher.__main__ import settings_from
from fthsdp.launcher.attempts import read_attempt

ENV = {"FTHSDP_ATTEMPT_FILE": "/attempt"}


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ([], ENV, "the command is missing"),
        (["--"], ENV, "the command is missing"),
        (["true"], ENV, "the command is missing"),
        (["--", "true"], {}, "FTHSDP_ATTEMPT_FILE is not set"),
        (["--", "true"], {"FTHSDP_ATTEMPT_FILE": ""}, "FTHSDP_ATTEMPT_FILE is not set"),
        (["--", "true"], ENV | {"FTHSDP_ATTEMPT": "x"}, "FTHSDP_ATTEMPT='x' is not a whole number of at least 0"),
    ],
)
def test_bad_input_is_named(arguments: list[str], env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_from(arguments, env)


def test_modules_are_separated_by_commas() -> None:
    settings = settings_from(["--", "true", "-x"], ENV | {"FTHSDP_ATTEMPT": "3", "FTHSDP_PRELOAD": "torch, a.b,"})
    assert (settings.command, settings.born, settings.preload) == (("true", "-x"), 3, ("torch", "a.b"))


@pytest.mark.parametrize("text", ["", "x", "-1", "1" * 10, "1 2", "\0", "²"])
def test_a_file_without_a_number_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "attempt").write_text(text)
    assert read_attempt(tmp_path / "attempt") is None


def test_a_file_says_a_number_or_is_not_there(tmp_path: Path) -> None:
    assert read_attempt(tmp_path / "attempt") is None
    (tmp_path / "attempt").write_text("12\n")
    assert read_attempt(tmp_path / "attempt") == 12
