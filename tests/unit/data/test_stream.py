import itertools

import pytest

from fthsdp.data.lanes import POSITIONS
from fthsdp.data.sampler import SamplerState, assign, commit
from fthsdp.data.stream import StreamDataset, reader
from fthsdp.errors import ConfigError


class Lanes:
    """Endless lanes of their own numbers; notes where they were opened, and which are open."""

    def __init__(self):
        self.opened, self.open = [], 0

    def __call__(self, lane, position):
        self.opened.append((lane, position))

        def samples():
            self.open += 1
            try:
                for number in itertools.count(position):
                    yield lane, number
            finally:
                self.open -= 1

        return samples()


def read(dataset, lane, *positions):
    return [dataset[lane * POSITIONS + position] for position in positions]


def test_a_lane_is_opened_once_and_read_on():
    lanes = Lanes()
    dataset = StreamDataset(lanes=3, open=lanes)
    assert read(dataset, 1, 0, 1) == [(1, 0), (1, 1)]
    assert read(dataset, 2, 5) == [(2, 5)]
    assert read(dataset, 1, 2, 3) == [(1, 2), (1, 3)]
    assert lanes.opened == [(1, 0), (2, 5)]


def test_a_returned_range_is_read_again_by_seeking_and_the_lane_goes_on_where_it_was():
    lanes = Lanes()
    dataset = StreamDataset(lanes=3, open=lanes)
    read(dataset, 0, *range(8))
    assert read(dataset, 0, 2, 3) == [(0, 2), (0, 3)]
    assert read(dataset, 0, 8) == [(0, 8)]
    assert lanes.opened == [(0, 0), (0, 2)]


def test_no_more_iterators_stay_open_than_there_are_lanes():
    lanes = Lanes()
    dataset = StreamDataset(lanes=3, open=lanes)
    for position in range(0, 50, 5):
        read(dataset, 0, position)
    assert lanes.open == 3
    assert read(dataset, 0, 46) == [(0, 46)]
    assert lanes.opened[-1] == (0, 45)


def test_a_lane_that_ends_is_named():
    dataset = StreamDataset(lanes=3, open=lambda lane, position: ["a", "b"][position:])
    with pytest.raises(ConfigError, match="lane 2 ended before its sample 2: a lane has no end"):
        read(dataset, 2, 0, 1, 2)


@pytest.mark.parametrize("lanes", [0, -1, 10**6])
def test_a_number_of_lanes_that_cannot_be_is_refused(lanes):
    with pytest.raises(ConfigError, match=f"lanes={lanes}: a stream has 1 to 8192 lanes"):
        StreamDataset(lanes=lanes, open=Lanes())


def test_replicas_that_come_and_go_read_each_sample_once():
    members = [(0, 1), (0, 1), (1,), (1, 2), (0, 1, 2), (0, 1, 2), (2,)]
    dead = [(), (0,), (), (), (1,), (), ()]
    datasets = {replica: StreamDataset(lanes=5, open=Lanes()) for replica in range(3)}
    state, trained = SamplerState(heads=(0,) * 5), []
    for present, gone in zip(members, dead, strict=True):
        dealt = assign(state, present, 4)
        items = {r: [datasets[r][n] for first, stop in dealt[r] for n in range(first, stop)] for r in present}
        contributors = [replica for replica in present if replica not in gone]
        trained += [item for replica in contributors for item in items[replica]]
        state = commit(state, dealt, contributors)
    assert len(trained) == len(set(trained)) == 4 * 12
    assert state.returned == ()
    assert sorted(trained) == [(lane, position) for lane, head in enumerate(state.heads) for position in range(head)]


def test_a_dataset_of_the_other_kind_is_refused():
    stream = StreamDataset(lanes=4, open=Lanes())
    assert reader(stream, lanes=4, seed=0)(2 * POSITIONS + 7) == (2, 7)
    with pytest.raises(ConfigError, match="the dataset has 4 lanes and this run no lanes"):
        reader(stream, lanes=0, seed=0)
    with pytest.raises(ConfigError, match="the dataset has no lanes and this run 4 lanes"):
        reader(["a", "b"], lanes=4, seed=0)
    with pytest.raises(ConfigError, match="the dataset has 4 lanes and this run 8 lanes"):
        reader(stream, lanes=8, seed=0)


def test_a_dataset_that_can_be_indexed_is_read_in_the_order_of_the_seed():
    assert sorted(map(reader("abc", lanes=0, seed=1), range(3))) == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="the dataset is empty"):
        reader([], lanes=0, seed=1)
