"""Bad manifests: one sentence each, before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fthsdp.errors import ConfigError
from fthsdp_operator.local.manifest import load_job


def job(**spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "x", "command": ["python", "-c", "pass"]}
    whole = {"replicas": 3, "template": {"spec": {"containers": [container]}}, **spec}
    return {"apiVersion": "fthsdp.dev/v1alpha1", "kind": "FTHSDPJob", "metadata": {"name": "j"}, "spec": whole}


def test_a_good_manifest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job(minReplicas=2)))
    manifest, parsed = load_job(file)
    assert manifest["spec"]["minReplicas"] == parsed.spec.min_replicas == 2


def test_what_the_api_server_wrote_is_not_part_of_the_job(tmp_path: Path) -> None:
    served = {**job(), "status": {"state": "Complete"}}
    served["metadata"] |= {"uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z", "labels": {"team": "a"}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(served))
    manifest, _ = load_job(file)
    assert "status" not in manifest
    assert manifest["metadata"] == {"name": "j", "labels": {"team": "a"}}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [1, 2", "is not YAML: .* in line 1"),
        ("", "holds 0 documents"),
        ("a: 2001-99-99", "cannot be read: month must be in 1..12"),
        ("[" * 5000, "cannot be read: maximum recursion depth"),
        ("a: 1\n---\nb: 2\n", "holds 2 documents"),
        ("- a\n- b\n", "holds a list"),
        (b"\xff\xfe\x00\x01", "is not text"),
        (yaml.safe_dump({"kind": "Pod"}), "apiVersion is missing: it has to be fthsdp.dev/v1alpha1"),
        (yaml.safe_dump(job(minReplicas=4)), "minReplicas is above replicas"),
        (yaml.safe_dump(job(replicas="three")), "spec.replicas is 'three': it has to be a whole number"),
        (yaml.safe_dump(job(suspend=True)), "spec.suspend is true: on this machine nobody can set it to false"),
        (yaml.safe_dump(job(tls={"secretName": "s"})), "spec.tls names a Secret of a cluster: on this machine nothing"),
        (yaml.safe_dump(job(replica=3)), "spec.replica is not a field"),
        (yaml.safe_dump(job(template={"spec": {"containers": []}})), "containers is missing or empty"),
        (yaml.safe_dump(job(template={"spec": {"containers": [{"name": "m"}]}})), "has no command"),
    ],
)
def test_a_bad_manifest_is_refused_in_one_sentence_that_names_the_file(
    tmp_path: Path, text: str | bytes, complaint: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_job(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.yaml: No such file"):
        load_job(tmp_path / "job.yaml")
