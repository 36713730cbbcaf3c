"""The cache against the truth: whatever is late, missed, cut or heard twice, it ends at what there is."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fthsdp_operator.api import ATTEMPT_LABEL, JOB_LABEL, JOB_UID_LABEL, POD_INDEX_LABEL, REPLICA_LABEL, ROLE_LABEL
from fthsdp_operator.informers.cache import Mirror, Pods, Restored
from fthsdp_operator.observed.known import KnownNodes
from fthsdp_operator.observed.observe import JobKey, NodeView, PodView, view

Object = dict[str, Any]
JOBS = ("llama", "gpt")
LLAMA: JobKey = ("default", "llama")


def pod(uid: str, version: int, *, job: str = "llama", phase: str = "Pending", node: str = "") -> Object:
    labels = {
        JOB_LABEL: job,
        JOB_UID_LABEL: f"uid-of-{job}",
        ROLE_LABEL: "trainer",
        REPLICA_LABEL: "0",
        ATTEMPT_LABEL: "0",
        POD_INDEX_LABEL: "0",
    }
    metadata = {"namespace": "default", "name": uid, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}


class Cache:
    """A mirror of pods with its index, and what it has reported."""

    def __init__(self, *pods: Object, version: int = 0) -> None:
        """It has listed these pods at this version."""
        self.index = Pods()
        self.mirror = Mirror(view, self._changed)
        self.reported: list[tuple[str, str, bool]] = []
        """Uid, phase, and whether it is gone."""
        self.ends: Counter[str] = Counter()
        """How often each pod that was shown has gone."""
        self.list(*pods, version=version)
        self.reported.clear()

    def _changed(self, before: PodView | None, now: PodView, gone: bool) -> None:
        self.index.changed(before, now, gone)
        self.reported.append((now.uid, now.phase, gone))
        if gone and before is not None:
            self.ends[now.uid] += 1

    def list(self, *pods: Object, version: int) -> None:
        found = [seen for seen in map(self.mirror.see, pods) if seen is not None]
        self.mirror.replace(found, str(version))

    def shown(self, job: str = "llama") -> dict[str, str]:
        """Phases of a job's pods."""
        return {it.uid: it.phase for it in self.index.of(("default", job))}


# --- one thing at a time ----------------------------------------------------------------------------------------------


def test_a_list_closes_a_gap_and_reports_what_was_deleted_in_it() -> None:
    cache = Cache(pod("a", 1), pod("b", 2, phase="Running"), version=2)
    cache.list(pod("a", 1), version=9)
    assert cache.reported == [("b", "Running", True)]
    assert cache.shown() == {"a": "Pending"}


def test_what_we_created_is_there_at_once_and_a_list_from_before_does_not_take_it_away() -> None:
    cache = Cache(version=5)
    cache.mirror.put(pod("a", 7))
    assert cache.shown() == {"a": "Pending"}
    cache.list(version=6)
    assert cache.shown() == {"a": "Pending"}
    cache.list(version=7)
    assert cache.shown() == {}


def test_a_late_answer_does_not_bring_back_what_is_gone() -> None:
    cache = Cache()
    cache.mirror.hear("ADDED", pod("a", 1))
    cache.mirror.hear("DELETED", pod("a", 3, phase="Failed"))
    cache.mirror.put(pod("a", 2))
    assert cache.shown() == {}


def test_a_late_answer_does_not_bring_back_what_came_and_went_in_a_gap() -> None:
    cache = Cache(version=1)
    cache.list(version=4)
    cache.mirror.put(pod("a", 2))
    assert cache.shown() == {}


def test_an_answer_that_the_watch_has_told_of_changes_nothing() -> None:
    cache = Cache()
    cache.mirror.hear("ADDED", pod("a", 1))
    cache.mirror.hear("MODIFIED", pod("a", 2, phase="Running"))
    cache.mirror.put(pod("a", 1))
    assert cache.shown() == {"a": "Running"}


def test_the_watch_does_not_take_back_an_answer_that_is_ahead_of_it() -> None:
    cache = Cache(pod("a", 1), version=1)
    cache.mirror.put(pod("a", 4, phase="Failed"))
    cache.mirror.hear("MODIFIED", pod("a", 2, phase="Running"))
    assert cache.shown() == {"a": "Failed"}


def test_what_we_have_deleted_stays_away_whatever_the_watch_tells_of_it_before_its_end() -> None:
    cache = Cache(pod("a", 1), version=1)
    cache.mirror.forget("a")
    cache.mirror.hear("MODIFIED", pod("a", 2, phase="Running"))
    cache.list(pod("a", 2, phase="Running"), version=3)
    assert cache.shown() == {}
    cache.mirror.hear("DELETED", pod("a", 4, phase="Failed"))
    assert cache.reported == [("a", "Pending", True), ("a", "Failed", True)]


def test_what_we_have_deleted_is_not_brought_back_by_an_older_answer_after_an_older_list() -> None:
    cache = Cache(version=1)
    cache.mirror.put(pod("a", 4))
    cache.mirror.forget("a")
    cache.list(version=2)
    cache.mirror.put(pod("a", 3))
    assert cache.shown() == {}


def test_what_changes_nothing_that_rules_look_at_wakes_nobody() -> None:
    cache = Cache(pod("a", 1), version=1)
    cache.mirror.hear("MODIFIED", pod("a", 2))
    assert cache.reported == []
    cache.mirror.hear("MODIFIED", pod("a", 3, phase="Running"))
    assert cache.reported == [("a", "Running", False)]


def test_the_last_words_are_those_of_the_event_that_ends_a_pod_even_of_one_never_seen_before() -> None:
    cache = Cache(pod("a", 1, phase="Running"), version=1)
    cache.mirror.hear("DELETED", pod("a", 2, phase="Failed"))
    cache.mirror.hear("DELETED", pod("b", 3, phase="Failed"))
    assert cache.reported == [("a", "Failed", True), ("b", "Failed", True)]


def test_pods_of_no_job_are_passed_over() -> None:
    stranger = pod("a", 1)
    stranger["metadata"]["labels"] = {JOB_LABEL: "llama"}
    assert Cache(stranger, version=1).shown() == {}


def test_a_pod_that_cannot_be_understood_does_not_take_the_others_with_it(caplog: pytest.LogCaptureFixture) -> None:
    broken = pod("a", 1)
    broken["metadata"]["deletionTimestamp"] = "soon"
    assert Cache(broken, pod("b", 2), version=2).shown() == {"b": "Pending"}
    assert "default a is passed over" in caplog.text


def test_a_pod_whose_labels_are_taken_away_is_gone() -> None:
    cache = Cache(pod("a", 1), version=1)
    stripped = pod("a", 2)
    stripped["metadata"]["labels"] = {JOB_LABEL: "llama"}
    cache.mirror.hear("MODIFIED", stripped)
    assert cache.shown() == {}
    assert cache.reported == [("a", "Pending", True)]


def test_a_pod_that_is_given_to_another_job_is_not_that_of_the_first_any_more() -> None:
    cache = Cache(pod("a", 1), version=1)
    cache.mirror.hear("MODIFIED", pod("a", 2, job="gpt"))
    assert (cache.shown("llama"), cache.shown("gpt")) == ({}, {"a": "Pending"})


def test_a_list_that_is_older_than_what_was_told_is_not_taken_in() -> None:
    cache = Cache(pod("a", 90), pod("b", 95), version=100)
    with pytest.raises(Restored, match=r"from version 100 to 50 .* its data was restored from a copy"):
        cache.list(pod("a", 40), version=50)


def test_who_has_pods_on_a_node_is_known_as_long_as_they_are_there() -> None:
    cache = Cache(pod("a", 1), pod("b", 2, job="gpt", node="node-7"), version=2)
    cache.mirror.hear("MODIFIED", pod("a", 3, node="node-7"))
    assert cache.index.jobs_on("node-7") == {("default", "llama"), ("default", "gpt")}
    cache.mirror.hear("DELETED", pod("b", 4, job="gpt", node="node-7"))
    assert cache.index.jobs_on("node-7") == {LLAMA}


def test_nodes_are_found_by_name_until_they_are_gone() -> None:
    seven = NodeView(name="node-7", ready="True")
    nodes = KnownNodes([seven])
    assert nodes == {"node-7": seven}
    nodes.drop("node-7")
    nodes.drop("node-8")
    assert nodes == {}


def test_nodes_of_one_kind_are_found_together_as_they_are_now() -> None:
    nodes = KnownNodes(NodeView(name=f"node-{number}", ready="True") for number in range(3))
    plain, cordoned = nodes["node-0"].kind, nodes["node-0"].kind._replace(cordoned=True)
    assert nodes.kinds == {plain: {"node-0", "node-1", "node-2"}}
    nodes.put(NodeView(name="node-1", ready="True", unschedulable=True))
    assert nodes.kinds == {plain: {"node-0", "node-2"}, cordoned: {"node-1"}}
    nodes.drop("node-1")
    assert nodes.kinds == {plain: {"node-0", "node-2"}}


def test_what_was_worked_out_of_an_attempt_stays_until_one_of_its_pods_changes() -> None:
    cache = Cache(pod("a", 1), pod("b", 2), pod("c", 3, job="gpt"), version=3)
    before = cache.index.of(LLAMA).attempt(0, 0)
    assert [it.uid for it in before.pending] == ["a", "b"]
    cache.mirror.hear("MODIFIED", pod("c", 4, job="gpt", phase="Running"))
    assert cache.index.of(LLAMA).attempt(0, 0) is before
    cache.mirror.hear("MODIFIED", pod("a", 5, phase="Running"))
    assert [it.uid for it in cache.index.of(LLAMA).attempt(0, 0).pending] == ["b"]
    cache.mirror.hear("DELETED", pod("b", 6))
    assert cache.index.of(LLAMA).attempt(0, 0).pending == ()
    cache.mirror.hear("DELETED", pod("a", 7))
    assert list(cache.index.of(LLAMA)) == []


def test_a_pod_that_gets_another_attempt_leaves_the_one_before() -> None:
    cache = Cache(pod("a", 1), pod("b", 2), version=2)
    before = cache.index.of(LLAMA)
    moved = pod("a", 3)
    moved["metadata"]["labels"][ATTEMPT_LABEL] = "1"
    cache.mirror.hear("MODIFIED", moved)
    now = cache.index.of(LLAMA)
    assert ([it.uid for it in now.attempt(0, 0)], [it.uid for it in now.attempt(0, 1)]) == (["b"], ["a"])
    assert [it.uid for it in before.attempt(0, 0)] == ["a", "b"]  # who has asked before keeps what was there


def test_thousands_of_pods_cost_less_than_a_kilobyte_each() -> None:
    conditions = [{"type": kind, "status": "True"} for kind in ("Initialized", "Ready", "ContainersReady")]

    def listed() -> Iterator[Object]:
        for number in range(2000):
            it = pod(f"uid-{number}", number, phase="Running", node=f"node-{number // 8}")
            it["status"]["conditions"] = conditions
            it["spec"]["containers"] = [{"name": "main", "env": [{"name": "x", "value": "y" * 5000}]}]
            yield json.loads(json.dumps(it))

    tracemalloc.start()
    try:
        cache = Cache()
        before, _ = tracemalloc.get_traced_memory()
        cache.mirror.replace((seen for seen in map(cache.mirror.see, listed()) if seen is not None), "9999")
        cache.reported.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(cache.shown()) == 2000
    assert (after - before) / 2000 < 1000


# --- any order --------------------------------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """An API server with a log of all changes; a watch that is behind or has gaps; lists and answers that come late."""

    @initialize()
    def start(self) -> None:
        self.cache = Cache()
        self.version = 0
        self.there: dict[str, Object] = {}
        self.ended: dict[str, int] = {}
        """When each pod was deleted, by uid."""
        self.log: list[tuple[str, Object]] = []
        self.told = 0
        """How much of the log the cache was told."""
        self.lists: list[tuple[int, int, list[Object]]] = []
        """The list under way: how long the log was, the version, and what was there."""
        self.answers: list[Object] = []
        self.deletions: list[str] = []
        """Uids of pods that we have deleted, of which the answer is under way."""
        self.newest: dict[str, int] = {}
        """The newest version of each pod that was ever shown."""
        self.vanished: set[str] = set()
        """Pods that were shown, and then were not."""

    def _write(self, kind: str, uid: str, job: str, phase: str, *, ours: bool = False) -> None:
        self.version += 1
        it = pod(uid, self.version, job=job, phase=phase)
        it["status"]["reason"] = str(self.version)
        self.there[uid] = it
        self.log.append((kind, it))
        if ours:
            self.answers.append(it)

    @rule(job=st.sampled_from(JOBS), ours=st.booleans())
    def create(self, job: str, ours: bool) -> None:
        self._write("ADDED", f"u{self.version}", job, "Pending", ours=ours)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), phase=st.sampled_from(["Running", "Failed"]), ours=st.booleans())
    def change(self, data: st.DataObject, phase: str, ours: bool) -> None:
        uid = data.draw(st.sampled_from(sorted(self.there)))
        self._write("MODIFIED", uid, self.there[uid]["metadata"]["labels"][JOB_LABEL], phase, ours=ours)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), ours=st.booleans())
    def delete(self, data: st.DataObject, ours: bool) -> None:
        uid = data.draw(st.sampled_from(sorted(self.there)))
        self._write("DELETED", uid, self.there[uid]["metadata"]["labels"][JOB_LABEL], "Failed")
        del self.there[uid]
        self.ended[uid] = self.version
        if ours:
            self.deletions.append(uid)

    @precondition(lambda self: self.told < len(self.log) and not self.lists)
    @rule()
    def the_watch_tells(self) -> None:
        kind, it = self.log[self.told]
        self.told += 1
        self.cache.mirror.hear(kind, it)

    @precondition(lambda self: not self.lists)
    @rule()
    def a_bookmark_comes_when_all_is_told(self) -> None:
        if self.told == len(self.log):
            self.cache.mirror.hear("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def an_answer_comes(self, data: st.DataObject) -> None:
        self.cache.mirror.put(self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    @precondition(lambda self: self.deletions)
    @rule()
    def the_answer_to_a_deletion_comes(self) -> None:
        self.cache.mirror.forget(self.deletions.pop(0))

    @precondition(lambda self: not self.lists)
    @rule()
    def the_watch_has_a_gap_and_a_list_is_made(self) -> None:
        self.lists.append((len(self.log), self.version, list(self.there.values())))

    @precondition(lambda self: self.lists)
    @rule()
    def the_list_comes(self) -> None:
        self.told, version, pods = self.lists.pop()
        self.cache.list(*pods, version=version)

    def _shown(self) -> dict[str, PodView]:
        return {it.uid: it for job in JOBS for it in self.cache.index.of(("default", job))}

    @invariant()
    def what_ended_before_the_cache_was_told_is_not_in_it(self) -> None:
        told = int(self.log[self.told - 1][1]["metadata"]["resourceVersion"]) if self.told else 0
        assert not {uid for uid, version in self.ended.items() if version <= told} & self._shown().keys()

    @invariant()
    def nothing_goes_back_in_time(self) -> None:
        shown = {uid: int(it.reason) for uid, it in self._shown().items()}
        assert not shown.keys() & self.vanished
        assert all(self.newest.get(uid, 0) <= version for uid, version in shown.items())
        self.vanished |= self.newest.keys() - shown.keys()
        self.newest.update(shown)

    @invariant()
    def who_was_shown_ends_once_and_not_while_there(self) -> None:
        assert all(count == 1 for count in self.cache.ends.values()), self.cache.ends
        assert {uid for uid, _, gone in self.cache.reported if gone} <= self.ended.keys()

    def teardown(self) -> None:
        """The watch catches up, with answers before and after: then the cache is what there is."""
        while self.lists:
            self.the_list_comes()
        for late in (self.answers[::2], self.answers[1::2]):
            for answer in late:
                self.cache.mirror.put(answer)
            while self.told < len(self.log):
                self.the_watch_tells()
        for uid in self.deletions:
            self.cache.mirror.forget(uid)
        self.nothing_goes_back_in_time()
        assert {uid: it.phase for uid, it in self._shown().items()} == {
            uid: it["status"]["phase"] for uid, it in self.there.items()
        }


Histories.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
