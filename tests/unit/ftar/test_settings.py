"""The settings check themselves."""

from __future__ import annotations

import pytest

from fthsdp.errors import ConfigError
from fthsdp.ftar.settings import FtarSettings


def test_the_defaults_keep_the_rules() -> None:
    settings = FtarSettings()
    assert (settings.chunk_bytes, settings.window) == (8 << 20, 4)
    assert (settings.keepalive_interval, settings.silence_timeout, settings.connect_timeout) == (1.0, 5.0, 10.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes is 0: it has to be a multiple of 4"),
        ({"chunk_bytes": 6}, "chunk_bytes is 6: it has to be a multiple of 4"),
        ({"chunk_bytes": 2 << 30}, "chunk_bytes is 2147483648: it has to be a multiple of 4"),
        ({"window": 0}, "window is 0: at least one"),
        ({"keepalive_interval": 0.0}, "keepalive_interval is 0.0: it has to be a positive number of seconds"),
        ({"connect_timeout": float("nan")}, "connect_timeout is nan"),
        ({"connect_timeout": float("inf")}, "connect_timeout is inf"),
        ({"silence_timeout": 2.9}, r"silence_timeout \(2.9 s\) is below three times keepalive_interval \(1.0 s\)"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_by_name(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FtarSettings(**wrong)  # type: ignore[arg-type]
