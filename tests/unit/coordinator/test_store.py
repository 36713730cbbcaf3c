"""The file store: compare and swap, atomically, whatever happens around it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.messages import EpochRecord, Member, Outcome, Role
from fthsdp.coordinator.store import FileStore, StoreConflict, StoreUnavailable
from fthsdp.errors import ConfigError


def ledger(number: int, *, proposal: int | None = None) -> Ledger:
    member = Member(replica=0, attempt=0, role=Role.ACTIVE, addresses=("h:1",))
    current = EpochRecord(number=number, members=(member,), outcome=Outcome(step=3))
    planned = None if proposal is None else EpochRecord(number=proposal, members=(member,))
    return Ledger(current=current, proposal=planned)


def test_what_was_saved_is_loaded_by_the_next_coordinator(tmp_path: Path) -> None:
    async def run() -> None:
        store = FileStore(tmp_path / "epoch")
        assert await store.load() is None
        await store.save(ledger(1), expected=0)
        await store.save(ledger(1, proposal=2), expected=1)
        assert await FileStore(tmp_path / "epoch").load() == ledger(1, proposal=2)

    asyncio.run(run())


def test_the_number_of_a_ledger_is_the_highest_given_out() -> None:
    assert ledger(4).number == 4
    assert ledger(4, proposal=6).number == 6


def test_of_two_coordinators_only_one_succeeds(tmp_path: Path) -> None:
    async def run() -> None:
        stores = [FileStore(tmp_path / "epoch") for _ in range(8)]
        await stores[0].save(ledger(1), expected=0)
        results = await asyncio.gather(
            *(s.save(ledger(1, proposal=2 + i), expected=1) for i, s in enumerate(stores)), return_exceptions=True
        )
        assert [type(r) for r in results].count(StoreConflict) == 7
        assert results.count(None) == 1

    asyncio.run(run())


def test_the_loser_is_told_what_it_found(tmp_path: Path) -> None:
    async def run() -> None:
        store = FileStore(tmp_path / "epoch")
        await store.save(ledger(7), expected=0)
        with pytest.raises(StoreConflict, match="holds epoch 7, not 3: another coordinator of this job is running"):
            await store.save(ledger(4), expected=3)
        assert await store.load() == ledger(7)

    asyncio.run(run())


def test_saving_again_what_is_there_succeeds(tmp_path: Path) -> None:
    async def run() -> None:
        store = FileStore(tmp_path / "epoch")
        await store.save(ledger(1), expected=0)
        await store.save(ledger(1), expected=0)

    asyncio.run(run())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"current": {}}', "\x00\x01"])
def test_a_file_that_is_no_ledger_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "epoch").write_text(text)
    with pytest.raises(ConfigError, match="epoch holds no epoch record"):
        asyncio.run(FileStore(tmp_path / "epoch").load())


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder .*nowhere does not exist"):
        FileStore(tmp_path / "nowhere" / "epoch")


def test_a_disk_that_fails_is_not_taken_for_a_conflict(tmp_path: Path) -> None:
    (tmp_path / "epoch.new").mkdir()  # the place where the new file has to be written
    with pytest.raises(StoreUnavailable):
        asyncio.run(FileStore(tmp_path / "epoch").save(ledger(1), expected=0))


def test_a_half_written_file_of_a_killed_coordinator_is_ignored(tmp_path: Path) -> None:
    async def run() -> None:
        store = FileStore(tmp_path / "epoch")
        await store.save(ledger(1), expected=0)
        (tmp_path / "epoch.new").write_text('{"curr')
        assert await store.load() == ledger(1)
        await store.save(ledger(2), expected=1)
        assert await store.load() == ledger(2)

    asyncio.run(run())
    assert sorted(os.listdir(tmp_path)) == ["epoch", "epoch.lock"]
