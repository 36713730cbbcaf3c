"""A process that becomes the members of a ring: imports once, forks ``n`` times, and ends with its standard input.

``python nursery.py N MODE``: every member connects and activates epoch 1; with MODE ``busy`` it then runs one
all-reduce after the other, with ``idle`` none. What happens is told as JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time

import torch

from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.errors import RingBroken
from fthsdp.ftar import Engine, FtarSettings, RailMember

KEY = b"a key that only tests use"
NUMEL = 1_000_003


def tell(**what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def member(replica: int, parent: socket.socket, busy: bool) -> None:
    broken, connected = threading.Event(), threading.Event()

    def on_broken(epoch: int, error: RingBroken) -> None:
        tell(event="broken", replica=replica, at=time.time(), suspect=error.suspect, reason=str(error))
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
        settings=FtarSettings(keepalive_interval=0.5, silence_timeout=3.0, connect_timeout=20.0),
        on_connected=lambda epoch: connected.set(),
        on_broken=on_broken,
    )
    parent.sendall(endpoint.address.encode() + b"\n")
    addresses = json.loads(parent.makefile().readline())
    engine.connect(1, [RailMember(replica=i, attempt=0, address=a) for i, a in enumerate(addresses)])
    engine.activate(1)
    connected.wait(20)
    tell(event="connected", replica=replica, pid=os.getpid())
    source, out = torch.ones(NUMEL), torch.empty(NUMEL)
    step = 0
    with contextlib.suppress(RingBroken):
        while busy:
            step += 1
            engine.all_reduce(step=step, bucket=0, source=source, out=out).wait()
            if step == 3:
                tell(event="busy", replica=replica)
    broken.wait()
    engine.close()
    endpoint.close()
    tell(event="closed", replica=replica, threads=threading.active_count())


def main() -> None:
    n, busy = int(sys.argv[1]), sys.argv[2] == "busy"
    pairs = [socket.socketpair() for _ in range(n)]
    pids = []
    for replica in range(n):
        pid = os.fork()
        if not pid:
            try:
                member(replica, pairs[replica][1], busy)
            finally:
                os._exit(0)
        pids.append(pid)
    addresses = [pair[0].makefile().readline().strip() for pair in pairs]
    for pair in pairs:
        pair[0].sendall(json.dumps(addresses).encode() + b"\n")
    sys.stdin.read()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
