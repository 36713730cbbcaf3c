"""What holds for all tests.

Hypothesis judges no example by its time: the machine may be busy. In runs with several workers, tests that share
something expensive or exclusive stay with one of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the workers read the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep all tests of the one cluster together, and otherwise those of a file."""
    for item in items:
        path = item.path.relative_to(_HERE)
        group = "cluster" if path.parts[0] == "cluster" else str(path)
        item.add_marker(pytest.mark.xdist_group(group))
