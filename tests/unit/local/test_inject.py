"""What ``--inject`` accepts, and the one sentence it answers everything else with."""

import signal

import pytest

from fthsdp.errors import ConfigError
from fthsdp_operator.local.inject import Injection, Kind, check_targets, due, parse_injection


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill:replica=2@step=20", Injection(kind=Kind.KILL, replica=2, pod=None, step=20)),
        ("freeze:replica=0,pod=1@step=1", Injection(kind=Kind.FREEZE, replica=0, pod=1, step=1)),
        ("delete:replica=11@step=300", Injection(kind=Kind.DELETE, replica=11, pod=None, step=300)),
    ],
)
def test_an_injection_is_read_and_written_in_the_same_form(text: str, expected: Injection) -> None:
    assert parse_injection(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kill", "not of the form"),
        ("kill:replica=2", "not of the form"),
        ("kill:replica=-1@step=2", "not of the form"),
        ("kill:replica=two@step=2", "not of the form"),
        ("kill:replica=2@step=2@step=3", "not of the form"),
        ("kill:replica=2@step=" + "9" * 5000, "not of the form"),
        ("kill:replica=\u0661@step=3", "not of the form"),
        ("explode:replica=2@step=2", "none of kill, freeze, term, delete"),
        ("kill:replica=2@step=0", "not positive"),
        ("kill:replica=2@step=-3", "not positive"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_injection(text)
    assert "\n" not in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kill:replica=3@step=2", "no replica 3; this job has replicas 0 to 2"),
        ("kill:replica=0,pod=2@step=2", "no pod 2; each replica of this job has pods 0 to 1"),
    ],
)
def test_a_target_that_the_job_does_not_have_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_targets([parse_injection(text)], replicas=3, pods_per_replica=2)


def test_an_injection_is_due_from_its_step_on_and_only_then() -> None:
    early, late = parse_injection("kill:replica=0@step=3"), parse_injection("kill:replica=1@step=9")
    assert due([early, late], 2) == ([], [early, late])
    assert due([early, late], 5) == ([early], [late])


def test_each_kind_has_its_signal_and_a_deletion_has_none() -> None:
    signals = {kind: kind.signal for kind in Kind}
    assert signals == {
        Kind.KILL: signal.SIGKILL, Kind.FREEZE: signal.SIGSTOP, Kind.TERM: signal.SIGTERM, Kind.DELETE: None
    }  # fmt: skip
