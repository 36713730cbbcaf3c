"""The picture of a run: loss and active replicas over time, with failures and joins marked.

matplotlib is imported when a picture is drawn: the operator's image has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fthsdp.errors import ConfigError
from fthsdp_operator.reports.history import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_FAILED, _JOINED, _LOSS, _ACTIVE = "#c0392b", "#1e8449", "#1f4e79", "#7f8c8d"


def draw(report: dict[str, Any], points: Sequence[Point], path: Path, *, title: str) -> None:
    """Write the picture as PNG; raises ConfigError when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'fthsdp[trainer]'") from None
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)  # no global state and no display, unlike pyplot
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw_loss(upper, points)
    _draw_active(lower, points, report["replicas"])
    _mark_events(upper, lower, report)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_loss(axes: Axes, points: Sequence[Point]) -> None:
    known = [(p.time, p.loss) for p in points if p.loss is not None]
    axes.plot([time for time, _ in known], [loss for _, loss in known], color=_LOSS, marker=".", linewidth=1.5)
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)


def _draw_active(axes: Axes, points: Sequence[Point], replicas: int) -> None:
    times = [p.time for p in points]
    axes.fill_between(times, [p.active for p in points], step="pre", color=_ACTIVE, alpha=0.35)
    axes.plot(times, [p.active for p in points], drawstyle="steps-pre", color=_ACTIVE, linewidth=1.5)
    axes.set_ylim(0, replicas + 0.4)
    axes.set_yticks(range(replicas + 1))
    axes.set_ylabel("active replicas")
    axes.set_xlabel("seconds since the first epoch began")
    axes.grid(alpha=0.25)


def _mark_events(upper: Axes, lower: Axes, report: dict[str, Any]) -> None:
    end = upper.get_xlim()[1]
    for position, (time, text, colour) in enumerate(_events(report)):
        for axes in (upper, lower):
            axes.axvline(time, color=colour, linestyle="--", linewidth=1.2)
        # Neighbouring events are written at different heights, so that their words do not lie on each other, and late
        # ones to the left of their line, so that they end inside the picture.
        late = time > 0.75 * end
        upper.annotate(
            text,
            (time, 0.96 - 0.07 * (position % 5)),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if late else 5, 0),
            textcoords="offset points",
            color=colour,
            fontsize=10,
            ha="right" if late else "left",
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _events(report: dict[str, Any]) -> list[tuple[float, str, str]]:
    """Return time, words and colour; what happened before the first epoch began is not on the run's clock."""
    failures = [(f["detected_s"], f"replica {f['replica']} died", _FAILED) for f in report["failures"]]
    joins = [(j["active_s"], f"replica {j['replica']} active", _JOINED) for j in report["joins"]]
    return sorted(event for event in (*failures, *joins) if event[0] is not None)
