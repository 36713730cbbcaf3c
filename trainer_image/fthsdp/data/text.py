"""Text as a dataset of bytes, or as a stream of them: no tokenizer, no download.

Unless files are named, the text is the Python standard library's own source, which every machine that runs this has.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fthsdp.data.stream import StreamDataset
from fthsdp.errors import ConfigError

__all__ = ["TextDataset", "standard_library", "streamed"]

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
"""Folders of the standard library's place that hold other people's code, or that many distributions leave out."""


def standard_library() -> list[Path]:
    """Return the .py files of the Python standard library, ordered by their path inside it."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return [path for name, path in sorted(found.items()) if not _LEFT_OUT & set(name.split("/"))]


def _read_standard_library() -> list[bytes]:
    contents = [path.read_bytes() for path in standard_library()]
    if not any(contents):
        raise ConfigError("this Python has no source of its standard library: name text files")
    return contents


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name the text files in it")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not text:
        raise ConfigError(f"{path} is empty: name files with text")
    return text


class TextDataset(Dataset[Tensor]):
    """Windows of ``length + 1`` bytes, as int64 tensors; each begins with the last byte of the one before.

    ``paths`` are text files, read in the order given and joined by a zero byte; None is the standard library. All of
    it is held in memory, one byte a token. Raises ConfigError for a path that cannot be read or is empty, and when the
    text is shorter than one window.
    """

    def __init__(self, paths: Sequence[Path] | None = None, *, length: int) -> None:
        if length < 1:
            raise ConfigError(f"length={length}: a window has at least 1 byte")
        text = b"\0".join(_read_standard_library() if paths is None else map(_read, paths))
        if len(text) <= length:
            raise ConfigError(f"the text has {len(text)} bytes, which is less than one window of {length + 1}")
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return (self._text.numel() - 1) // self._length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self._text[index * self._length : (index + 1) * self._length + 1].long()


def streamed(text: TextDataset, lanes: int) -> StreamDataset:
    """Return the windows as a stream: lane k reads every ``lanes``-th from the k-th on, again and again.

    Raises ConfigError when there are fewer windows than lanes.
    """
    if lanes > len(text):
        raise ConfigError(f"{lanes} lanes cannot share the {len(text)} windows of the text")

    def windows(lane: int, position: int) -> Iterator[Tensor]:
        own = range(lane, len(text), lanes)
        return (text[own[number % len(own)]] for number in itertools.count(position))

    return StreamDataset(lanes=lanes, open=windows)
