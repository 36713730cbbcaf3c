"""The picture of a run is a PNG, also of runs in which little happened."""

from pathlib import Path
from typing import Any

import pytest

from fthsdp_operator.reports.history import Point
from fthsdp_operator.reports.picture import draw

FAILED = {"failures": [{"replica": 1, "detected_s": 1.0}], "joins": [{"replica": 1, "active_s": 2.0}]}
EARLY = {"failures": [{"replica": 1, "detected_s": None}], "joins": []}
POINTS = [Point(step=n, time=n / 2, loss=5.0 - n, active=2 - (n == 3)) for n in range(1, 5)]


@pytest.mark.parametrize("events", [FAILED, EARLY, {"failures": [], "joins": []}])
@pytest.mark.parametrize("points", [POINTS, POINTS[:1], []])
def test_a_picture_is_drawn(tmp_path: Path, events: dict[str, Any], points: list[Point]) -> None:
    draw({"replicas": 2, **events}, points, tmp_path / "run.png", title="a run")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
