"""What the tests of ``fthsdp run`` share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _modules_are_found_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are started in folders of their own, where a relative PYTHONPATH would mean something else."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if given:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(path).resolve()) for path in given))
