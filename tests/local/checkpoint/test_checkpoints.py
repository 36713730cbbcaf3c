"""Checkpoints of real replicas: bit-identical wherever they are read, and whole whatever happens to their writer."""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.local.checkpoint import tasks
from tests.local.checkpoint.replica import DEADLINE, Replica, run

from fthsdp.checkpoint.folder import survey, verify

pytestmark = pytest.mark.local


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]]]:
    """A checkpoint that a replica of 2 ranks wrote after step 3, and its state then and two steps later."""
    root = tmp_path_factory.mktemp("written") / "checkpoints"
    said = run(tasks.write, root)
    assert said[0]["stored"] == said[1]["stored"]
    return root, said[0]


@pytest.fixture(scope="module")
def read(written) -> Callable[..., list[dict[str, object]]]:
    """What the ranks of a replica that loads it say; each replica loads it once."""
    root, _ = written
    return functools.cache(lambda ranks, sharded: run(tasks.read, root, sharded, ranks=ranks))


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (1, True), (2, True), (4, True)])
def test_a_checkpoint_of_two_ranks_is_the_same_bit_by_bit_in_any_number(
    written, read, ranks: int, sharded: bool
) -> None:
    _, said = written
    for rank in read(ranks, sharded):
        assert rank["stored"] == said["stored"]
        assert (rank["step"], rank["sampler"], rank["user"]) == (3, {"next": 30}, 0.5)


def test_a_loaded_replica_trains_on_bit_by_bit(written, read) -> None:
    _, said = written
    for rank in read(2, True):
        assert rank["later"] == said["later"]
        assert rank["later"] != rank["stored"]


def test_what_four_ranks_loaded_from_two_one_loads_from_four(written, tmp_path: Path) -> None:
    root, said = written
    shutil.copytree(root, tmp_path / "copy")
    run(tasks.read, tmp_path / "copy", True, True, ranks=4)
    (rank,) = run(tasks.read, tmp_path / "copy", False, ranks=1)
    assert rank["step"] == 4
    assert rank["stored"] == said["stored"]


def test_what_one_rank_stored_unsharded_two_ranks_load(written, tmp_path: Path) -> None:
    root, said = written
    shutil.copytree(root, tmp_path / "copy")
    run(tasks.read, tmp_path / "copy", False, True, ranks=1)
    for rank in run(tasks.read, tmp_path / "copy"):
        assert rank["step"] == 4
        assert (rank["stored"], rank["later"]) == (said["stored"], said["later"])


def test_what_several_ranks_hold_is_stored_once_and_read_as_a_whole(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    wrote = run(tasks.write_grid, root, ranks=4)
    assert run(tasks.read_grid, root, ranks=1) == [wrote[0]]
    parts = [json.loads((root / "step-00000001" / f"rank-{rank:05d}.json").read_text()) for rank in range(4)]
    keys = [{one["entry"]["path"][-1] for one in part["written"]} & {"cut", "part", "all"} for part in parts]
    assert keys == [{"cut", "part", "all"}, {"cut"}, {"cut", "part"}, {"cut"}]


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_alone_loads_model_and_optimizer(written, ranks: int) -> None:
    root, said = written
    ours = said["stored"].keys() - {"scheduler", "user", "updates"}
    for state in run(tasks.read_plainly, root / "step-00000003", ranks=ranks):
        assert {name: state[name] for name in ours} == {name: said["stored"][name] for name in ours}


def test_all_ranks_of_all_replicas_get_the_same_digest(read) -> None:
    assert len({rank["digest"] for rank in read(2, True) + read(4, True)}) == 1


def test_nothing_is_unpickled_to_write_or_to_read(tmp_path: Path) -> None:
    assert run(tasks.unpickle_nothing, tmp_path / "checkpoints") == [[], []]


def test_what_each_rank_has_of_its_own_is_given_back_to_it(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    wrote = run(tasks.write, root, "own")
    read = run(tasks.read, root)
    assert [rank["stored"] for rank in read] == [rank["stored"] for rank in wrote]
    assert [rank["user"] for rank in read] == [0.5, 1.5]


# --- what is refused


def refusals(root: Path, options: dict[str, object] | None = None, *, ranks: int = 2) -> str:
    """Return the sentence with which all ranks refuse, and their state stays as it was."""
    said = run(tasks.refuse, root, options or {}, ranks=ranks)
    assert all(rank == said[0] and rank["unchanged"] for rank in said), said
    return str(said[0]["error"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 8}, "is of another model: 0.weight is float32[7, 7] there and float32[8, 8] here"),
        ({"sgd": True}, "has another optimizer, or other groups of parameters, than this script"),
        ({}, "has other user state than this script"),
    ],
)
def test_the_checkpoint_of_another_script_is_refused(written, options: dict[str, object], words: str) -> None:
    error = refusals(written[0], options)
    assert words in error
    assert "rank 0:" not in error


def test_a_state_that_differs_between_ranks_is_not_loaded_into_another_number(tmp_path: Path) -> None:
    run(tasks.write, tmp_path / "checkpoints", "own")
    words = "differs between its 2 ranks, so it cannot be loaded into a replica of 4: start as many ranks as wrote it"
    assert words in refusals(tmp_path / "checkpoints", ranks=4)


def test_a_folder_that_cannot_be_read_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    assert "cannot be read: Not a directory" in refusals(tmp_path / "checkpoints")


def test_an_empty_folder_and_none_at_all_begin_a_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run(tasks.read_nothing, tmp_path / "empty") == [None, None]
    assert run(tasks.read_nothing, tmp_path / "none") == [None, None]


# --- damage


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__1_0.distcp", "rank-00000.json"])
def test_a_flipped_bit_makes_the_one_before_count_and_with_none_before_is_an_error(name: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run(tasks.write_several, root, [3, 4])
    flip_a_bit(root / "step-00000004" / name)
    assert [rank["step"] for rank in run(tasks.read, root)] == [3, 3]
    flip_a_bit(root / "step-00000003" / name)
    error = refusals(root)
    assert error.count(f"{name} was changed or damaged") == 2
    assert "name an empty folder to begin anew" in error


@pytest.mark.parametrize("at", ["verify", "read_shard"])
def test_a_checkpoint_that_is_deleted_under_its_reader_is_no_damage(at: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run(tasks.write_several, root, [1, 2])
    assert run(tasks.read_what_vanishes, root, at) == [1, 1]
    shutil.rmtree(root / "step-00000001")
    run(tasks.write_several, root, [2])
    assert run(tasks.read_what_vanishes, root, at) == [None, None]


# --- when a checkpoint counts


def test_the_state_may_change_as_soon_as_it_is_copied(tmp_path: Path) -> None:
    for rank in run(tasks.change_at_once, tmp_path / "checkpoints"):
        assert rank["stored"] == rank["read"]


def test_a_step_that_does_not_become_final_leaves_nothing(tmp_path: Path) -> None:
    first, _ = run(tasks.never_final, tmp_path / "checkpoints")
    warnings = [line for line in first["log"] if line.startswith("WARNING")]
    assert warnings == [f"WARNING no checkpoint of step {step}: its step did not become final here" for step in (1, 2)]
    assert first["names"] == []


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_while_one_is_written_another_is_skipped_on_all_ranks(slow_rank: int, tmp_path: Path) -> None:
    said = run(tasks.busy, tmp_path / "checkpoints", slow_rank)
    assert [rank["began"] for rank in said] == [[True, False, False, True]] * 2
    for step in (2, 3):
        assert f"WARNING no checkpoint of step {step}: the one before is still being written" in said[0]["log"]
    assert said[0]["names"] == ["step-00000001", "step-00000004"]


def test_the_end_of_a_run_waits_no_longer_than_it_was_told(tmp_path: Path) -> None:
    assert max(run(tasks.end_while_writing, tmp_path / "checkpoints")) < 5.0
    assert survey(tmp_path / "checkpoints").whole == ()


def test_the_newest_two_stay(tmp_path: Path) -> None:
    run(tasks.write_several, tmp_path / "checkpoints", [1, 2, 3, 4])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


# --- what goes wrong with the disk


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_a_warning_and_the_next_one_is_tried(rank: int, tmp_path: Path) -> None:
    first, _ = run(tasks.full_disk, tmp_path / "checkpoints", rank)
    (warning,) = [line for line in first["log"] if line.startswith("WARNING")]
    assert warning.startswith(f"WARNING no checkpoint of step 1: rank {rank}: ")
    assert first["left"] == []
    assert first["names"] == ["step-00000002"]


def test_a_folder_that_cannot_be_made_is_a_warning_and_the_next_one_is_tried(tmp_path: Path) -> None:
    (tmp_path / "obstacle").write_text("")
    first, _ = run(tasks.no_folder, tmp_path / "obstacle" / "checkpoints")
    (warning,) = [line for line in first["log"] if line.startswith("WARNING")]
    assert "no checkpoint of step 1: " in warning
    assert "Not a directory" in warning
    assert first["names"] == ["step-00000002"]


# --- death of the writer


def check_whole(root: Path) -> int:
    """Read the newest checkpoint to the last byte and return its step; nothing that was committed may be broken."""
    found = survey(root)
    assert found.broken == {}
    assert found.foreign == ()
    for stored in found.whole:
        verify(stored, stored.meta["files"])
    return found.whole[0].step if found.whole else 0


def test_killed_before_any_one_change_of_the_folder_a_whole_checkpoint_remains(tmp_path: Path) -> None:
    deaths = 0
    steps = []
    while True:
        root = tmp_path / str(deaths) / "checkpoints"
        root.parent.mkdir()
        writer = Replica(tasks.crash_at, root, deaths, ranks=1)
        writer.processes[0].join(DEADLINE)
        steps.append(check_whole(root))
        if writer.processes[0].exitcode == 0:
            break
        assert writer.processes[0].exitcode == -signal.SIGKILL
        deaths += 1
    assert deaths > 12
    assert set(steps) == {1, 2}
    assert steps == sorted(steps)
    assert [path.name for path in root.iterdir()] == ["step-00000002"]


def test_killed_at_any_time_over_and_over_a_replica_goes_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    randomness = random.Random(5)
    newest = 0
    for _ in range(6):
        writer = Replica(tasks.keep_writing, root, newest)
        wait_until(lambda before=newest: newest_step(root) > before)
        time.sleep(randomness.uniform(0, 0.1))  # no wait for anything: the moment of death
        writer.processes[randomness.randrange(2)].kill()
        writer.kill()
        assert check_whole(root) > newest
        newest = check_whole(root)
    loaded = run(tasks.read_anything, root)
    assert [rank["step"] for rank in loaded] == [newest, newest]
    assert survey(root).unfinished == ()
    assert survey(root).dying == ()


def newest_step(root: Path) -> int:
    return max((stored.step for stored in survey(root).whole), default=0)


def wait_until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- strangers


def test_two_jobs_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    jobs = [Replica(tasks.write_several, root, [1, 2, 3, 4, 5, 6], number, f"job{number}") for number in (0, 1)]
    said = [job.results() for job in jobs]
    assert check_whole(root) > 0
    loaded = run(tasks.read, root)
    assert loaded[0]["stored"] == said[0][0]["stored"] == said[1][0]["stored"]
