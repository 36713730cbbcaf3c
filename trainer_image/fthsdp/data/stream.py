"""Read the samples that a rank was dealt, from a dataset that can be indexed or from the lanes of a stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any, Protocol

from fthsdp.data.lanes import MAX_LANES, lane_of
from fthsdp.data.sampler import order
from fthsdp.errors import ConfigError

__all__ = ["Dataset", "StreamDataset", "reader"]


class Dataset(Sized, Protocol):
    """Any map-style dataset."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""
        ...


class StreamDataset:
    """Samples that cannot be indexed, in ``lanes`` lanes that are each read in order, every sample exactly once.

    ``open(lane, position)`` returns an iterator over the samples of a lane from ``position`` on (0 is the first); it
    has to give the same samples whenever and wherever it is called. A lane has no end: what is read through begins
    again, in whatever order ``open`` likes.

    ``lanes`` stays the same for the whole run, also when it is continued from a checkpoint. A rank reads its own lanes
    for as long as the replicas stay the same, and whoever reads on where somebody else was opens the lane there: many
    times more lanes than ranks keep the ranks' lanes at the same pace, shards of the data are a good choice.
    """

    def __init__(self, *, lanes: int, open: Callable[[int, int], Iterable[Any]]) -> None:
        if not 1 <= lanes <= MAX_LANES:
            raise ConfigError(f"lanes={lanes}: a stream has 1 to {MAX_LANES} lanes")
        self.lanes = lanes
        self._open = open
        self._ahead: OrderedDict[int, Iterator[Any]] = OrderedDict()
        """Open iterators by the number of the sample that they return next, the one used longest ago first."""

    def __getitem__(self, number: int, /) -> Any:
        """Return the sample of this number; the next one of its lane costs no seek. Raises ConfigError."""
        lane, position = lane_of(number)
        samples = self._ahead.pop(number, None)
        if samples is None:
            samples = iter(self._open(lane, position))
        try:
            sample = next(samples)
        except StopIteration:
            raise ConfigError(
                f"lane {lane} ended before its sample {position}: a lane has no end, begin it again in open()"
            ) from None
        self._ahead[number + 1] = samples
        if len(self._ahead) > self.lanes:
            _, unused = self._ahead.popitem(last=False)
            with suppress(AttributeError):
                unused.close()  # type: ignore[attr-defined]
        return sample


def reader(dataset: Dataset | StreamDataset, *, lanes: int, seed: int) -> Callable[[int], Any]:
    """Return what reads a sample by its number; ``lanes`` are those of the sampler's state, 0 for none.

    Raises ConfigError when the dataset is of another kind, or empty.
    """
    given = dataset.lanes if isinstance(dataset, StreamDataset) else 0
    if given != lanes:
        raise ConfigError(
            f"the dataset has {_in_words(given)} and this run {_in_words(lanes)}: they have to be the same"
        )
    if isinstance(dataset, StreamDataset):
        return dataset.__getitem__
    length = len(dataset)
    if length == 0:
        raise ConfigError("the dataset is empty")
    return lambda number: dataset[order(number, length, seed)]


def _in_words(lanes: int) -> str:
    return f"{lanes} lanes" if lanes else "no lanes"
