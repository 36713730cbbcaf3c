"""Shows a run while it goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fthsdp_operator.local.view import View

__all__ = ["LiveScreen", "PlainScreen", "Screen", "screen_for"]


class Screen(Protocol):
    """Where a run is shown; a context manager around the run."""

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, view: View, elapsed: float) -> None:
        """Show how things stand ``elapsed`` seconds into the run."""

    def note(self, text: str, elapsed: float) -> None:
        """Say that something happened."""


def screen_for(stream: TextIO) -> Screen:
    """Return the screen that suits the stream."""
    return LiveScreen(Console(file=stream)) if stream.isatty() else PlainScreen(stream)


class LiveScreen:
    """A table that is drawn anew, what happened scrolls by above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, view: View, elapsed: float) -> None:
        """Draw the table."""
        self._live.update(_table(view, elapsed))

    def note(self, text: str, elapsed: float) -> None:
        """Print a line above the table."""
        self._live.console.print(f"{elapsed:7.1f} s  {text}", highlight=False, markup=False)


_COLOURS = {
    "Active": "green",
    "Spare": "cyan",
    "Finished": "green",
    "CatchingUp": "yellow",
    "Backoff": "red",
    "Failed": "red",
    "Abandoned": "red",
}


def _table(view: View, elapsed: float) -> Table:
    table = Table(title=f"{elapsed:.0f} s  {view.headline}", title_justify="left", title_style="bold")
    for heading in ("replica", "attempt", "state", "step", "restarts", "last failure"):
        table.add_column(heading, justify="right" if heading in ("replica", "attempt", "step", "restarts") else "left")
    for row in view.rows:
        step = "-" if row.step is None else str(row.step)
        words = (str(row.replica), str(row.attempt), row.state, step, str(row.restarts), row.last_failure)
        table.add_row(*words, style=_COLOURS.get(row.state))
    return table


class PlainScreen:
    """A line when something happens, and one every few seconds."""

    INTERVAL = 5.0
    """Seconds between lines that only say how far the run is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ("", -self.INTERVAL)

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, view: View, elapsed: float) -> None:
        """Print a line when the job's state changed or the last line is old."""
        state, printed = self._last
        now = f"{view.state} {view.ready} {view.spares}"
        if now != state or elapsed - printed >= self.INTERVAL:
            self._last = (now, elapsed)
            self.note(view.headline, elapsed)

    def note(self, text: str, elapsed: float) -> None:
        """Print a line."""
        print(f"{elapsed:7.1f} s  {text}", file=self._stream, flush=True)
