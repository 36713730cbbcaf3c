"""One replica of the workload under torchft: ``python -m tests.bench.worker_torchft NAME LIGHTHOUSE``.

The loop is the one that torchft documents, with its manager used directly. What is set to its advantage:

- all replicas are made from one seed, so the first step heals nobody (``init_sync=False``);
- the quorum of a step is computed beside its forward pass (``use_async_quorum``, its default);
- gradients go out in eight large pieces, all of them in flight at once;
- the state travels in as many chunks as there are processors here, which beats its default of one stream;
- the process group's timeout is 10 s, the default of the trainer it is mostly used with, in place of its own 60 s.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.bench.workload import Flat, Samples, Workload, emit
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft.checkpointing import HTTPTransport  # type: ignore[import-not-found]

__all__: list[str] = []

TIMEOUT = timedelta(seconds=10)


def main() -> None:
    """Train until killed; begins when the benchmark says so."""
    name, lighthouse, *arguments = sys.argv[1:]
    workload = Workload.parse(arguments)
    emit("imported")
    torch.set_num_threads(1)
    model = Flat(workload.parameters)
    optimizer = model.optimizer
    # It serves as long as something refers to it.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = manage(model, optimizer, name=name, lighthouse=lighthouse, port=store.port)
    samples = Samples()
    emit("ready")
    sys.stdin.readline()
    while True:
        step = manager.current_step() + 1
        emit("begin", step=step)
        manager.start_quorum()
        optimizer.zero_grad(set_to_none=True)
        batch = torch.stack([samples[step * workload.samples + n] for n in range(workload.samples)])
        time.sleep(workload.compute)
        emit("computed", step=step)
        model(batch).backward()
        works = [manager.allreduce(parameter.grad) for parameter in model.parameters()]
        for work in works:
            work.wait()
        committed = manager.should_commit()
        if committed:
            optimizer.step()
        emit("committed", step=manager.current_step(), ok=committed, participants=manager.num_participants())


def manage(model: Flat, optimizer: torch.optim.Optimizer, *, name: str, lighthouse: str, port: int) -> Any:
    """Return a manager of this state; ``port`` is that of the group's own store."""

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        init_sync=False,
        checkpoint_transport=HTTPTransport(timeout=TIMEOUT, num_chunks=os.cpu_count() or 1),
    )


if __name__ == "__main__":
    main()
