"""What holds for all tests: Hypothesis judges no example by its time, since the machine may be busy.

And the authorities whose certificates some of them need, made once.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from tests.local.certificates import Authority

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom the job trusts."""
    return Authority(tmp_path_factory.mktemp("pki") / "authority")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom it does not."""
    return Authority(tmp_path_factory.mktemp("pki") / "stranger", name="stranger")
