import json
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fthsdp.catchup.values import pack, unpack
from fthsdp.errors import ConfigError, WireError


def round_trip(value):
    tensors = []

    def put(tensor):
        tensors.append(tensor)
        return len(tensors) - 1

    return unpack(json.loads(json.dumps(pack(value, put, where="it"))), tensors)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.just("$") | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_values_come_back_as_they_were(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, math.inf, -math.inf, 1 / 3])
def test_floats_survive_bit_by_bit(value):
    assert round_trip(value).hex() == value.hex()


def test_not_a_number_survives():
    assert math.isnan(round_trip({"best": math.nan})["best"])


def test_counters_stay_counters_as_schedulers_need_them():
    assert round_trip(Counter({10: 1, 20: 2})) == Counter({10: 1, 20: 2})
    assert type(round_trip(Counter())) is Counter


def test_ordered_dicts_and_numpy_floats_become_plain():
    assert round_trip(OrderedDict(a=np.float64(0.1))) == {"a": 0.1}


def test_tensors_are_put_aside_and_come_back_as_copies():
    tensor = torch.tensor([1.0, math.nan])
    back = round_trip({"deep": [tensor]})["deep"][0]
    assert back.view(torch.int32).equal(tensor.view(torch.int32))
    assert back.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("value", [object(), {1, 2}, Path("x"), lambda: 0, 1j, defaultdict(int)])
def test_what_cannot_travel_is_named_with_its_place(value):
    with pytest.raises(ConfigError, match=r"it\['a'\]\[1\] is a \w+, which cannot be sent"):
        round_trip({"a": [0, value]})


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tensor"},
        {"$": "tensor", "number": 4},
        {"$": "tensor", "number": "x"},
        {"$": "bytes", "base64": "?"},
        {"$": "tuple", "items": 3},
        {"$": "dict", "items": [[1]]},
        {"$": "Counter", "items": [1, 2]},
        {"$": "os.system", "items": ["true"]},
        {"$": None},
    ],
)
def test_nonsense_from_the_network_is_one_clear_error(value):
    with pytest.raises(WireError, match="not a value of a snapshot"):
        unpack({"a": [value]}, [torch.zeros(1)])
