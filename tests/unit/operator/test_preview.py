"""``fthsdp plan`` says what the operator would do, by the operator's own rules, and refuses what it cannot read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.operator import test_survival
from tests.unit.operator.world import NAME, NOW, World, manifest

from fthsdp_operator import cli
from fthsdp_operator.api import KIND, format_time
from fthsdp_operator.cluster import Manifest
from fthsdp_operator.preview import Preview, preview
from fthsdp_operator.rules.actions import Create, Delete

ROOT = Path(__file__).parents[3]


def pods_of(world: World) -> list[Manifest]:
    return [{"apiVersion": "v1", **it} for (kind, _), it in world.objects.items() if kind == "Pod"]


def seen(world: World) -> Preview:
    objects = [world.objects[KIND, NAME], *pods_of(world)]
    return preview(objects, world.now, coordinator_image=world.coordinator_image, with_pods=True)


def training() -> World:
    world = World()
    asyncio.run(world.train())
    world.coordinator = None  # no file says what it would say
    return world


def calls(found: Preview) -> list[str]:
    """What it would do, as the world notes it."""
    said = []
    for action in found.todo.actions:
        if isinstance(action, Create):
            said.append(f"create {action.manifest['kind']} {action.manifest['metadata']['name']}")
        elif isinstance(action, Delete):
            said.append(f"delete {action.kind} {action.name}")
        else:
            said.append(f"tell {action.message.replica}")
    return said


@pytest.mark.parametrize("story", test_survival.STORIES, ids=lambda story: story.__name__)
def test_it_foresees_what_the_operator_does(story: Callable[[World], None]) -> None:
    world = training()
    world.last_words.clear()
    story(world)
    world.last_words.clear()  # nobody but a watch has heard them
    before, foreseen = world.objects[KIND, NAME]["status"], seen(world)
    world.writes.clear()
    asyncio.run(world.look())
    assert calls(foreseen) == [write for write in world.writes if write != "status"]
    assert foreseen.data()["status"] == {"before": before, "after": world.objects[KIND, NAME]["status"]}


def test_it_says_in_words_what_happens_to_a_failed_replica_and_why() -> None:
    world = training()
    world.exits("r2-a0-1", 1)
    words = "\n".join(seen(world).words())
    for line in (
        f"Job team/llama, Running, as of {format_time(NOW)}",
        "  Its Secret, ConfigMap, Service, ServiceAccount and Role are taken to be there.",
        "  condition Degraded: False -> True (ReplicasMissing: replica 2 is Pending)",
        "  state Running -> Degraded",
        "  ready 3/3 -> 2/3",
        "  1. tell the coordinator that attempt 0 of replica 2 is gone: r2 llama-r2-a0-1 Error exit 1",
        "  2. delete Pod llama-r2-a0-0, llama-r2-a0-1: its replica failed, and starts again as attempt 1",
        "  3. create Pod llama-r2-a1-0, llama-r2-a1-1: attempt 1 of replica 2 lacks it",
        "  Warning ReplicaFailed: r2 llama-r2-a0-1 Error exit 1; attempt 1 starts now",
        "It looks again when something happens, and in 2.0 s in any case.",
    ):
        assert f"{line}\n" in f"{words}\n"
    assert "replica 0" not in words
    assert "  replica 2: state Active -> Pending, attempt 0 -> 1, restarts 0 -> 1" in words


def test_of_a_job_that_is_as_it_should_be_it_says_so() -> None:
    words = list(seen(training()).words())
    assert words[1:] == [
        "  Its Secret, ConfigMap, Service, ServiceAccount and Role are taken to be there.",
        "  Its coordinator is not asked: what it said last stands in the status.",
        "  Nothing is known of node node-1: what follows from the state of nodes is left out.",
        "",
        "The status stays as it is.",
        "",
        "Nothing is to be done.",
        "",
        "There is nothing to tell.",
        "",
        "It looks again when something happens, and in 2.0 s in any case.",
    ]


def test_a_job_that_waits_says_until_when() -> None:
    world = training()
    for _ in range(2):
        world.exits(f"r0-a{world.job.status.replica_statuses[0].attempt}-0", 1)
        asyncio.run(world.settle())
    found = seen(world)
    assert found.data()["lookAgain"] == format_time(NOW + 2)
    entry = found.todo.status.replica_statuses[0]
    assert entry.state == "Backoff"
    assert entry == world.job.status.replica_statuses[0]


def test_many_pods_of_one_replica_take_one_line() -> None:
    job = manifest(podsPerReplica=100)
    words = list(preview([job], NOW, coordinator_image="x", with_pods=False).words())
    assert "  8. create Pod llama-r0-a0-0 … llama-r0-a0-99 (100 of them): attempt 0 of replica 0 lacks it" in words


def test_pods_of_others_are_passed_over_and_that_is_said() -> None:
    world = training()
    stranger = {"kind": "Pod", "metadata": {"name": "x", "namespace": "team", "labels": {"app": "y"}}}
    earlier = json.loads(json.dumps(pods_of(world)[0]))
    earlier["metadata"]["labels"]["fthsdp.dev/job-uid"] = "another"
    elsewhere = json.loads(json.dumps(pods_of(world)[1]))
    elsewhere["metadata"]["namespace"] = "elsewhere"
    objects = [world.objects[KIND, NAME], *pods_of(world), stranger, earlier, elsewhere]
    found = preview(objects, NOW, coordinator_image="x", with_pods=True)
    assert found.assumed[0] == "3 pods are not of this job: passed over."
    assert found.todo.actions == ()


def node(**status: Any) -> Manifest:
    ready = {"type": "Ready", "status": "True"}
    conditions = [ready, *({"type": name, "status": value} for name, value in status.items())]
    return {"kind": "Node", "metadata": {"name": "node-1"}, "status": {"conditions": conditions}}


def foreseen_with(world: World, *nodes: Manifest) -> Preview:
    objects = [world.objects[KIND, NAME], *pods_of(world), *nodes]
    return preview(objects, NOW, coordinator_image="x", with_pods=True)


def test_what_follows_from_nodes_is_foreseen_where_they_are_given() -> None:
    world = World(manifest(failurePolicy={"inPlace": {}}, nodePolicy={"forceDelete": True}))
    asyncio.run(world.train())
    world.coordinator = None
    for index in range(2):
        world.user_deletes(f"r2-a0-{index}")
    asyncio.run(world.settle())
    world.now += 60
    lost = node()
    since = {"status": "Unknown", "lastTransitionTime": format_time(NOW - 60)}
    lost["status"]["conditions"][0] |= since
    objects = [world.objects[KIND, NAME], *pods_of(world), lost, {"kind": "Node", "metadata": {"name": "another"}}]
    found = preview(objects, world.now, coordinator_image="x", with_pods=True)
    words = "\n".join(found.words())
    assert "delete by force Pod llama-r2-a0-0, llama-r2-a0-1: its grace period is over" in words
    assert "Nothing is known of node" not in words


def test_nodes_of_which_nothing_is_given_are_named() -> None:
    world = training()
    sentence = "Nothing is known of node node-1: what follows from the state of nodes is left out."
    assert sentence in foreseen_with(world).assumed
    assert sentence not in foreseen_with(world, node(GPUMissing="True")).assumed


def test_what_belongs_to_the_job_is_missed_only_where_it_was_given() -> None:
    world = training()
    given = [it for (kind, _), it in world.objects.items() if kind not in ("Service",)]
    found = preview(given, NOW, coordinator_image="x", with_pods=True)
    assert calls(found) == [f"create Service {NAME}"]
    assert not any("taken to be there" in sentence for sentence in found.assumed)


# --- the command ----------------------------------------------------------------------------------------------------


def write(path: Path, *documents: Any) -> Path:
    path.write_text(yaml.safe_dump_all(documents))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[World, Path]:
    """A job of which a pod of replica 1 failed, and its file."""
    world = training()
    world.exits("r1-a0-0", 1)
    return world, write(tmp_path / "job.yaml", world.objects[KIND, NAME])


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    assert cli.main(["plan", *map(str, words), "--at", format_time(NOW), "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("form", ["List", "PodList", "documents", "files", "with the job"])
def test_pods_come_in_any_form_in_which_they_are_printed(
    files: tuple[World, Path], form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, job = files
    pods = pods_of(world)
    paths = [tmp_path / "pods.yaml"]
    if form == "List":
        write(paths[0], {"apiVersion": "v1", "kind": "List", "items": pods})
    elif form == "PodList":
        bare = [{name: value for name, value in pod.items() if name not in ("kind", "apiVersion")} for pod in pods]
        write(paths[0], {"apiVersion": "v1", "kind": "PodList", "items": bare})
    elif form == "documents":
        write(paths[0], *pods)
    elif form == "files":
        paths = [write(tmp_path / f"pod-{number}.yaml", pod) for number, pod in enumerate(pods)]
    else:
        paths = []
        write(job, {"kind": "List", "items": [world.objects[KIND, NAME], *pods]})
    found = run(capsys, job, *paths)
    assert found["status"]["after"]["replicaStatuses"][1]["attempt"] == 1
    assert [list(action) for action in found["actions"]] == [["tell"], *[["delete"]] * 2, *[["create"]] * 2]


def test_a_new_job_needs_no_pods_and_its_key_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, ROOT / "examples" / "tiny-llama.yaml")
    (secret,) = [it["create"] for it in found["actions"] if it["create"]["kind"] == "Secret"]
    assert secret["stringData"] == {"key": "made at random when it is created"}
    assert len(found["actions"]) == 13
    assert found["assumed"] == []


def test_yaml_and_words_say_the_same(files: tuple[World, Path], capsys: pytest.CaptureFixture[str]) -> None:
    world, job = files
    write(job, world.objects[KIND, NAME], *pods_of(world))
    expected = run(capsys, job)
    assert cli.main(["plan", str(job), "--at", format_time(NOW), "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == expected
    assert cli.main(["plan", str(job), "--at", format_time(NOW)]) == 0
    assert capsys.readouterr().out == "\n".join(seen(world).words()) + "\n"


def job_file(tmp_path: Path, change: Callable[[Manifest], object]) -> Path:
    job = manifest()
    change(job)
    return write(tmp_path / "job.yaml", job)


def labelled(**pod: Any) -> Manifest:
    labels = {"fthsdp.dev/job": NAME, "fthsdp.dev/job-uid": "job-1", "fthsdp.dev/role": "trainer"}
    numbers = dict.fromkeys(("fthsdp.dev/replica", "fthsdp.dev/attempt", "fthsdp.dev/pod-index"), "0")
    return {"kind": "Pod", "metadata": {"name": "p", "labels": labels | numbers}, **pod}


GOOD_JOB: Callable[[Manifest], object] = lambda job: None  # noqa: E731
HAS_RUN: Callable[[Manifest], object] = lambda job: job.update(status={"observedGeneration": 1})  # noqa: E731
NO_UID: Callable[[Manifest], object] = lambda job: job["metadata"].pop("uid")  # noqa: E731


@pytest.mark.parametrize(
    ("change", "pods", "words"),
    [
        (lambda job: job["spec"].update(minReplicas=9), None, "spec.minReplicas is above replicas"),
        (lambda job: job["spec"].update(replica=9), None, "spec.replica is not a field"),
        (lambda job: job.update(kind="Job"), None, "there are 0 objects of kind FTHSDPJob: give one"),
        (GOOD_JOB, manifest(), "there are 2 objects of kind FTHSDPJob: give one"),
        (lambda job: job.update(status=5), None, "status"),
        (HAS_RUN, None, "has a status, so it has had pods: give those there are as well, as 'kubectl get pods"),
        (
            NO_UID,
            labelled(),
            "has no metadata.uid, so no pod is its own: give it as 'kubectl get fthsdp llama -o yaml'",
        ),
        (GOOD_JOB, "text", "holds a str: it has to hold Kubernetes objects"),
        (GOOD_JOB, {"metadata": {"name": "p"}}, "holds an object without a kind"),
        (GOOD_JOB, {"kind": "Pod"}, "holds a Pod without metadata.name"),
        (GOOD_JOB, {"kind": "List"}, "the List has no items"),
        (GOOD_JOB, {"kind": "List", "items": [3]}, "holds a int: it has to hold Kubernetes objects"),
        (GOOD_JOB, {"kind": "Deployment", "metadata": {"name": "d"}}, "Deployment d: give a FTHSDPJob, its pods, and"),
        (GOOD_JOB, {"kind": "Node", "metadata": {"name": "n"}, "status": 5}, "Node n is not as 'kubectl get nodes"),
        (GOOD_JOB, labelled(status=5), "Pod p is not as 'kubectl get pods -o yaml' prints one"),
        (GOOD_JOB, labelled(status={"containerStatuses": 5}), "Pod p is not as"),
        (GOOD_JOB, {"kind": "Pod", "metadata": {"name": "p", "labels": 3}}, "Pod p is not as"),
    ],
)
def test_bad_input_gets_one_sentence(
    change: Callable[[Manifest], object],
    pods: Any,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(job_file(tmp_path, change)), *([] if pods is None else [str(write(tmp_path / "pods.yaml", pods))])]
    code = cli.main(["plan", *given])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err.startswith("fthsdp: ")
    assert words in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        ([str(ROOT / "examples" / "tiny-llama.yaml"), "--at", "noon"], "--at noon: it has to be a time like 2026-"),
    ],
)
def test_a_bad_argument_gets_one_sentence(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    assert capsys.readouterr().err.startswith(f"fthsdp: {complaint}")
