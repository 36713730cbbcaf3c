"""Who a process is, and how it says what is wrong with what it was told."""

from __future__ import annotations

from pathlib import Path

import pytest

import fthsdp
from fthsdp.environment import Identity, read_job_key
from fthsdp.errors import ConfigError

POD = {"FTHSDP_JOB": "job", "FTHSDP_REPLICA": "2", "FTHSDP_COORDINATOR": "coordinator:29400"}


def test_without_torchrun_each_pod_is_one_rank() -> None:
    env = POD | {
        "FTHSDP_ATTEMPT": "3",
        "FTHSDP_POD_INDEX": "1",
        "FTHSDP_PODS_PER_REPLICA": "2",
        "FTHSDP_POD_IP": "10.0.0.7",
    }
    assert Identity.from_environment(env) == Identity(
        job="job", replica=2, attempt=3, rank=1, world_size=2, coordinator="coordinator:29400", host="10.0.0.7"
    )


def test_torchrun_numbers_the_ranks_of_all_pods() -> None:
    env = POD | {"FTHSDP_PODS_PER_REPLICA": "2", "FTHSDP_PROCESSES_PER_POD": "4", "FTHSDP_POD_INDEX": "1"}
    identity = Identity.from_environment(env | {"RANK": "6", "WORLD_SIZE": "8"})
    assert (identity.rank, identity.world_size, identity.host) == (6, 8, "127.0.0.1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FTHSDP_JOB": ""}, "FTHSDP_JOB is not set"),
        ({"FTHSDP_COORDINATOR": ""}, "FTHSDP_COORDINATOR is not set"),
        ({"FTHSDP_REPLICA": "two"}, "FTHSDP_REPLICA='two' is not a whole number of at least 0"),
        ({"FTHSDP_ATTEMPT": "-1"}, "FTHSDP_ATTEMPT='-1' is not a whole number of at least 0"),
        ({"FTHSDP_PODS_PER_REPLICA": "0"}, "FTHSDP_PODS_PER_REPLICA='0' is not a whole number of at least 1"),
        ({"FTHSDP_PROCESSES_PER_POD": "2"}, "1 ranks but 1 pods of 2 processes"),
        ({"RANK": "1"}, "rank 1 is outside 0…0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Identity.from_environment(POD | changes)


def test_a_script_started_by_hand_is_told_how_to_start_it() -> None:
    with pytest.raises(
        ConfigError, match=r"is not set: start this script with 'fthsdp run' or as part of an FTHSDPJob"
    ):
        Identity.from_environment({})


def test_the_job_key_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32 + b"\n")
    assert read_job_key({"FTHSDP_JOB_KEY_FILE": str(tmp_path / "key")}) == b"k" * 32


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), (b"short\n", "holds 5 bytes")])
def test_a_job_key_that_is_none_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_job_key({"FTHSDP_JOB_KEY_FILE": str(tmp_path / "key")})


def test_a_coordinator_that_is_no_address_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (POD | {"FTHSDP_COORDINATOR": "somewhere"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended, fthsdp.replica_group():
        pass
    assert ended.value.code == 2
    assert capsys.readouterr().err == "fthsdp: FTHSDP_COORDINATOR: 'somewhere' is not host:port\n"
