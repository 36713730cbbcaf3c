"""The catch-up of one shadow, as far as one rank sees it: a download, and the steps that pass meanwhile.

Steps are kept in host memory in the order of the ring. Once the download is there it is loaded and the kept steps are
replayed, all but the newest: that one may still be undone by a broken ring, until the step after it is prepared. The
rank is *current* when nothing else is left; when all ranks of the replica are, they apply the newest together and the
replica is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fthsdp.protocol.requests import Download, Downloaded, KeptStep

__all__ = ["CatchUp"]


class CatchUp:
    """Download, keep, replay."""

    def __init__(
        self,
        *,
        epoch: int,
        since: int,
        donors: frozenset[int],
        download: Download,
        load: Callable[[Downloaded], None],
        replay: Callable[[KeptStep], None],
    ) -> None:
        self.epoch = epoch
        """At whose beginning the stripes are taken."""
        self.since = since
        """The step before that."""
        self.donors = donors
        """Whose stripes they are."""
        self.loaded = False
        self.bytes = 0
        self.replayed = 0
        self._download = download
        self._load = load
        self._replay = replay
        self._kept: deque[KeptStep] = deque()

    @property
    def current(self) -> bool:
        """Whether the state is loaded and all but the newest step are replayed."""
        return self.loaded and len(self._kept) <= 1

    def keep(self, step: KeptStep) -> None:
        """Keep a committed step."""
        self._kept.append(step)

    def drop_last(self) -> None:
        """Forget the newest step: its attempt does not count."""
        self._kept.pop()

    def work(self) -> bool:
        """Do one piece of what can be done now; return whether there was any."""
        if not self.loaded:
            downloaded = self._download.result()
            if downloaded is None:
                return False
            self._load(downloaded)
            self.loaded = True
            self.bytes = downloaded.bytes
            return True
        if len(self._kept) > 1:
            self._replay_next()
            return True
        return False

    def finish(self) -> None:
        """Replay what is kept, the newest step as well: from here on the state is whole."""
        assert self.loaded
        while self._kept:
            self._replay_next()

    def cancel(self) -> None:
        """End the download."""
        self._download.cancel()

    def _replay_next(self) -> None:
        self._replay(self._kept.popleft())
        self.replayed += 1
