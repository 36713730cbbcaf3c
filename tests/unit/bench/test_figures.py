"""What a benchmark says of what it measured."""

from __future__ import annotations

import pytest
from tests.bench.figures import PAIRED, Figure, Of, at_least, at_most, table


@pytest.mark.parametrize(
    ("figure", "missed"),
    [
        (Figure(name="below", values=(0.4, 0.5, 9.0), must=at_most(0.5)), False),
        (Figure(name="above", values=(0.4, 0.6, 0.7), must=at_most(0.5)), True),
        (Figure(name="enough", values=(1.2,), must=at_least(1.0)), False),
        (Figure(name="too little", values=(0.9,), must=at_least(1.0)), True),
        (Figure(name="half", values=(1.0,), peer_values=(2.0,), must=at_most(0.5, Of.RATIO)), False),
        (Figure(name="more than half", values=(1.1,), peer_values=(2.0,), must=at_most(0.5, Of.RATIO)), True),
        (Figure(name="nothing to keep", values=(7.0,)), False),
        (Figure(name="not measured", must=at_most(0.5)), True),
        (Figure(name="no peer", values=(1.0,), must=at_most(0.5, Of.RATIO)), True),
    ],
    ids=lambda value: value.name if isinstance(value, Figure) else "",
)
def test_the_median_has_to_keep_what_must_be(figure: Figure, missed: bool) -> None:
    assert figure.missed is missed


def test_of_paired_repetitions_the_median_of_the_ratios_counts() -> None:
    figure = Figure(name="a step", unit=PAIRED, values=(1.0, 4.0, 30.0), peer_values=(2.0, 4.0, 10.0))
    assert figure.ratio == 1.0
    assert Figure(name="a stall", values=(1.0, 4.0, 30.0), peer_values=(2.0, 4.0, 10.0)).ratio == 1.0
    unlike = Figure(name="a step", unit=PAIRED, values=(1.0, 8.0, 30.0), peer_values=(2.0, 16.0, 10.0))
    assert unlike.ratio == 0.5


def test_a_peer_that_needs_no_time_has_no_ratio() -> None:
    assert Figure(name="passes", values=(0.0,), peer_values=(0.0,)).ratio is None


def test_the_table_names_what_is_missed_and_shows_must_and_aim() -> None:
    text = table(
        [
            Figure(name="good", values=(0.3,), must=at_most(0.5), aim=at_most(0.2)),
            Figure(name="bad", unit="%", values=(0.1, 0.2, 0.3), must=at_most(0.05), note="why"),
        ]
    )
    good, bad = text.splitlines()[2:4]
    assert good.split() == ["ok", "good", "0.3", "s", "-", "-", "≤", "0.5", "s", "≤", "0.2", "s", "✗"]
    assert bad.startswith("MISSED")
    assert "20.0% (10.0%…30.0%)" in bad
    assert text.endswith("bad: why")


def test_everything_measured_is_in_the_json() -> None:
    figure = Figure(name="a", values=(3.0, 1.0, 2.0), peer="other", peer_values=(4.0,), must=at_most(2.5))
    content = figure.as_json()
    assert content["ours"] == {"median": 2.0, "low": 1.0, "high": 3.0, "values": [3.0, 1.0, 2.0]}
    assert content["peers"]["median"] == 4.0
    assert content["ratio"] == 0.5
    assert content["must"] == {"of": "value", "is": "≤ 2.5 s", "met": True}
