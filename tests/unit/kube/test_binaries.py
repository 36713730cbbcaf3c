"""How Kubernetes is built from modules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cluster.kube.binaries import PROGRAMS, cache_folder, kubernetes_go_mod, missing_programs
from tests.cluster.kube.shell import ClusterError, run

PUBLISHED = """\
module k8s.io/kubernetes

go 1.26.0

godebug default=go1.26

require (
\tgithub.com/other/module v0.0.0
\tk8s.io/api v0.0.0
\tk8s.io/klog/v2 v2.140.0
\tk8s.io/kubectl v0.0.0
)

replace k8s.io/api => ./staging/src/k8s.io/api
"""


def test_staging_modules_are_replaced_by_the_published_ones() -> None:
    assert kubernetes_go_mod(PUBLISHED).splitlines() == [
        "module build/kubernetes",
        "go 1.26.0",
        "godebug default=go1.26",
        "require k8s.io/kubernetes v1.37.2",
        "replace (",
        "\tk8s.io/api => k8s.io/api v0.37.2",
        "\tk8s.io/kubectl => k8s.io/kubectl v0.37.2",
        ")",
    ]


def test_only_programs_that_can_be_run_count_as_built(tmp_path: Path) -> None:
    for program in PROGRAMS:
        (tmp_path / program.name).touch(mode=0o755)
    (tmp_path / "etcd").chmod(0o644)
    (tmp_path / "helm").unlink()
    assert {program.name for program in missing_programs(tmp_path)} == {"etcd", "helm"}


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fthsdp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path(os.path.expanduser("~")) / ".cache" / "fthsdp"


def test_a_program_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(ClusterError, match=r"ls /no/such: exit code 2: .*No such file"):
        run("ls", "/no/such")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ClusterError, match="no-such-program is not installed"):
        run("no-such-program")
