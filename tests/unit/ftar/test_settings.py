"""The settings check themselves."""

from __future__ import annotations

from typing import Any

import pytest

from fthsdp.errors import ConfigError
from fthsdp.ftar.settings import FtarSettings, WireDtype


def test_the_defaults_keep_the_rules() -> None:
    settings = FtarSettings()
    assert (settings.chunk_bytes, settings.window) == (2 << 20, 16)
    assert (settings.streams, settings.wire_dtype) == (1, WireDtype.FLOAT32)
    assert (settings.keepalive_interval, settings.silence_timeout, settings.connect_timeout) == (1.0, 5.0, 10.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes is 0: it has to be a multiple of 4"),
        ({"chunk_bytes": 6}, "chunk_bytes is 6: it has to be a multiple of 4"),
        ({"chunk_bytes": 2 << 30}, "chunk_bytes is 2147483648: it has to be a multiple of 4"),
        ({"window": 0}, "window is 0: at least one"),
        ({"streams": 0}, "streams is 0: it has to be from 1 to 16"),
        ({"streams": 17}, "streams is 17: it has to be from 1 to 16"),
        ({"streams": 4, "window": 3}, r"window \(3\) is below streams \(4\)"),
        ({"wire_dtype": "int8"}, "wire_dtype is 'int8': it has to be one of float32, bfloat16, float16"),
        ({"keepalive_interval": 0.0}, "keepalive_interval is 0.0: it has to be a positive number of seconds"),
        ({"connect_timeout": float("nan")}, "connect_timeout is nan"),
        ({"connect_timeout": float("inf")}, "connect_timeout is inf"),
        ({"silence_timeout": 2.9}, r"silence_timeout \(2.9 s\) is below three times keepalive_interval \(1.0 s\)"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FtarSettings(**wrong)


def test_nothing_set_in_the_environment_leaves_the_defaults() -> None:
    assert FtarSettings.from_environment({"PATH": "/bin", "FTHSDP_FTAR_STREAMS": ""}) == FtarSettings()


def test_a_job_sets_the_transport_through_its_environment() -> None:
    env = {
        "FTHSDP_FTAR_CHUNK_BYTES": "1048576",
        "FTHSDP_FTAR_WINDOW": "8",
        "FTHSDP_FTAR_STREAMS": "2",
        "FTHSDP_FTAR_WIRE_DTYPE": "bfloat16",
        "FTHSDP_KEEPALIVE_INTERVAL": "0.5",
        "FTHSDP_SILENCE_TIMEOUT": "2.5",
        "FTHSDP_CONNECT_TIMEOUT": "30",
    }
    assert FtarSettings.from_environment(env) == FtarSettings(
        chunk_bytes=1 << 20,
        window=8,
        streams=2,
        wire_dtype=WireDtype.BFLOAT16,
        keepalive_interval=0.5,
        silence_timeout=2.5,
        connect_timeout=30.0,
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FTHSDP_FTAR_STREAMS": "two"}, "FTHSDP_FTAR_STREAMS='two' is not a whole number"),
        ({"FTHSDP_SILENCE_TIMEOUT": "5s"}, "FTHSDP_SILENCE_TIMEOUT='5s' is not a number of seconds"),
        ({"FTHSDP_FTAR_WIRE_DTYPE": "int8"}, "FTHSDP_FTAR_WIRE_DTYPE='int8' is not one of float32, bfloat16, float16"),
        (
            {"FTHSDP_SILENCE_TIMEOUT": "2"},
            r"silence_timeout \(2.0 s\) is below three times keepalive_interval \(1.0 s\)"
            r".* \(from FTHSDP_SILENCE_TIMEOUT\)",
        ),
    ],
)
def test_a_wrong_value_in_the_environment_is_refused_by_the_variable_s_name(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FtarSettings.from_environment(env)
