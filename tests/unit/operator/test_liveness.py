"""A watch lives as long as bytes come on it, or its server ends it; that somebody opened it again proves nothing."""

from __future__ import annotations

import pytest
from yarl import URL

from fthsdp_operator.kube.traces import verb
from fthsdp_operator.process.liveness import Watches

JOBS, PODS = "/apis/fthsdp.dev/v1alpha1/fthsdpjobs", "/api/v1/pods"


class Stream:
    """A watch stream, and how much came on it."""

    received = 0

    def __call__(self) -> int:
        return self.received


class Times:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_watch_that_is_never_opened_ages_from_the_start() -> None:
    clock = Times()
    watches = Watches([JOBS, PODS], clock=clock)
    clock.now += 30
    watches.listed(PODS)
    assert watches.age() == 30


def test_every_byte_is_a_sign_of_life() -> None:
    clock, stream = Times(), Stream()
    watches = Watches([PODS], clock=clock)
    watches.opened(PODS, stream)
    for _ in range(3):
        clock.now += 50
        stream.received += 1
        assert watches.age() == 0
    clock.now += 50
    assert watches.age() == 50


def test_opening_a_stream_anew_is_no_sign_of_life() -> None:
    clock = Times()
    watches = Watches([PODS], clock=clock)
    for _ in range(3):
        watches.opened(PODS, Stream())
        clock.now += 70
    assert watches.age() == 210


def test_what_came_on_a_stream_before_it_was_replaced_counts() -> None:
    clock, old = Times(), Stream()
    watches = Watches([PODS], clock=clock)
    watches.opened(PODS, old)
    clock.now += 70
    old.received = 9
    watches.opened(PODS, Stream())
    clock.now += 5
    assert watches.age() == 5


def test_the_age_is_that_of_the_watch_that_is_silent_longest() -> None:
    clock, busy = Times(), Stream()
    watches = Watches([JOBS, PODS], clock=clock)
    watches.opened(PODS, busy)
    watches.opened(JOBS, Stream())
    clock.now += 60
    busy.received = 1
    assert watches.age() == 60


@pytest.mark.parametrize("forbidden", [True, False])
def test_a_server_that_refuses_lives_and_what_it_forbids_is_known_until_it_shows_it(forbidden: bool) -> None:
    clock = Times()
    watches = Watches([JOBS, PODS], clock=clock)
    clock.now += 50
    watches.listed(JOBS)
    watches.refused(PODS, forbidden=forbidden)
    assert watches.age() == 0
    assert (watches.forbids(JOBS), watches.forbids(PODS)) == (False, forbidden)
    watches.opened(PODS, Stream())
    assert not watches.forbids(PODS)
    watches.refused(PODS, forbidden=True)
    watches.listed(PODS)
    assert not watches.forbids(PODS)


def test_what_is_not_to_be_watched_does_not_count() -> None:
    clock = Times()
    watches = Watches([PODS], clock=clock)
    clock.now += 10
    watches.listed("/api/v1/nodes")
    watches.opened("/api/v1/nodes", Stream())
    assert watches.age() == 10


@pytest.mark.parametrize(
    ("method", "url", "what"),
    [
        ("GET", "/apis/fthsdp.dev/v1alpha1", "get"),
        ("GET", "/apis/fthsdp.dev/v1alpha1/fthsdpjobs", "list"),
        ("GET", "/apis/fthsdp.dev/v1alpha1/fthsdpjobs?watch=true", "watch"),
        ("GET", "/apis/fthsdp.dev/v1alpha1/namespaces/team/fthsdpjobs", "list"),
        ("GET", "/apis/fthsdp.dev/v1alpha1/namespaces/team/fthsdpjobs/llama", "get"),
        ("PATCH", "/apis/fthsdp.dev/v1alpha1/namespaces/team/fthsdpjobs/llama/status", "patch"),
        ("GET", "/api/v1/pods", "list"),
        ("GET", "/api/v1/namespaces", "list"),
        ("GET", "/api/v1/namespaces/team", "get"),
        ("GET", "/api/v1/namespaces/team/pods?labelSelector=a", "list"),
        ("GET", "/k8s/clusters/c-1/api/v1/namespaces/team/pods", "list"),
        ("POST", "/api/v1/namespaces/team/pods", "create"),
        ("DELETE", "/api/v1/namespaces/team/pods/a", "delete"),
        ("PUT", "/api/v1/namespaces/team/configmaps/a", "update"),
    ],
)
def test_a_request_is_called_as_kubernetes_calls_it(method: str, url: str, what: str) -> None:
    assert verb(method, URL(f"https://server{url}")) == what
