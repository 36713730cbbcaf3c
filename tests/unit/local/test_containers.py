"""How a pod's manifest becomes a command line on this machine."""

import os
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from fthsdp.errors import ConfigError
from fthsdp_operator.local.containers import check_template, localised, mount_folders, volume_files

SHM = "/dev/shm"
KEY = {"kind": "Secret", "metadata": {"name": "j-key"}, "data": {"key": b64encode(b"0123456789abcdef").decode()}}


def pod(**container: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "j-r0-a0-0", "namespace": "default", "labels": {"fthsdp.dev/replica": "0"}},
        "spec": {
            "containers": [{"name": "trainer", "command": ["python", "-c", "pass"], **container}],
            "volumes": [{"name": "key", "secret": {"secretName": "j-key"}}, {"name": "scratch", "emptyDir": {}}],
        },
    }


def lookup(kind: str, name: str) -> dict[str, Any] | None:
    return KEY if (kind, name) == ("Secret", "j-key") else None


def launch(manifest: dict[str, Any], **overrides: str) -> Any:
    outer = {"PATH": "/usr/bin", "HOME": "/root", "FTHSDP_REPLICA": "7", "RANK": "3", "MASTER_PORT": "1"}
    folders = mount_folders(manifest, Path("/run"))
    return localised(manifest, overrides=overrides, folders=folders, lookup=lookup, outer=outer)


def test_python_is_the_interpreter_that_runs_fthsdp() -> None:
    assert launch(pod()).argv == (sys.executable, "-c", "pass")
    assert launch(pod()).env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_arguments_follow_the_command_and_refer_to_variables_as_in_kubernetes() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)2"}]
    manifest = pod(command=["run", "$(B)"], args=["$(NOBODY)", "$$(A)", "x$(A)"], env=env)
    assert launch(manifest).argv == ("run", "12", "$(NOBODY)", "$(A)", "x1")


def test_a_pod_does_not_inherit_the_launchers_own_place_in_a_job() -> None:
    env = launch(pod()).env
    assert env["HOME"] == "/root"
    assert not {"FTHSDP_REPLICA", "RANK", "MASTER_PORT"} & set(env)


def test_what_differs_on_this_machine_wins_over_the_manifest_and_is_not_added_where_it_is_absent() -> None:
    env = launch(pod(env=[{"name": "MASTER_PORT", "value": "29500"}]), MASTER_PORT="21000", MASTER_ADDR="127.0.0.1").env
    assert env["MASTER_PORT"] == "21000"
    assert "MASTER_ADDR" not in env


def test_paths_below_a_mounted_volume_point_into_its_folder() -> None:
    mounts = [{"name": "key", "mountPath": "/var/run/fthsdp"}, {"name": "scratch", "mountPath": "/scratch"}]
    manifest = pod(
        command=["run", "/scratch/x", "/scratchy", "/var/run/fthsdp/key"],
        volumeMounts=mounts,
        env=[{"name": "FTHSDP_JOB_KEY_FILE", "value": "/var/run/fthsdp/key"}],
    )
    assert launch(manifest).argv == ("run", "/run/scratch/x", "/scratchy", "/run/key/key")
    assert launch(manifest).env["FTHSDP_JOB_KEY_FILE"] == "/run/key/key"


def test_secrets_become_files_and_empty_volumes_become_folders() -> None:
    assert volume_files(pod(), lookup) == {"key/": b"", "key/key": b"0123456789abcdef", "scratch/": b""}


def test_shared_memory_is_that_of_this_machine() -> None:
    manifest = pod(command=["run", f"{SHM}/x"], volumeMounts=[{"name": "fthsdp-shm", "mountPath": SHM}])
    manifest["spec"]["volumes"].append({"name": "fthsdp-shm", "emptyDir": {"medium": "Memory"}})
    assert launch(manifest).argv == ("run", f"{SHM}/x")
    assert "fthsdp-shm/" not in volume_files(manifest, lookup)


def test_values_come_from_the_pods_fields_and_from_secrets() -> None:
    env = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "R", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['fthsdp.dev/replica']"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "j-key", "key": "key"}}},
        {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "other", "key": "key", "optional": True}}},
    ]
    got = launch(pod(env=env)).env
    assert [got.get(n) for n in ("IP", "NAME", "R", "KEY")] == ["127.0.0.1", "j-r0-a0-0", "0", "0123456789abcdef"]
    assert "NONE" not in got


def test_a_secret_that_is_not_here_is_named() -> None:
    env = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
    with pytest.raises(ConfigError, match="variable TOKEN needs key token of Secret hub"):
        launch(pod(env=env))


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ({"spec": {"containers": []}}, "containers is empty"),
        ({"spec": {}}, "containers is empty"),
        ({"spec": {"containers": [{"name": "main", "image": "x"}]}}, "has no command"),
        (
            {"spec": {"containers": [{"command": ["x"], "env": [{"name": "G", "valueFrom": {"fileKeyRef": {}}}]}]}},
            "variable G takes its value from fileKeyRef",
        ),
    ],
)
def test_a_template_that_cannot_run_here_is_refused_before_anything_starts(
    template: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_template(template)
