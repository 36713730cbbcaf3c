"""Two operators at a real API server: one acts, the other takes over, and who lost the lease does no harm."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.cluster.apiserver.server import ApiServer
from tests.cluster.apiserver.test_apiserver_operator import TRAINERS, Story, uids
from tests.cluster.kube.shell import until
from tests.ports import free_port

from fthsdp.errors import ConfigError
from fthsdp_operator.kube.apiserver import KubernetesCluster
from fthsdp_operator.kube.lease import LEASE_DURATION, RETRY_PERIOD, Leadership, Place
from fthsdp_operator.kube.requests import Access

pytestmark = pytest.mark.cluster

LATEST = LEASE_DURATION + 30.0
"""Seconds after which another operator acts, also on a machine that is busy."""


class Pair(Story):
    """A job, and two operators of which the first acts."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path) -> None:
        super().__init__(server, namespace, folder)
        self.logs = folder / "first.log", folder / "second.log"
        self.port = free_port()

    @contextmanager
    def both(self) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
        """Run both, and a job whose pods all run."""
        options = ("--leader-elect", "--lease-namespace", self.namespace)
        with self.operator(*options, log=self.logs[0]) as first:
            self.start()
            self.kubelet_starts(*TRAINERS)
            self.until(lambda: self.job()["status"]["state"] == "Starting", "the job starts")
            with self.operator(*options, "--health-port", str(self.port), log=self.logs[1]) as second:
                until(lambda: "standing by" in self.logs[1].read_text(), "the second stands by", timeout=30)
                yield first, second

    def healthy(self) -> bool:
        """The second says that it is well."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)

    def lease(self) -> dict[str, Any]:
        """Return its spec."""
        return dict(self.server.items("leases", self.namespace)["fthsdp-operator"]["spec"])

    def holder(self) -> str:
        return str(self.lease().get("holderIdentity", ""))

    def changes_hands(self, since: str) -> None:
        until(lambda: self.holder() not in ("", since), "the lease changes hands", timeout=LATEST, log=self.logs[1])


@pytest.fixture
def pair(apiserver: ApiServer, namespace: str, tmp_path: Path) -> Pair:
    return Pair(apiserver, namespace, tmp_path)


def moment(time: str) -> datetime:
    return datetime.fromisoformat(time)


def restarts(pair: Pair) -> list[tuple[int, int]]:
    return [(entry["attempt"], entry["restarts"]) for entry in pair.job()["status"]["replicaStatuses"]]


def test_when_the_leader_is_killed_the_other_takes_over_and_restarts_nothing_twice(pair: Pair) -> None:
    with pair.both() as (first, second):
        assert pair.healthy()
        before, leader = uids(pair.pods()), pair.holder()
        pair.kubectl("delete", "pod", "llama-r2-a0-1", "--wait=false")
        first.kill()  # in the middle of what follows from that, or before
        first.wait(timeout=30)
        last = pair.lease()
        pair.changes_hands(leader)
        renewed, acquired = last["renewTime"], pair.lease()["acquireTime"]
        assert (moment(acquired) - moment(renewed)).total_seconds() >= LEASE_DURATION
        pair.until(lambda: {"llama-r2-a1-0", "llama-r2-a1-1"} <= pair.pods().keys(), "replica 2 is back")
        pair.kubectl("delete", "pod", "llama-r0-a0-0", "--wait=false")
        pair.until(lambda: {"llama-r0-a1-0", "llama-r0-a1-1"} <= pair.pods().keys(), "replica 0 is back")
        assert restarts(pair) == [(1, 1), (0, 0), (1, 1)]
        untouched = {name: uid for name, uid in before.items() if "-r1-" in name or "coordinator" in name}
        assert untouched.items() <= uids(pair.pods()).items()
        assert pair.healthy()
        assert second.poll() is None


def test_a_leader_that_was_stopped_past_its_lease_does_no_harm_when_it_goes_on_and_exits(pair: Pair) -> None:
    with pair.both() as (first, _):
        leader = pair.holder()
        first.send_signal(signal.SIGSTOP)
        pair.changes_hands(leader)
        pair.kubectl("delete", "pod", "llama-r1-a0-0", "--wait=false")  # the one that sleeps will hear of it, too
        pair.until(lambda: {"llama-r1-a1-0", "llama-r1-a1-1"} <= pair.pods().keys(), "replica 1 is back")
        before = uids(pair.pods())
        first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=30) == 1
        last = pair.logs[0].read_text().splitlines()[-1]
        assert last.endswith("ran out: another operator may act by now, so this one ends"), last
        assert uids(pair.pods()) == before
        assert restarts(pair) == [(0, 0), (1, 1), (0, 0)]
        assert pair.holder() != leader


def test_a_leader_that_is_asked_to_leave_is_followed_at_once(pair: Pair) -> None:
    with pair.both() as (first, _):
        leader = pair.holder()
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=30) == 0
        until(lambda: pair.holder() not in ("", leader), "the other leads", timeout=10)
        pair.kubectl("delete", "pod", "llama-r0-a0-0", "--wait=false")
        pair.until(lambda: "llama-r0-a1-0" in pair.pods(), "it acts")


def test_who_stands_by_leaves_when_it_is_asked_to(pair: Pair) -> None:
    with pair.both() as (_, second):
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=30) == 0
        assert "this operator holds the lease" not in pair.logs[1].read_text()


# --- the rights of the chart's Role ---------------------------------------------------------------------------------


def account(server: ApiServer, namespace: str, folder: Path, *verbs: str) -> Access:
    """Return the access of a service account with these rights to the lease."""
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    rules = [{**leases, "resourceNames": ["operator"], "verbs": [verb for verb in verbs if verb != "create"]}]
    if "create" in verbs:
        rules.append({**leases, "verbs": ["create"]})
    meta = {"metadata": {"name": "operator"}}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", **meta, "rules": rules}
    for made in (role, {"apiVersion": "v1", "kind": "ServiceAccount", **meta}):
        server.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(made))
    server.kubectl(
        *("create", "rolebinding", "operator", "-n", namespace, "--role=operator"),
        f"--serviceaccount={namespace}:operator",
    )
    token = server.kubectl("create", "token", "operator", "-n", namespace).strip()
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(server.kubeconfig.read_text().replace("test-token", token))
    return Access(kubeconfig=str(kubeconfig))


def make_lease(server: ApiServer, namespace: str) -> None:
    """Make it as the chart does: empty."""
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "operator"}}
    server.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(lease))


class Ended(BaseException):
    """The process ended."""


def end(why: str) -> NoReturn:
    raise Ended(why)


async def get_and_give_back(access: Access, namespace: str) -> None:
    cluster = await KubernetesCluster.connect(access, coordinator_image="")
    try:
        leadership = Leadership(cluster, Place(namespace=namespace, name="operator"), me="me", end=end)
        await leadership.acquire()
        keeper = asyncio.create_task(leadership.keep())
        await asyncio.wait([keeper], timeout=RETRY_PERIOD + 1)
        assert not keeper.done()
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await leadership.resign()
    finally:
        await cluster.close()


@pytest.mark.parametrize("made", [True, False], ids=["made by the chart", "made by the operator"])
def test_the_rights_of_the_charts_role_are_enough(
    apiserver: ApiServer, namespace: str, tmp_path: Path, made: bool
) -> None:
    access = account(apiserver, namespace, tmp_path, "get", "update", "create")
    if made:
        make_lease(apiserver, namespace)
    for changes in (0, 1):
        asyncio.run(get_and_give_back(access, namespace))
        spec = apiserver.items("leases", namespace)["operator"]["spec"]
        assert "holderIdentity" not in spec
        assert (spec["leaseTransitions"], spec["leaseDurationSeconds"]) == (changes, 15)


@pytest.mark.parametrize(("right", "missing"), [("get", "update"), ("update", "get"), ("get", "create")])
def test_without_one_of_them_the_operator_says_so(
    apiserver: ApiServer, namespace: str, tmp_path: Path, right: str, missing: str
) -> None:
    access = account(apiserver, namespace, tmp_path, right)
    if missing != "create":
        make_lease(apiserver, namespace)
    with pytest.raises(ConfigError, match=rf"403 Forbidden: leases\.coordination\.k8s\.io .* cannot {missing} "):
        asyncio.run(get_and_give_back(access, namespace))
