"""A joiner's download: one stripe from every donor, in parallel, beside the training thread."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from fthsdp.catchup.shelf import Fetcher
from fthsdp.catchup.snapshot import Snapshot, StripeAssembler
from fthsdp.errors import ConnectionLost, FthsdpError, NotReady, WireError
from fthsdp.wire import Json

__all__ = ["Download", "Downloaded"]

log = logging.getLogger(__name__)

_RETRY = 0.2
"""Seconds before a stripe whose connection failed is fetched again."""


@dataclass(frozen=True, slots=True)
class Downloaded:
    """All stripes of one boundary."""

    step: int
    sampler: Json
    snapshot: Snapshot
    bytes: int


class Download:
    """Fetches the stripes of one epoch; a failed connection is tried again until the stripe is gone for good.

    A donor that has left for good is no error here: the epoch that follows starts a new download.
    """

    def __init__(self, fetcher: Fetcher, donors: Mapping[int, str], *, shadow: int, epoch: int) -> None:
        self._fetcher = fetcher
        self._shadow = shadow
        self._epoch = epoch
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._assembler: StripeAssembler | None = None
        self._heads: dict[int, Json] = {}
        self._threads = [
            threading.Thread(target=self._fetch, args=(donor, address), name=f"fthsdp-download-{donor}", daemon=True)
            for donor, address in donors.items()
        ]
        for thread in self._threads:
            thread.start()

    def result(self) -> Downloaded | None:
        """Return everything once it is there, else None; raises WireError when the stripes do not fit together."""
        with self._lock:
            if len(self._heads) < len(self._threads) or self._assembler is None:
                return None
            heads, assembler = list(self._heads.values()), self._assembler
        steps = {int(head["step"]) for head in heads}
        if len(steps) != 1 or not assembler.complete:
            raise WireError(
                f"the stripes of epoch {self._epoch} do not fit together: they are of steps {sorted(steps)},"
                f" and bytes {assembler.missing} are missing"
            )
        return Downloaded(steps.pop(), heads[0]["sampler"], assembler.snapshot(), assembler.total_bytes)

    def cancel(self) -> None:
        """Stop; the threads end on their own within moments."""
        self._stopped.set()
        with self._lock:
            for sock in self._sockets:
                _shut(sock)

    def _fetch(self, donor: int, address: str) -> None:
        while not self._stopped.is_set():
            try:
                self._fetch_once(donor, address)
                return
            except NotReady as error:
                log.info("stripe of replica %d in epoch %d: %s", donor, self._epoch, error)
                return
            except ConnectionLost as error:
                log.info("stripe of replica %d in epoch %d, trying again: %s", donor, self._epoch, error)
                self._stopped.wait(_RETRY)
            except FthsdpError as error:
                log.error("stripe of replica %d in epoch %d cannot be used: %s", donor, self._epoch, error)
                return

    def _fetch_once(self, donor: int, address: str) -> None:
        opened: list[socket.socket] = []

        def on_open(sock: socket.socket) -> None:
            opened.append(sock)
            with self._lock:
                self._sockets.add(sock)
            if self._stopped.is_set():
                _shut(sock)

        try:
            head = self._fetcher.stripe(
                address, shadow=self._shadow, epoch=self._epoch, opened=on_open, into=self._window
            )
        finally:
            with self._lock:
                self._sockets.difference_update(opened)
        self._window_filled(donor, head)

    def _window(self, head: Json) -> memoryview:
        try:
            meta, start, size, step = head["meta"], head["start"], head["bytes"], head["step"]
        except KeyError as error:
            raise WireError(f"the head of a stripe has no {error}") from error
        if not all(type(number) is int for number in (start, size, step)) or "sampler" not in head:
            raise WireError(f"the head of a stripe says bytes {start!r} plus {size!r} at step {step!r}")
        with self._lock:
            if self._assembler is None:
                self._assembler = StripeAssembler(meta)
        self._assembler.check(meta)
        return self._assembler.window((start, start + size))

    def _window_filled(self, donor: int, head: Json) -> None:
        assert self._assembler is not None
        self._assembler.filled((head["start"], head["start"] + head["bytes"]))
        with self._lock:
            self._heads[donor] = head


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a socket was closed before it was shut down")
