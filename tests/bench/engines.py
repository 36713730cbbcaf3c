"""A ring of FTAR engines, one in each process of a benchmark, beside a gloo group of the same processes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fthsdp.endpoint import Endpoint
from fthsdp.environment import Identity
from fthsdp.ftar import Engine, FtarSettings, RailMember
from fthsdp.tls import Tls

__all__ = ["connected_engine", "in_a_ring"]

KEY = b"a key of the benchmark only"


@contextmanager
def in_a_ring(rank: int, members: int, store: str) -> Iterator[Engine]:
    """Meet the other processes by way of the file ``store``, and give this one's engine once its ring is connected."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=members, timeout=timedelta(seconds=120)
    )
    with connected_engine(rank, members) as engine:
        yield engine
    dist.destroy_process_group()


@contextmanager
def connected_engine(rank: int, members: int, tls: Tls | None = None) -> Iterator[Engine]:
    """Give an engine in a ring of all processes of the gloo group, under TLS or not."""
    endpoint = Endpoint(host="127.0.0.1", key=KEY, job="bench", tls=tls)
    connected = threading.Event()
    engine = Engine(
        identity=Identity(job="bench", replica=rank, attempt=0, rank=0, world_size=1, coordinator="", host="127.0.0.1"),
        key=KEY,
        endpoint=endpoint,
        settings=FtarSettings(),
        on_connected=lambda epoch: connected.set(),
        on_broken=lambda epoch, error: sys.exit(str(error)),
    )
    addresses: list[str] = [""] * members
    dist.all_gather_object(addresses, endpoint.address)
    engine.connect(1, [RailMember(replica=i, attempt=0, address=a) for i, a in enumerate(addresses)])
    engine.activate(1)
    assert connected.wait(20)
    yield engine
    dist.barrier()
    engine.close(linger=5)
    endpoint.close()
