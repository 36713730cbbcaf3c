"""The training state over FSDP2 and gloo, with a real process for each rank."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.local
WORKER = Path(__file__).with_name("fsdp_worker.py")
DEADLINE = 240.0


def _checks() -> list[str]:
    """Read the names of the worker's checks without importing it."""
    assigned = {
        node.targets[0].id: node.value
        for node in ast.parse(WORKER.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return [name.id for name in assigned["CHECKS"].elts]  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=[1, 2])
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What failed on each rank of a replica of 1 or 2 ranks."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(request.param), str(store)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(request.param)
    ]
    try:
        return [json.loads(rank.communicate(timeout=DEADLINE)[0] or '{"": "died"}') for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("check", _checks())
def test_on_every_rank(failures: list[dict[str, str]], check: str) -> None:
    for rank, failed in enumerate(failures):
        assert "" not in failed, f"rank {rank} died"
        assert check not in failed, f"rank {rank}: {failed[check]}"
