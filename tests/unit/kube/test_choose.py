"""Which cluster the tests get."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.kube.choose import NoClusterError, given_cluster

IMAGES = {"FTHSDP_TEST_OPERATOR_IMAGE": "mirror/operator:1", "FTHSDP_TEST_TRAINER_IMAGE": "mirror/trainer:1"}


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "config"
    path.touch()
    return path


def test_nothing_is_given_where_nothing_is_set() -> None:
    assert given_cluster({}) is None
    assert given_cluster({"KUBECONFIG": ""}) is None


def test_the_tests_own_variable_goes_before_the_common_one(kubeconfig: Path) -> None:
    given = given_cluster({"KUBECONFIG": "/elsewhere", "FTHSDP_TEST_KUBECONFIG": str(kubeconfig), **IMAGES})
    assert given
    assert given.kubeconfig == kubeconfig
    assert given.operator_image() == "mirror/operator:1"
    assert given.training().image == "mirror/trainer:1"
    assert given.training().volumes == []


def test_a_kubeconfig_that_is_not_there_is_named() -> None:
    with pytest.raises(NoClusterError, match="KUBECONFIG=/no/such is not a file"):
        given_cluster({"KUBECONFIG": "/no/such", **IMAGES})


def test_a_given_cluster_without_images_to_pull_is_refused(kubeconfig: Path) -> None:
    with pytest.raises(NoClusterError, match="set FTHSDP_TEST_TRAINER_IMAGE"):
        given_cluster({"KUBECONFIG": str(kubeconfig), "FTHSDP_TEST_OPERATOR_IMAGE": "mirror/operator:1"})
