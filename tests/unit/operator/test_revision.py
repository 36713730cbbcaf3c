"""A revision follows what the user's template says, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.world import manifest

from fthsdp_operator.api import REVISION_LABEL, parse_job
from fthsdp_operator.manifests import render


def template(**container: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "train", "image": "x", "command": ["train"], **container}]}}


def revision(template: dict[str, Any], **spec: Any) -> str:
    return parse_job(manifest(template=template, **spec)).spec.revision


def test_revisions_are_those_of_every_version_of_the_operator() -> None:
    """Another value here would roll every job of every cluster when its operator is upgraded."""
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "tmp", "emptyDir": {}}]
    rich = template(env=[{"name": "A", "value": "1"}], resources={"limits": {"nvidia.com/gpu": 8}})
    rich["metadata"] = {"labels": {"team": "nlp"}}
    rich["spec"] |= {"volumes": volumes, "nodeSelector": {"gpu": "h200"}}
    assert revision(template()) == "93723afad1"
    assert revision(rich, processesPerPod=8) == "189bb3b9b7"


@pytest.mark.parametrize(
    "same",
    [
        {"spec": {"containers": [{"command": ["train"], "image": "x", "name": "train"}]}},
        {"metadata": {"creationTimestamp": None}, **template()},
        {"metadata": {"labels": {}, "annotations": None}, **template()},
        template(env=[], resources={}, volumeMounts=None),
        template(terminationMessagePath="/dev/termination-log"),
        {"spec": {**template()["spec"], "restartPolicy": "Never", "dnsPolicy": "ClusterFirst"}},
        {"spec": {**template()["spec"], "terminationGracePeriodSeconds": 30, "schedulerName": "default-scheduler"}},
        {"spec": {**template()["spec"], "securityContext": {}, "volumes": [], "initContainers": []}},
    ],
)
def test_a_template_that_says_the_same_has_the_same_revision(same: dict[str, Any]) -> None:
    assert revision(same) == revision(template())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}}, {"resources": {"limits": {"nvidia.com/gpu": "8"}}}),
        ({"ports": [{"containerPort": 80}]}, {"ports": [{"containerPort": 80, "protocol": "TCP"}]}),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "A", "value": ""}]}),
    ],
)
def test_a_value_in_other_words_has_the_same_revision(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert revision(template(**one)) == revision(template(**other)) != revision(template())


@pytest.mark.parametrize(
    "other",
    [
        template(image="y"),
        template(command=["train", ""]),
        template(args=["--lr", "1"]),
        template(env=[{"name": "A", "value": "0"}]),
        template(terminationMessagePolicy="File"),
        {"metadata": {"labels": {"team": "nlp"}}, **template()},
        {"metadata": {"annotations": {"a": ""}}, **template()},
        {"spec": {**template()["spec"], "terminationGracePeriodSeconds": 60}},
        {"spec": {**template()["spec"], "nodeSelector": {"restartPolicy": "Never"}}},
    ],
)
def test_a_template_that_says_something_else_has_another_revision(other: dict[str, Any]) -> None:
    assert revision(other) != revision(template())


def test_the_order_of_a_list_counts() -> None:
    mine, other = ({"name": name, "value": "1"} for name in "AB")
    assert revision(template(env=[mine, other])) != revision(template(env=[other, mine]))


def test_an_empty_selector_selects_everything_and_none_selects_nothing() -> None:
    def spread(selector: object) -> dict[str, Any]:
        constraint = {"maxSkew": 1, "topologyKey": "zone", "labelSelector": selector}
        return {"spec": {**template()["spec"], "topologySpreadConstraints": [constraint]}}

    assert revision(spread({})) != revision(spread(None))


def test_the_number_of_processes_counts_and_nothing_else_of_the_job_does() -> None:
    assert revision(template(), processesPerPod=2) != revision(template())
    others = {"replicas": 8, "spares": 1, "checkpoint": {"path": "/c", "everySteps": 5}, "suspend": True}
    assert revision(template(), **others) == revision(template())


def test_pods_carry_the_revision_as_a_label_and_are_named_without_it() -> None:
    job = parse_job(manifest())
    pod = render.training_pod(job, replica=1, attempt=0, index=0)
    assert pod["metadata"]["labels"][REVISION_LABEL] == job.spec.revision
    assert pod["metadata"]["name"] == "llama-r1-a0-0"
