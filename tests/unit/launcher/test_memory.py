"""Where the kernel counts those that it has killed for memory, as containers and machines have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fthsdp.launcher.memory import oom_kills

EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
V1 = "9:name=systemd:/\n4:cpu,memory:/pods/a\n0::/\n"


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/\n", "memory.events", EVENTS),
        ("0::/pods/a\n", "pods/a/memory.events", EVENTS),
        ("0::/pods/a\n", "memory.events", EVENTS),
        (V1, "memory/pods/a/memory.oom_control", CONTROL),
        (V1, "memory/memory.oom_control", CONTROL),
    ],
    ids=["v2", "v2 of the machine", "v2, of which only its own shows", "v1 of the machine", "v1"],
)
def test_the_counter_of_this_container_is_found(tmp_path: Path, own: str, file: str, text: str) -> None:
    (tmp_path / "own").write_text(own)
    place = tmp_path / "cgroups" / file
    place.parent.mkdir(parents=True)
    place.write_text(text)
    assert oom_kills(cgroups=tmp_path / "cgroups", own=tmp_path / "own") == 2


@pytest.mark.parametrize("text", ["", "oom_kill_disable 0\nunder_oom 0\n", "oom_kill\n", "oom_kill many\n"])
def test_where_nobody_counts_there_are_none(tmp_path: Path, text: str) -> None:
    assert oom_kills(cgroups=tmp_path, own=tmp_path / "own") == 0
    (tmp_path / "own").write_text("0::/\n")
    assert oom_kills(cgroups=tmp_path, own=tmp_path / "own") == 0
    (tmp_path / "memory.events").write_text(text)
    assert oom_kills(cgroups=tmp_path, own=tmp_path / "own") == 0
