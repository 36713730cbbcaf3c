"""A whole job under TLS, with a failure: everything that travels in it does so encrypted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.local.certificates import Authority
from tests.local.training.job import Job, assert_sound, brief, running

from fthsdp.errors import Refused
from fthsdp.wire import open_blocking

pytestmark = pytest.mark.local


def test_a_replica_is_killed_and_catches_up_under_tls(authority: Authority, tmp_path: Path) -> None:
    environment = {"FTHSDP_TLS_DIR": str(authority.issue(tmp_path / "tls"))}
    arguments = brief(steps=36, compute=0.05)
    with running(
        Job(tmp_path / "job", replicas=2, arguments=arguments, environment=environment, lingers_after=5)
    ) as job:
        job.wait_for_step(5)
        with pytest.raises(Refused, match="TLS is on here, and the hello came without it"):
            open_blocking(f"127.0.0.1:{job.port}", b"0123456789abcdef" * 4, job="test", purpose="operator", timeout=20)
        job.replace(1)
        report = job.finish()
        assert_sound(report, steps=36)
        assert [failure["replica"] for failure in report["failures"]] == [1]
        assert {job.exit_code(0), job.exit_code(1, attempt=1)} == {0}
        assert job.exit_code(1) == -signal.SIGKILL


def test_a_rank_without_its_certificates_ends_with_one_sentence(authority: Authority, tmp_path: Path) -> None:
    environment = {"FTHSDP_TLS_DIR": str(authority.issue(tmp_path / "tls"))}
    with running(Job(tmp_path / "job", replicas=0, ranks=1, environment=environment)) as job:
        (tmp_path / "tls" / "tls.key").unlink()
        job.start_replica(0)
        assert job.exit_code(0) == 2
        assert job.log("r0-a0-0").endswith(f"{tmp_path}/tls/tls.key: No such file or directory\n")
