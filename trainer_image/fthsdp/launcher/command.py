"""Which commands an interpreter can run that has started before, and how they are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

__all__ = ["Program", "program_of"]

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[uOEsSIBbqvxP]+")
_WITH_VALUE = re.compile(r"-[XW]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python program."""

    interpreter: tuple[str, ...]
    """With its options."""
    kind: Literal["script", "module"]
    name: str
    """Path of the script, or name of the module."""
    arguments: tuple[str, ...]


def program_of(command: Sequence[str]) -> Program | None:
    """Read ``python [options] script.py …`` or ``python [options] -m module …``; None for everything else."""
    if not command or not _PYTHON.fullmatch(PurePath(command[0]).name):
        return None
    at = 1
    while at < len(command):
        word = command[at]
        if _FLAGS.fullmatch(word):
            at += 1
        elif _WITH_VALUE.match(word):
            at += 1 if len(word) > 2 else 2
        else:
            return _program(command, at)
    return None


def _program(command: Sequence[str], at: int) -> Program | None:
    interpreter, words = tuple(command[:at]), tuple(command[at:])
    if words[0] == "-m" and len(words) > 1:
        return Program(interpreter=interpreter, kind="module", name=words[1], arguments=words[2:])
    if words[0].endswith(".py"):
        return Program(interpreter=interpreter, kind="script", name=words[0], arguments=words[1:])
    return None
