"""What the scheduler is told about where the pods of a replica go."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.templates import TEMPLATES
from tests.unit.operator.world import manifest

from fthsdp.errors import ConfigError
from fthsdp_operator.api import parse_job
from fthsdp_operator.manifests import render

Manifest = dict[str, Any]
KEY = "example.com/rack"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def affinity(template: Manifest | None = None, *, replica: int = 2, attempt: int = 1, **placement: Any) -> Manifest:
    template = template or TEMPLATES["as little as possible"]
    job = parse_job(manifest(template=template, placement=placement))
    made = render.training_pod(job, replica=replica, attempt=attempt, index=0)
    found: Manifest = made["spec"].get("affinity", {})
    return found


def matches(term: Manifest, pod: Manifest) -> bool:
    """Whether a term speaks of a pod; its namespace aside."""
    labels, selector = pod["metadata"]["labels"], term["labelSelector"]
    apart = selector.get("matchExpressions", [])
    assert {it["operator"] for it in apart} <= {"NotIn"}
    same = selector.get("matchLabels", {}).items() <= labels.items()
    return same and all(labels.get(it["key"]) not in it["values"] for it in apart)


def pod(*, replica: int = 2, attempt: int = 1, index: int = 0, uid: str = "job-1") -> Manifest:
    job = manifest()
    job["metadata"]["uid"] = uid
    return render.training_pod(parse_job(job), replica=replica, attempt=attempt, index=index)


def coordinator() -> Manifest:
    return render.coordinator_pod(parse_job(manifest()), image="x")


def test_without_a_key_pods_go_anywhere() -> None:
    assert affinity() == {}


def test_pods_of_an_attempt_attract_each_other_and_nobody_else() -> None:
    made = affinity(replicaTopologyKey=KEY)
    assert made.keys() == {"podAffinity"}
    (term,) = made["podAffinity"][REQUIRED]
    assert term["topologyKey"] == KEY
    assert matches(term, pod())  # itself too: so the first one goes anywhere
    assert matches(term, pod(index=1))
    strangers = [pod(replica=1), pod(attempt=0), pod(uid="job-2"), coordinator()]
    assert not [it["metadata"]["name"] for it in strangers if matches(term, it)]


def test_an_exclusive_replica_keeps_the_others_of_all_jobs_away_and_no_coordinator() -> None:
    terms = affinity(replicaTopologyKey=KEY, exclusive=True)["podAntiAffinity"][REQUIRED]
    assert {term["topologyKey"] for term in terms} == {KEY}
    others = [pod(replica=1), pod(replica=0, attempt=4), pod(uid="job-2"), pod(replica=0, uid="job-2")]
    assert all(any(matches(term, it) for term in terms) for it in others)
    mine = [pod(), pod(index=1), pod(attempt=0), coordinator()]
    assert not [it["metadata"]["name"] for it in mine if any(matches(term, it) for term in terms)]
    everywhere = [term for term in terms if term.get("namespaceSelector") == {}]
    assert [matches(term, pod(uid="job-2")) for term in everywhere] == [True]


def test_affinity_of_the_template_stays() -> None:
    near = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "cache"}}}}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "noisy"}}}
    node = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}
    own = {
        "nodeAffinity": {REQUIRED: node},
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [near]},
        "podAntiAffinity": {REQUIRED: [apart]},
    }
    template = {"spec": {**TEMPLATES["as little as possible"]["spec"], "affinity": own}}
    made = affinity(template, replicaTopologyKey=KEY, exclusive=True)
    assert made["nodeAffinity"] == own["nodeAffinity"]
    assert made["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == [near]
    assert made["podAntiAffinity"][REQUIRED][0] == apart
    assert len(made["podAntiAffinity"][REQUIRED]) == 3


def test_affinity_that_a_scheduler_could_never_meet_beside_ours_is_refused() -> None:
    assert affinity(TEMPLATES["a place"]) == TEMPLATES["a place"]["spec"]["affinity"]
    with pytest.raises(ConfigError, match="podAffinity that the template requires cannot both hold"):
        affinity(TEMPLATES["a place"], replicaTopologyKey=KEY)
