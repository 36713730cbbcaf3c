"""What the tests of ``fthsdp run`` share."""

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _modules_are_found_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are started in folders of their own, where a relative PYTHONPATH would mean something else."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [*(Path(path).resolve() for path in given), PROJECT])))
