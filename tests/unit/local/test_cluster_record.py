"""The coordinator's log as Kubernetes hands it out."""

import pytest

from fthsdp_operator.reports.cluster_record import log_lines

LOG = """\
2026-11-30T10:00:00.123456789Z {"step": 1, "loss": 2.5, "active": 3, "contributors": [0, 1, 2], "seconds": 0.5}
2026-11-30T10:00:00.2Z replica 2 said hello
2026-11-30T10:00:00.3Z {"something": "else"}
2026-11-30T10:00:01Z {"step": 2, "loss": 2.4, "active": 2, "contributors": [0, 1], "seconds": 0.5}
2026-11-30T10:00:01.5Z {"step": 3, "lo
"""


def test_lines_about_steps_are_read_with_their_time_and_all_others_are_passed_over() -> None:
    (first, one), (second, two) = log_lines(LOG)
    assert (one["step"], two["step"]) == (1, 2)
    assert second - first == pytest.approx(1 - 0.123456, abs=1e-5)
