"""The user's template is taken as it is; what is added lets a pod know who it is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.unit.operator.templates import TEMPLATES
from tests.unit.operator.world import NAME, manifest

from fthsdp.data.policies import BatchPolicy, LrPolicy, Policies
from fthsdp.environment import Identity
from fthsdp_operator.api import POD_INDEX_LABEL, parse_job
from fthsdp_operator.manifests import render

Manifest = dict[str, Any]


def pod(**spec: Any) -> Manifest:
    return render.training_pod(parse_job(manifest(**spec)), replica=2, attempt=1, index=1)


def template(**fields: Any) -> Manifest:
    container = {"name": "train", "image": "x", "env": [{"name": "A", "value": "$(FTHSDP_REPLICA)"}]}
    return {"spec": {"containers": [container], **fields}}


def environment(made: Manifest, container: int = 0) -> dict[str, str]:
    env = made["spec"]["containers"][container]["env"]
    return {it["name"]: it.get("value", "10.0.0.1") for it in env}


def test_a_pod_knows_who_it_is() -> None:
    identity = Identity.from_environment(environment(pod()))
    assert (identity.job, identity.replica, identity.attempt) == (NAME, 2, 1)
    assert (identity.rank, identity.world_size, identity.host) == (1, 2, "10.0.0.1")
    assert identity.coordinator == f"{NAME}-coordinator.{NAME}:29400"


def test_a_pod_knows_the_policies_and_where_checkpoints_are() -> None:
    env = environment(pod(batchPolicy="Constant", checkpoint={"path": "/data/$(x)", "everySteps": 100}))
    assert Policies.from_environment(env) == Policies(batch=BatchPolicy.CONSTANT)
    assert (env["FTHSDP_CHECKPOINT_PATH"], env["FTHSDP_CHECKPOINT_EVERY"]) == ("/data/$$(x)", "100")
    assert Policies.from_environment(environment(pod(lrPolicy="Sqrt"))) == Policies(lr=LrPolicy.SQRT)
    assert not [name for name in environment(pod()) if "CHECKPOINT" in name]


def test_the_coordinator_is_told_how_many_train_and_how_many_wait() -> None:
    made = render.coordinator_pod(parse_job(manifest(spares=2)), image="ours:1")
    words = made["spec"]["containers"][0]["command"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert (options["--replicas"], options["--min-replicas"], options["--spares"]) == ("3", "2", "2")


def test_the_coordinator_is_told_for_how_long_to_wait() -> None:
    job = parse_job(manifest(coordinator={"silenceTimeoutSeconds": 30, "stallTimeoutSeconds": 900}))
    command = render.coordinator_pod(job, image="x")["spec"]["containers"][0]["command"]
    told = dict(itertools.pairwise(command))
    assert [told[f"--{name}-timeout"] for name in ("start", "silence", "stall")] == ["600", "30", "900"]


def test_a_coordinator_is_replaced_for_another_time_and_not_for_a_field_that_has_its_default() -> None:
    usual, same, other = (
        render.coordinator_config(parse_job(manifest(coordinator=fields)))
        for fields in ({}, {"stallTimeoutSeconds": 300}, {"stallTimeoutSeconds": 301})
    )
    assert usual == same != other
    assert usual == '{"replicas": 3, "minReplicas": 2, "spares": 0}'


def test_the_coordinator_goes_where_the_job_says_and_not_where_the_template_does() -> None:
    where = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"operator": "Exists"}], "priorityClassName": "high"}
    for coordinator, expected in ((where, where), ({}, {})):
        job = parse_job(manifest(coordinator=coordinator, template=template(nodeSelector={"pool": "gpu"})))
        made = render.coordinator_pod(job, image="x")["spec"]
        assert {name: made[name] for name in where if name in made} == expected


def test_a_coordinator_is_replaced_when_it_is_to_go_elsewhere() -> None:
    fields = ({}, {"nodeSelector": {}, "tolerations": []}, {"tolerations": [{"operator": "Exists"}]})
    usual, same, other = (render.coordinator_config(parse_job(manifest(coordinator=given))) for given in fields)
    assert usual == same != other


@pytest.mark.parametrize(("given", "told"), [({}, "30"), ({"terminationGracePeriodSeconds": None}, "30")] + [
    ({"terminationGracePeriodSeconds": seconds}, str(seconds)) for seconds in (0, 1, 600)
])  # fmt: skip
def test_a_pod_knows_how_long_it_has_for_its_end(given: Manifest, told: str) -> None:
    assert environment(pod(template=template(**given)))["FTHSDP_GRACE_SECONDS"] == told


def test_torchrun_finds_its_numbers() -> None:
    env = environment(pod(processesPerPod=8))
    assert (env["PET_NNODES"], env["PET_NODE_RANK"], env["PET_NPROC_PER_NODE"]) == ("2", "1", "8")
    assert env["MASTER_ADDR"] == env["PET_MASTER_ADDR"] == f"{NAME}-r2-a1-0.{NAME}"
    assert env["MASTER_PORT"] == env["PET_MASTER_PORT"] == "29500"


def test_our_environment_comes_first_so_that_the_users_can_refer_to_it() -> None:
    env = pod(template=template())["spec"]["containers"][0]["env"]
    assert env[-1] == {"name": "A", "value": "$(FTHSDP_REPLICA)"}
    assert env[0]["name"] == "FTHSDP_POD_INDEX"


def test_every_container_gets_environment_and_key() -> None:
    data = {"name": "data", "mountPath": "/data"}
    side = {"name": "side", "image": "y", "volumeMounts": [data]}
    first = {"name": "first", "image": "z"}
    made = pod(template=template(containers=[first | {"name": "train"}, side], initContainers=[first], volumes=[data]))
    key = {"name": "fthsdp-key", "mountPath": "/var/run/fthsdp", "readOnly": True}
    (train, beside), (before,) = made["spec"]["containers"], made["spec"]["initContainers"]
    assert {it["env"][0]["name"] for it in (train, beside, before)} == {"FTHSDP_POD_INDEX"}
    assert train["volumeMounts"][0] == key
    assert before["volumeMounts"] == [key]
    assert beside["volumeMounts"] == [data, key]
    assert [volume["name"] for volume in made["spec"]["volumes"]] == ["data", "fthsdp-key", "fthsdp-shm"]


def test_all_pods_get_the_certificates_of_a_job_that_names_them() -> None:
    tls = {"secretName": "certs"}
    coordinator = render.coordinator_pod(parse_job(manifest(tls=tls)), image="ours:1")
    for made in (pod(tls=tls), coordinator):
        assert environment(made)["FTHSDP_TLS_DIR"] == "/var/run/fthsdp-tls"
        secret = {"secretName": "certs", "defaultMode": 0o444}
        assert {"name": "fthsdp-tls", "secret": secret} in made["spec"]["volumes"]
        mount = {"name": "fthsdp-tls", "mountPath": "/var/run/fthsdp-tls", "readOnly": True}
        assert mount in made["spec"]["containers"][0]["volumeMounts"]
    for made in (pod(), render.coordinator_pod(parse_job(manifest()), image="ours:1")):
        assert "FTHSDP_TLS_DIR" not in environment(made)
        assert "fthsdp-tls" not in str(made)


def test_the_rest_of_the_template_is_untouched() -> None:
    fields = {
        "securityContext": {"runAsUser": 1000, "fsGroup": 7},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"operator": "Exists"}],
        "hostIPC": True,
        "serviceAccountName": "mine",
        "terminationGracePeriodSeconds": 120,
    }
    made = pod(template={"metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}}, **template(**fields)})
    assert {name: made["spec"][name] for name in fields} == fields
    assert made["metadata"]["labels"]["team"] == "a"
    assert made["metadata"]["annotations"]["b"] == "c"


def test_a_template_is_not_changed_by_being_used() -> None:
    job = parse_job(manifest())
    first = render.training_pod(job, replica=0, attempt=0, index=0)
    again = render.training_pod(job, replica=0, attempt=0, index=0)
    assert first == again
    assert job == parse_job(manifest())


@pytest.mark.parametrize("of", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_pods_that_are_rendered_together_are_those_that_are_rendered_one_by_one(of: Manifest) -> None:
    job = parse_job(manifest(template=of))
    together = list(render.training_pods(job, replica=1, attempt=2, indices=(0, 1, 5)))
    assert together == [render.training_pod(job, replica=1, attempt=2, index=index) for index in (0, 1, 5)]
    names = [made["metadata"]["name"] for made in together]
    assert names == [made["spec"]["hostname"] for made in together] == [f"{NAME}-r1-a2-{index}" for index in (0, 1, 5)]
    for index, made in zip(("0", "1", "5"), together, strict=True):
        assert made["metadata"]["labels"][POD_INDEX_LABEL] == index
        for container in (*made["spec"]["containers"], *made["spec"].get("initContainers", [])):
            env = {it["name"]: it.get("value") for it in container["env"]}
            assert (env["FTHSDP_POD_INDEX"], env["PET_NODE_RANK"]) == (index, index)
    assert job == parse_job(manifest(template=of))


def test_pods_never_restart_in_place_and_have_a_host_name_of_their_own() -> None:
    made = pod()["spec"]
    assert (made["restartPolicy"], made["hostname"], made["subdomain"]) == ("Never", f"{NAME}-r2-a1-1", NAME)


def test_a_users_termination_message_policy_is_kept() -> None:
    own = {"spec": {"containers": [{"name": "t", "image": "x", "terminationMessagePolicy": "File"}]}}
    assert pod(template=own)["spec"]["containers"][0]["terminationMessagePolicy"] == "File"
    assert pod()["spec"]["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_the_coordinator_runs_with_the_least_rights() -> None:
    made = render.coordinator_pod(parse_job(manifest()), image="ours:1")
    (container,) = made["spec"]["containers"]
    assert made["spec"]["securityContext"]["runAsNonRoot"] is True
    assert made["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["image"] == "ours:1"
    assert container["resources"]["limits"] == {"memory": "256Mi"}


def test_the_job_may_name_the_coordinators_image() -> None:
    made = render.coordinator_pod(parse_job(manifest(coordinator={"image": "mine:2"})), image="ours:1")
    assert made["spec"]["containers"][0]["image"] == "mine:2"


def test_the_coordinator_pulls_its_image_as_the_replicas_pull_theirs() -> None:
    secrets = [{"name": "registry"}]
    for given in ({"imagePullSecrets": secrets}, {}):
        made = render.coordinator_pod(parse_job(manifest(template=template(**given))), image="ours:1")
        assert made["spec"].get("imagePullSecrets") == given.get("imagePullSecrets")


def test_the_coordinator_may_touch_only_the_epoch_of_its_job() -> None:
    made = {it["kind"]: it for it in render.support(parse_job(manifest()), key="k")}
    (rule,) = made["Role"]["rules"]
    assert rule["resourceNames"] == [made["ConfigMap"]["metadata"]["name"]] == [f"{NAME}-epoch"]
    assert rule["verbs"] == ["get", "update"]


def test_members_find_each_other_before_anybody_is_ready() -> None:
    made = {it["kind"]: it for it in render.support(parse_job(manifest()), key="k")}
    assert made["Service"]["spec"]["clusterIP"] == "None"
    assert made["Service"]["spec"]["publishNotReadyAddresses"] is True
