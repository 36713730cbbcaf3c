"""Settings that do not fit together are refused with the rule that they break."""

from typing import Any

import pytest

from fthsdp.coordinator.events import MembershipSettings
from fthsdp.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "replicas is 0: a job has at least 1"),
        ({"min_replicas": 0}, r"min-replicas is 0: it must be between 1 and replicas \(3\)"),
        ({"min_replicas": 4}, r"min-replicas is 4: it must be between 1 and replicas \(3\)"),
        ({"spares": -1}, "spares is -1: it cannot be negative"),
        ({"silence_timeout": 1}, "silence-timeout is 1 s: leaders speak once a second"),
        ({"reconnect_grace": 6}, r"reconnect-grace \(6 s\) must not be longer than silence-timeout \(5 s\)"),
        ({"start_timeout": -1}, "start-timeout is -1 s: it cannot be negative"),
        ({"answer_timeout": -1}, "answer-timeout is -1 s: it cannot be negative"),
        ({"connect_timeout": -1}, "connect-timeout is -1 s: it cannot be negative"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MembershipSettings(**{"replicas": 3, "min_replicas": 1} | settings)
