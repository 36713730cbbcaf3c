"""The table of all times agrees with the code and with its page, and values that break a rule are refused."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from fthsdp import group, vote
from fthsdp.catchup import shelf
from fthsdp.coordinator import client, server, start
from fthsdp.coordinator.client import LeaderClient
from fthsdp.coordinator.events import MembershipSettings
from fthsdp.errors import ConfigError
from fthsdp.ftar import FtarSettings
from fthsdp.launcher import supervisor
from fthsdp.timeouts import RULES, TIMEOUTS, Rule, check
from fthsdp_operator.api import Deadlines, NodePolicy
from fthsdp_operator.kube import lease
from fthsdp_operator.local import kubelet
from fthsdp_operator.rules import deadlines, nodes, plan, policy, replicas

PAGE = Path(__file__).parents[3] / "docs" / "timeouts.md"


def in_the_code() -> dict[str, float]:
    ring = FtarSettings()
    return MembershipSettings(replicas=1, min_replicas=1).times | {
        "look_again": start.LOOK_AGAIN,
        "farewell_timeout": server.FAREWELL_TIMEOUT,
        "keepalive_interval": ring.keepalive_interval,
        "ring_silence_timeout": ring.silence_timeout,
        "ring_connect_timeout": ring.connect_timeout,
        "dial_timeout": client.DIAL_TIMEOUT,
        "heartbeat_interval": inspect.signature(LeaderClient).parameters["heartbeat_interval"].default,
        "rank_start_timeout": group._START_TIMEOUT,
        "fetch_silence_timeout": shelf._SILENCE_TIMEOUT,
        "leave_timeout": group._LEAVE_SHARE * kubelet.DEFAULT_GRACE,
        "bye_timeout": group._BYE_TIMEOUT,
        "group_timeout": vote.FOR_EVER.total_seconds(),
        "termination_grace": kubelet.DEFAULT_GRACE,
        "launcher_patience": supervisor.PATIENCE,
        "launcher_import": supervisor.IMPORT_TIMEOUT,
        "straggler_grace": replicas.STRAGGLER_GRACE,
        "coordinator_linger": plan.COORDINATOR_LINGER,
        "early_exit_grace": policy.EARLY_EXIT_GRACE,
        "unreachable_seconds": NodePolicy().unreachable_seconds,
        "start_seconds": Deadlines().start_seconds,
        "stalled": deadlines.STALLED,
        "move_patience": nodes.MOVE_PATIENCE,
        "force_overdue": nodes.OVERDUE,
        "lease_duration": lease.LEASE_DURATION,
        "renew_deadline": lease.RENEW_DEADLINE,
        "renew_period": lease.RETRY_PERIOD,
    }


def test_the_defaults_are_those_of_the_code() -> None:
    assert {name: timeout.default for name, timeout in TIMEOUTS.items()} == in_the_code()


def test_the_defaults_keep_all_rules() -> None:
    check({name: timeout.default for name, timeout in TIMEOUTS.items()})


def test_the_page_has_every_time_and_every_rule() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for timeout in TIMEOUTS.values():
        seconds = "365 days" if timeout.default > 86400 else f"{timeout.default:g}"
        assert f"| {timeout.meaning} | {seconds} | {timeout.where or 'fixed'} |" in text
    for rule in RULES:
        others = " + ".join(TIMEOUTS[other].name for other in rule.others)
        bound = f"{rule.factor} x {others}" if rule.factor > 1 else others
        assert f"| {TIMEOUTS[rule.name].name} | {'>' if rule.strictly else '≥'} {bound} | {rule.reason} |" in text
    assert text.count("\n| ") == len(TIMEOUTS) + len(RULES) + 4  # two tables with two lines of head each


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} and {'+'.join(rule.others)}")
def test_each_rule_holds_down_to_its_bound_and_says_why_below(rule: Rule) -> None:
    values = {other: TIMEOUTS[other].default for other in rule.others}
    bound = rule.factor * sum(values.values())
    assert rule.holds(values | {rule.name: bound}) is not rule.strictly
    assert rule.holds(values | {rule.name: bound + 0.1})
    for wrong in (bound - 0.1, float("nan")):
        assert not rule.holds(values | {rule.name: wrong})
        sentence = rule.broken(values | {rule.name: wrong})
        assert sentence.startswith(f"{TIMEOUTS[rule.name].name} is {wrong:g} s: it must be ")
        assert sentence.endswith(f" ({bound:g} s): {rule.reason}")
        with pytest.raises(ConfigError, match="must be"):
            check(values | {rule.name: wrong})


def test_a_rule_about_somebody_elses_setting_waits_until_that_is_known() -> None:
    check({"connect_timeout": 5.0})
    with pytest.raises(ConfigError, match=r"^connect-timeout is 5 s: .* the ring's connect-timeout \(10 s\)"):
        check({"connect_timeout": 5.0, "ring_connect_timeout": 10.0})
