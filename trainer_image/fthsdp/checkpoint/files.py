"""The files of a checkpoint: written and read with torch.distributed.checkpoint (DCP), by each rank for itself.

``__{rank}_0.distcp`` holds a rank's tensors in DCP's format, ``rank-{rank}.json`` says what and where, and what it all
means. DCP's planners, writer and reader do the work, but not its ``save`` and ``load``: these send pickled plans from
rank to rank. ``.metadata``, DCP's own index, is a pickle: it is written so that plain DCP can load the folder, and
never read here. Tensors are read with ``torch.load(weights_only=True)``, which builds nothing but tensors. Values
that are no tensors (the options of the optimizer's groups) are in DCP's files for others, in the JSON for us.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from fthsdp.catchup.snapshot import Snapshot
from fthsdp.catchup.values import unpack
from fthsdp.checkpoint.shards import Box, Copied, Path, Shards
from fthsdp.errors import ConfigError
from fthsdp.state import TrainState

__all__ = ["METADATA", "read_shard", "write_metadata", "write_shard"]

METADATA = ".metadata"
"""DCP's index of the whole checkpoint."""
_Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor, a part of one, or another value, as one rank stores it."""

    path: Path
    dtype: str = ""
    """Empty: no tensor, but a pickled value."""
    shape: tuple[int, ...] = ()
    """Of the whole tensor."""
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """DCP's flat name."""
        return ".".join(str(part) for part in self.path)

    @property
    def index(self) -> MetadataIndex:
        """What DCP finds it by."""
        return MetadataIndex(self.key, self.offsets if self.dtype else None)

    def item(self) -> WriteItem:
        """Return the item of DCP's plan."""
        if not self.dtype:
            return WriteItem(index=self.index, type=WriteItemType.BYTE_IO)
        chunk = ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))
        properties = TensorProperties(dtype=getattr(torch, self.dtype))
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.shape))
        return WriteItem(index=self.index, type=WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Where an entry lies."""

    entry: Entry
    file: str
    start: int
    length: int

    @classmethod
    def from_json(cls, value: _Json) -> Written:
        """Read what became of ``dataclasses.asdict`` in JSON."""
        entry: _Json = {name: tuple(part) if isinstance(part, list) else part for name, part in value["entry"].items()}
        return cls(**{**value, "entry": Entry(**entry)})


# --- writing ----------------------------------------------------------------------------------------------------------


def write_shard(folder: FilePath, rank: int, copied: Copied, *, uniform: bool) -> list[str]:
    """Write what this rank stores into ``folder``, on the disk when this returns; raises OSError and torch's errors.

    ``uniform``: what is not sharded is the same on all ranks, so rank 0 stores it for all. Return the files' names.
    """
    entries: dict[str, Entry] = {}
    values: dict[str, object] = {}
    for path, value, box in _stored(copied, rank, uniform=uniform):
        entry = _entry(path, value, box)
        entries[entry.key], values[entry.key] = entry, value
    written = [
        Written(
            entry=entries[result.index.fqn],
            file=result.storage_data.relative_path,
            start=result.storage_data.offset,
            length=result.storage_data.length,
        )
        for result in _write_values(folder, rank, list(entries.values()), values)
    ]
    part = {
        "written": [asdict(one) for one in written],
        "tensors": len(copied.tensors),
        "sharded": sorted(copied.shards.boxes),
        "content": copied.content if rank == 0 or not uniform else None,
    }
    with (folder / _part_name(rank)).open("w") as file:
        json.dump(part, file)
        file.flush()
        os.fsync(file.fileno())
    return [*sorted({one.file for one in written}), _part_name(rank)]


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _stored(copied: Copied, rank: int, *, uniform: bool) -> Iterator[tuple[Path, object, Box | None]]:
    """Yield path, value and box of everything that this rank stores."""
    places = copied.shards.places(copied.content)
    for number, tensor in enumerate(copied.tensors):
        path, box = places.get(number, (None, None))
        if path is not None and (rank == 0 if box is None else box.written):
            yield path, tensor, box
        if box is None and (not uniform or (rank == 0 and path is None)):
            yield _own(rank, number), tensor, None
    if rank == 0:
        for index, group in enumerate(copied.content["groups"]):
            for key, value in {**unpack(group["options"], copied.tensors), "params": group["params"]}.items():
                yield ("optim", "param_groups", index, key), value, None


def _own(rank: int, number: int) -> Path:
    """Name a tensor that is not known by the name of a parameter, or is not the same on all ranks."""
    return "fthsdp", f"rank{rank}", str(number)


def _entry(path: Path, value: object, box: Box | None) -> Entry:
    if not isinstance(value, Tensor):
        return Entry(path=path)
    shape = tuple(value.shape)
    if box is None:
        return Entry(path=path, dtype=_name(value.dtype), shape=shape, offsets=(0,) * value.dim(), sizes=shape)
    return Entry(path=path, dtype=_name(value.dtype), shape=box.shape, offsets=box.offsets, sizes=box.sizes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Values(DefaultSavePlanner):
    """Hands DCP's writer the values of a plan."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(flatten_state_dict=False)
        self._values = values

    def lookup_object(self, index: MetadataIndex) -> object:
        """Return the value that belongs to an item."""
        return self._values[index.fqn]


def _write_values(
    folder: FilePath, rank: int, entries: Sequence[Entry], values: Mapping[str, object]
) -> list[WriteResult]:
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(SavePlan([entry.item() for entry in entries]))
    with _no_checksums():
        return list(writer.write_data(plan, _Values(values)).wait())


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Let torch.save in this thread do without its own: it takes longer than all the rest, and the marker has one."""
    usual = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(usual)


def write_metadata(folder: FilePath, ranks: int) -> None:
    """Write DCP's index of what all ranks wrote, on the disk when this returns; raises OSError, ValueError.

    DCP checks that the shards of each tensor make up the whole.
    """
    parts = [_read_part(folder, rank) for rank in range(ranks)]
    written = [[Written.from_json(one) for one in part["written"]] for part in parts]
    metadata = _metadata(written)
    metadata.planner_data = {one.entry.key: one.entry.path for part in written for one in part}
    results = [
        [WriteResult(one.entry.index, one.length, metadata.storage_data[one.entry.index]) for one in part]
        for part in written
    ]
    FileSystemWriter(folder).finish(metadata, results)


def _read_part(folder: FilePath, rank: int) -> _Json:
    part: _Json = json.loads((folder / _part_name(rank)).read_bytes())
    return part


def _metadata(written: Sequence[Sequence[Written]]) -> Metadata:
    """Let DCP put together what the ranks wrote."""
    plans = [SavePlan([one.entry.item() for one in part]) for part in written]
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    metadata.storage_data = {
        one.entry.index: _StorageInfo(one.file, one.start, one.length) for part in written for one in part
    }
    return metadata


# --- reading ----------------------------------------------------------------------------------------------------------


class _Targets(DefaultLoadPlanner):
    """Reads parts of stored tensors into given ones."""

    def __init__(self, metadata: Metadata, targets: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._metadata, self._targets = metadata, targets

    def create_local_plan(self) -> LoadPlan:
        """Find what is needed for the targets among the stored shards."""
        return LoadPlan(
            [
                item
                for key, (tensor, offsets) in self._targets.items()
                for item in create_read_items_for_chunk_list(
                    key, _tensor(self._metadata, key), [ChunkStorageMetadata(torch.Size(offsets), tensor.size())]
                )
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the target that an item is read into."""
        return self._targets[index.fqn][0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stored:
    """A checkpoint as one rank reads it."""

    folder: FilePath
    metadata: Metadata
    own: int | None
    """Rank whose own tensors are read; None when all ranks' were the same, and rank 0 stored them."""
    tensors: int
    content: _Json

    def tensor(self, path: Path) -> TensorStorageMetadata:
        return _tensor(self.metadata, Entry(path=path).key)


def _tensor(metadata: Metadata, key: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata[key]
    assert isinstance(found, TensorStorageMetadata)
    return found


def read_shard(
    folder: FilePath, state: TrainState, *, rank: int, ranks: int, stored_ranks: int, uniform: bool
) -> Snapshot:
    """Return what ``state`` has to restore on this rank; raises ConfigError when it is another model's, OSError.

    ``ranks`` are those of this replica, ``stored_ranks`` and ``uniform`` those of the checkpoint. Nothing changes yet.
    """
    if not uniform and ranks != stored_ranks:
        raise ConfigError(
            f"the checkpoint {folder} holds user or optimizer state that differs between its {stored_ranks} ranks,"
            f" so it cannot be loaded into a replica of {ranks}: start as many ranks as wrote it"
        )
    shards = Shards(state.model)
    stored = _open(folder, stored_ranks, None if uniform else rank, shards)
    _check_fits(stored, state, shards)
    tensors, targets = _targets(stored, shards)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(stored.metadata, True)
    planner = _Targets(stored.metadata, targets)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return Snapshot.of(stored.content, tensors)


def _open(folder: FilePath, ranks: int, own: int | None, shards: Shards) -> _Stored:
    parts = [_read_part(folder, rank) for rank in range(ranks)]
    metadata = _metadata([[Written.from_json(one) for one in part["written"]] for part in parts])
    part = parts[own or 0]
    stored = _Stored(folder=folder, metadata=metadata, own=own, tensors=part["tensors"], content=part["content"])
    _cut_like(stored, shards, frozenset(part["sharded"]))
    return stored


def _cut_like(stored: _Stored, shards: Shards, sharded: frozenset[str]) -> None:
    """Say of each optimizer tensor whether it is sharded here; it was where ``sharded`` has its parameter."""
    for name, entries in stored.content["optimizer"].items():
        for key, entry in entries.items():
            if "tensor" in entry and (name in sharded) != (name in shards.boxes):
                size = stored.tensor(("optim", "state", name, key)).size
                alike = len(size) > 0 and size == stored.tensor(("model", name)).size
                entry["sharded"] = alike and name in shards.boxes


def _targets(stored: _Stored, shards: Shards) -> tuple[list[Tensor], dict[str, tuple[Tensor, tuple[int, ...]]]]:
    """Make room for what this rank holds: all tensors by number, and by key with where they begin in the whole."""
    places = shards.places(stored.content)
    tensors: list[Tensor] = []
    targets: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    for number in range(stored.tensors):
        path, box = places.get(number, (None, None))
        if path is None or (box is None and stored.own is not None):
            path = _own(stored.own or 0, number)
        found = stored.tensor(path)
        tensors.append(torch.empty(found.size if box is None else box.sizes, dtype=found.properties.dtype))
        targets[Entry(path=path).key] = tensors[-1], (0,) * len(found.size) if box is None else box.offsets
    return tensors, targets


def _check_fits(stored: _Stored, state: TrainState, shards: Shards) -> None:
    """Raise ConfigError when the checkpoint is of another model, optimizer or scheduler."""
    live = state.snapshot()
    content = live.meta["content"]
    here = {
        name: _describe(tensor.dtype, shards.boxes[name].shape if name in shards.boxes else tensor.shape)
        for name, tensor in ((name, live.tensors[number]) for name, number in content["model"].items())
    }
    there = {
        name: _describe(tensor.properties.dtype, tensor.size)
        for name, tensor in ((name, stored.tensor(("model", name))) for name in stored.content["model"])
    }
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise ConfigError(
                f"the checkpoint {stored.folder} is of another model: {name} is {there.get(name, 'missing')} there and"
                f" {here.get(name, 'missing')} here; {_REMEDY}"
            )
    for what, words in _OTHER.items():
        if _outline(what, stored.content) != _outline(what, content):
            raise ConfigError(f"the checkpoint {stored.folder} has {words} than this script; {_REMEDY}")


_REMEDY = "start the script that wrote it, or name another folder"
_OTHER = {
    "groups": "another optimizer, or other groups of parameters,",
    "scheduler": "another scheduler",
    "scaler": "another scaler",
    "user": "other user state",
    "extra": "other extra state",
}


def _outline(what: str, content: _Json) -> object:
    """What has to be the same: the names of parameters, options and modules, and that there is a state at all."""
    match what:
        case "groups":
            return [(group["params"], sorted(group["options"])) for group in content[what]]
        case "extra":
            return sorted(content[what])
    return content[what] is None


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{_name(dtype)}{list(shape)}"
