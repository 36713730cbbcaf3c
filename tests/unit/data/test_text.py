import sysconfig
from pathlib import Path

import pytest
import torch

from fthsdp.data.lanes import POSITIONS
from fthsdp.data.text import TextDataset, standard_library, streamed
from fthsdp.errors import ConfigError


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_windows_share_one_byte_with_the_next(tmp_path):
    data = TextDataset([write(tmp_path, "a", b"abcdefghi")], length=4)
    assert [bytes(data[i].tolist()) for i in range(len(data))] == [b"abcde", b"efghi"]
    assert data[0].dtype == torch.int64


def test_files_are_joined_in_the_order_given_by_a_zero_byte(tmp_path):
    first, second = write(tmp_path, "b", b"xy"), write(tmp_path, "a", b"zw")
    assert bytes(TextDataset([first, second], length=4)[0].tolist()) == b"xy\0zw"


def test_the_default_is_the_source_of_the_standard_library_in_a_fixed_order():
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root).as_posix() for path in standard_library()]
    assert names == sorted(names)
    assert {"dataclasses.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name for name in names)
    assert len(TextDataset(length=128)) > 10_000


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_is_an_index_error(tmp_path, index):
    with pytest.raises(IndexError, match="of 2"):
        TextDataset([write(tmp_path, "a", b"abcdefghi")], length=4)[index]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.txt: No such file"):
        TextDataset([tmp_path / "nowhere.txt"], length=4)


def test_an_empty_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"void\.txt is empty"):
        TextDataset([write(tmp_path, "full.txt", b"0123456789"), write(tmp_path, "void.txt", b"")], length=4)


def test_a_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is a folder: name the text files in it"):
        TextDataset([tmp_path], length=4)


def test_text_shorter_than_a_window_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has 4 bytes, which is less than one window of 5"):
        TextDataset([write(tmp_path, "a", b"abcd")], length=4)


def test_no_files_at_all_are_too_little_text():
    with pytest.raises(ConfigError, match="has 0 bytes"):
        TextDataset([], length=4)


def test_lanes_share_the_windows_and_begin_again(tmp_path):
    text = TextDataset([write(tmp_path, "a", b"abcdefg")], length=1)
    stream = streamed(text, 4)
    read = [[bytes(stream[lane * POSITIONS + n].tolist()) for n in range(3)] for lane in range(4)]
    assert read == [[b"ab", b"ef", b"ab"], [b"bc", b"fg", b"bc"], [b"cd", b"cd", b"cd"], [b"de", b"de", b"de"]]


def test_more_lanes_than_windows_are_refused(tmp_path):
    text = TextDataset([write(tmp_path, "a", b"abcdefg")], length=1)
    with pytest.raises(ConfigError, match="7 lanes cannot share the 6 windows of the text"):
        streamed(text, 7)
