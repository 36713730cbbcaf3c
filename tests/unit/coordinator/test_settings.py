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
        ({"silence_timeout": 1}, "silence-timeout is 1 s: it must be at least 2 x a leader's heartbeat"),
        ({"reconnect_grace": 6}, r"silence-timeout is 5 s: it must be at least reconnect-grace \(6 s\)"),
        ({"return_timeout": 5}, r"return-timeout is 5 s: it must be longer than a leader's dial \(5 s\)"),
        ({"answer_timeout": 0.5}, r"answer-timeout is 0.5 s: it must be at least a leader's heartbeat \(1 s\)"),
        (
            {"stall_timeout": 15},
            r"stall-timeout is 15 s: it must be longer than silence-timeout \+ answer-timeout \(15 s\): who is silent",
        ),
        ({"start_timeout": -1}, "start-timeout is -1 s: it must be a number and not negative"),
        ({"answer_timeout": float("nan")}, "answer-timeout is nan s: it must be a number and not negative"),
        ({"connect_timeout": float("inf")}, "connect-timeout is inf s: it must be a number and not negative"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MembershipSettings(**{"replicas": 3, "min_replicas": 1} | settings)
