"""Pod templates as people have them, on an API server: it takes the jobs, and the pods that are made of them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_crd import GOOD
from tests.cluster.apiserver.test_apiserver_operator import Story
from tests.unit.operator.templates import TEMPLATES

from fthsdp_operator.api import MAX_JOB_NAME, Job, parse_job
from fthsdp_operator.cluster import NamespaceEnding
from fthsdp_operator.kube.apiserver import Access, KubernetesCluster
from fthsdp_operator.manifests import render
from fthsdp_operator.rules.actions import Event

pytestmark = pytest.mark.cluster

Manifest = dict[str, Any]
STRICT = ("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-")


def job_with(template: Manifest, *, name: str = "llama", **spec: Any) -> Manifest:
    return {**GOOD, "metadata": {"name": name}, "spec": {**GOOD["spec"], "template": template, **spec}}


def taken(apiserver: ApiServer, namespace: str, manifest: Manifest) -> Manifest:
    """Return what the API server makes of an object; it is not kept."""
    answer: Manifest = json.loads(apiserver.kubectl("-n", namespace, *STRICT, stdin=json.dumps(manifest)))
    return answer


@pytest.fixture
def accounts(apiserver: ApiServer, namespace: str) -> str:
    """Return a namespace with the service accounts that pods name: admission looks for them."""
    for name in ("default", "trainer"):
        apiserver.account(namespace, name)
    return namespace


def as_job(made: Manifest, namespace: str) -> Job:
    """Return a job as the operator reads it."""
    return parse_job(made | {"metadata": made["metadata"] | {"namespace": namespace, "uid": "0b1c"}})


def test_jobs_and_pods_of_all_templates_are_taken(apiserver: ApiServer, accounts: str) -> None:
    for words, template in TEMPLATES.items():
        job = as_job(taken(apiserver, accounts, job_with(template)), accounts)
        assert job.spec.template == template, words  # not a field of it is lost
        for index in (0, 1):
            pod = render.training_pod(job, replica=2, attempt=1, index=index)
            answer = taken(apiserver, accounts, pod)
            ports = [port for one in answer["spec"]["containers"] for port in one.get("ports", [])]
            assert len({port.get("hostPort", number) for number, port in enumerate(ports)}) == len(ports), words


def test_the_longest_names_are_taken(apiserver: ApiServer, accounts: str) -> None:
    longest = job_with(TEMPLATES["the network of the node"], name="a" * MAX_JOB_NAME, network={"masterPort": 60000})
    job = as_job(taken(apiserver, accounts, longest), accounts)
    pod = render.training_pod(job, replica=1023, attempt=999_999, index=4095)
    assert len(taken(apiserver, accounts, pod)["metadata"]["name"]) == 59


def test_a_generated_name_has_to_fit_as_well(apiserver: ApiServer, namespace: str) -> None:
    job = job_with(TEMPLATES["as little as possible"])
    job["metadata"] = {"generateName": "llama-"}
    made = taken(apiserver, namespace, job)
    assert made["metadata"]["name"].startswith("llama-")
    assert parse_job(made).name == made["metadata"]["name"]
    job["metadata"] = {"generateName": "a" * (MAX_JOB_NAME - 4)}
    said = apiserver.kubectl("-n", namespace, *STRICT, stdin=json.dumps(job), fails=True)
    assert f"metadata.name has to be at most {MAX_JOB_NAME} lower-case letters" in said


# --- what the API server refuses ---


@pytest.fixture
def story(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Story:
    return Story(apiserver, namespace, tmp_path)


def stalled(story: Story) -> Manifest:
    conditions = story.job().get("status", {}).get("conditions", [])
    return next((it for it in conditions if it["type"] == "Stalled"), {})


def lines(story: Story, words: str) -> int:
    return story.log.read_text(errors="replace").count(words) if story.log.exists() else 0


LIMITS: Manifest = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "small"},
    "spec": {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]},
}
QUOTA: Manifest = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "few"},
    "spec": {"hard": {"pods": "0"}},
    "status": {"hard": {"pods": "0"}, "used": {"pods": "0"}},
}


@pytest.mark.parametrize(
    ("limit", "reason", "words"),
    [(LIMITS, "CallRefused", "maximum memory usage per Container is 1Gi"), (QUOTA, "QuotaExceeded", "exceeded quota")],
    ids=["limit", "quota"],
)
def test_a_limit_is_said_and_tried_again_ever_more_rarely(
    story: Story, limit: Manifest, reason: str, words: str
) -> None:
    kind, name = limit["kind"].lower(), limit["metadata"]["name"]
    story.kubectl("create", "-f", "-", stdin=json.dumps(limit))
    if kind == "resourcequota":  # no controller counts here
        patch = json.dumps({"status": limit["status"]})
        story.kubectl("patch", kind, name, "--subresource=status", "--type=merge", "-p", patch)
    big = {"spec": {"containers": [{"name": "train", "image": "x", "resources": {"limits": {"memory": "2Gi"}}}]}}
    begun = time.monotonic()
    with story.operator():
        story.kubectl("apply", "-f", "-", stdin=json.dumps(job_with(big)))
        story.until(lambda: stalled(story).get("status") == "True", "the job says that it is stalled")
        assert stalled(story)["reason"] == reason
        assert words in stalled(story)["message"]
        story.until(lambda: words in story.kubectl("describe", "fthsdp", "llama"), "an event says why")
        story.until(lambda: lines(story, "again in 3.2 s") > 0, "it waits longer and longer")
        assert lines(story, "again in") < 4 + (time.monotonic() - begun)
        story.kubectl("delete", kind, name)
        story.until(lambda: len(story.pods()) == 7, "all pods are there")
        story.until(lambda: stalled(story).get("status") == "False", "the job says that it goes on")


def test_a_namespace_that_is_being_deleted_is_known_by_what_it_answers(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes nothing new, and no event that says so."""
    anchor = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "anchor", "finalizers": ["a.dev/slow"]}}
    story.kubectl("create", "-f", "-", stdin=json.dumps(anchor))  # so that the namespace stays for a while
    story.kubectl("delete", "namespace", story.namespace, "--wait=false")
    job = as_job(job_with(TEMPLATES["as little as possible"]), story.namespace)

    async def create() -> None:
        access = Access(kubeconfig=str(story.server.kubeconfig))
        cluster = await KubernetesCluster.connect(access, coordinator_image="x")
        try:
            with pytest.raises(NamespaceEnding, match="because it is being terminated"):
                await cluster.create(render.training_pod(job, replica=0, attempt=0, index=0))
            await cluster.record_event(job, Event(reason="Running", message="3/3"), time.time())
        finally:
            await cluster.close()

    asyncio.run(create())
    assert [it for it in caplog.records if it.levelno >= logging.WARNING] == []
    story.kubectl("patch", "configmap", "anchor", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
