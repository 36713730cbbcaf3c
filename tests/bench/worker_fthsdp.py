"""One replica of the workload under fthsdp: ``python -m tests.bench.worker_fthsdp``, who it is from the environment."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import torch
from tests.bench.workload import Flat, Samples, Workload, emit

import fthsdp

__all__: list[str] = []

FOR_EVER = 1_000_000
"""Steps: the benchmark ends the run."""


def main() -> None:
    """Train until killed."""
    workload = Workload.parse()
    emit("imported")
    torch.set_num_threads(1)
    with fthsdp.replica_group() as group:
        model = Flat(workload.parameters)
        state = fthsdp.TrainState(model, model.optimizer)
        if workload.download:
            slow_down_downloads(3 * 4e6 * workload.parameters / workload.download)
        emit("ready")
        committed = 0
        for step in group.steps(state, until=FOR_EVER, batch_size=workload.samples):
            if committed:
                emit("committed", step=committed, ok=True)
            emit("begin", step=step.number)
            for batch in step.batches(Samples()):
                time.sleep(workload.compute)
                emit("computed", step=step.number)
                step.backward(model(batch))
            committed = step.number


def slow_down_downloads(bytes_per_second: float) -> None:
    """Let this process's blocking sockets together receive no faster than this, as over a thin wire of their own.

    The rings' sockets do not block, so they are left alone: nothing but downloads (and a few small messages) is slow.
    What is not read waits in the sender's socket, as it would for a slow network.
    """
    receive = socket.socket.recv_into
    lock = threading.Lock()
    free_at = 0.0

    def slowly(sock: socket.socket, buffer: Any, *args: Any) -> int:
        nonlocal free_at
        if not sock.getblocking() and sock.gettimeout() == 0:
            return receive(sock, buffer, *args)
        got = receive(sock, memoryview(buffer)[: 1 << 16], *args)
        with lock:
            free_at = max(free_at, time.monotonic()) + got / bytes_per_second
            wait = free_at - time.monotonic()
        if wait > 0.001:
            time.sleep(wait)
        return got

    socket.socket.recv_into = slowly  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
