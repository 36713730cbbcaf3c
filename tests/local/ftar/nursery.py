"""A process that is a member of a ring, and tells through a pipe what happens to it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from multiprocessing.connection import Connection

from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.errors import RingBroken
from fthsdp.ftar import Engine, FtarSettings, RailMember

KEY = b"a key that only tests use"
NUMEL = 1_000_003
SETTINGS = FtarSettings(keepalive_interval=0.5, silence_timeout=2.0, connect_timeout=20.0)


class Teller:
    """One end of the pipe, used by several threads."""

    def __init__(self, replica: int, pipe: Connection) -> None:
        self._replica = replica
        self._pipe = pipe
        self._lock = threading.Lock()

    def tell(self, event: str, **what: object) -> None:
        with self._lock:
            self._pipe.send({"event": event, "replica": self._replica, **what})


def be_a_member(replica: int, pipe: Connection, busy: bool) -> None:
    """Connect and activate epoch 1; then run one all-reduce after the other if ``busy``, else none, until it breaks."""
    import torch

    torch.set_num_threads(1)
    teller = Teller(replica, pipe)
    broken, connected = threading.Event(), threading.Event()

    def on_broken(epoch: int, error: RingBroken) -> None:
        teller.tell("broken", at=time.time(), suspect=error.suspect, reason=str(error))
        broken.set()

    endpoint = Endpoint(host="127.0.0.1", key=KEY, job="test")
    engine = Engine(
        identity=Identity(
            job="test",
            replica=replica,
            attempt=0,
            rank=0,
            world_size=1,
            coordinator="127.0.0.1:1",
            host="127.0.0.1",
        ),
        key=KEY,
        endpoint=endpoint,
        settings=SETTINGS,
        on_connected=lambda epoch: connected.set(),
        on_broken=on_broken,
    )
    teller.tell("listens", address=endpoint.address)
    engine.connect(1, [RailMember(replica=i, attempt=0, address=address) for i, address in enumerate(pipe.recv())])
    engine.activate(1)
    connected.wait(20)
    teller.tell("connected", pid=os.getpid())
    source, out = torch.ones(NUMEL), torch.empty(NUMEL)
    step = 0
    with contextlib.suppress(RingBroken):
        while busy:
            step += 1
            engine.all_reduce(step=step, bucket=0, source=source, out=out).wait()
            if step == 3:
                teller.tell("busy")
    broken.wait()
    engine.close()
    endpoint.close()
    teller.tell("closed", threads=threading.active_count())
