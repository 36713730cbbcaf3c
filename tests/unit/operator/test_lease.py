"""One operator acts at a time, another takes over when it falls silent, and who lost the lease acts no more."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.timeline import run

from fthsdp.errors import ConfigError
from fthsdp_operator.cluster import AlreadyExists, Busy, ClusterError, Conflict, Manifest, Unanswered
from fthsdp_operator.kube.lease import LEASE_DURATION, RENEW_DEADLINE, RETRY_PERIOD, Election, Leadership, Place

PLACE = Place(namespace="system", name="operator")
LATENCY = 0.01
LATEST = LEASE_DURATION + 2 * RETRY_PERIOD
"""Seconds after which a lease that nobody renews has changed hands."""


class Ended(BaseException):
    """The process ended."""


def end(why: str) -> NoReturn:
    raise Ended(why)


class Server:
    """The API server's part: one lease, and a version."""

    def __init__(self) -> None:
        self.lease: Manifest | None = None
        self.version = 0

    def put(self, manifest: Mapping[str, Any]) -> Manifest:
        self.version += 1
        self.lease = copy.deepcopy(dict(manifest))
        self.lease["metadata"] = {**manifest["metadata"], "resourceVersion": str(self.version)}
        return self.lease

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        return self.lease["spec"]  # type: ignore[no-any-return]


class Line:
    """An operator's connection to the server; implements ``fthsdp_operator.kube.lease.Leases``."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.refused: ClusterError | None = None
        """What each call is answered with."""
        self.hangs = False
        self.drops_answers = False

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        assert (kind, namespace, name) == ("Lease", PLACE.namespace, PLACE.name)
        await self._way()
        return copy.deepcopy(self._server.lease)

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        await self._way()
        if self._server.lease is not None:
            raise AlreadyExists(PLACE.name)
        return await self._answer(manifest)

    async def replace(self, manifest: Mapping[str, Any]) -> Manifest:
        await self._way()
        there = self._server.lease
        if there is None or there["metadata"]["resourceVersion"] != manifest["metadata"]["resourceVersion"]:
            raise Conflict(PLACE.name)
        return await self._answer(manifest)

    async def _way(self) -> None:
        await asyncio.sleep(LATENCY)
        if self.hangs:
            await asyncio.Event().wait()
        if self.refused is not None:
            raise self.refused

    async def _answer(self, manifest: Mapping[str, Any]) -> Manifest:
        written = self._server.put(manifest)
        await asyncio.sleep(LATENCY)
        if self.drops_answers:
            raise ClusterError("connection reset")
        return written


class Operator:
    """One process: stands by, leads, ends."""

    def __init__(self, server: Server, name: str, *, ahead: float = 0.0) -> None:
        """``ahead``: seconds by which its clock is ahead of the loop's."""
        self.name = name
        self.line = Line(server)
        self.why = ""
        """Why it ended."""
        self._ahead = ahead
        self.leadership = Leadership(self.line, PLACE, me=name, clock=self._clock, end=end)
        self._task = asyncio.create_task(self._run())

    def _clock(self) -> float:
        return now() + self._ahead

    async def _run(self) -> None:
        await self._ending(self.leadership.acquire)
        if not self.why:
            await self._ending(self.leadership.keep)

    async def _ending(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except (Ended, ConfigError) as ended:
            self.why = str(ended)

    @property
    def acts(self) -> bool:
        """It may make a call to the API server now."""
        try:
            return not self.why and self.leadership.time_left() > 0
        except Ended:
            return False

    async def stops(self) -> None:
        """SIGSTOP."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def goes_on(self) -> None:
        """SIGCONT; one that has led goes on renewing."""
        self._task = asyncio.create_task(self._ending(self.leadership.keep))


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(holds: Callable[[], bool], *, within: float) -> float:
    """Return the seconds until something holds."""
    begun = now()
    while not holds():
        assert now() - begun <= within
        await asyncio.sleep(LATENCY)
    return now() - begun


async def leader_and_other(server: Server) -> tuple[Operator, Operator]:
    leader = Operator(server, "a")
    await until(lambda: leader.acts, within=1)
    other = Operator(server, "b")
    await asyncio.sleep(60)
    assert (leader.acts, other.acts) == (True, False)
    return leader, other


def test_the_first_leads_and_keeps_the_lease_while_the_other_stands_by() -> None:
    async def story() -> None:
        server = Server()
        await leader_and_other(server)
        assert (server.spec["holderIdentity"], server.spec["leaseDurationSeconds"]) == ("a", 15)
        assert server.spec["leaseTransitions"] == 0

    run(story())


def test_who_is_killed_is_followed_when_its_lease_has_run_out_and_not_before() -> None:
    async def story() -> None:
        server = Server()
        leader, other = await leader_and_other(server)
        await leader.stops()
        took = await until(lambda: other.acts, within=LATEST)
        assert took >= LEASE_DURATION - RETRY_PERIOD
        assert (server.spec["holderIdentity"], server.spec["leaseTransitions"]) == ("b", 1)

    run(story())


def test_who_gives_the_lease_back_is_followed_at_once() -> None:
    async def story() -> None:
        server = Server()
        leader, other = await leader_and_other(server)
        await leader.stops()
        await leader.leadership.resign()
        assert not leader.acts
        await until(lambda: other.acts, within=RETRY_PERIOD + 1)

    run(story())


def test_nobody_gives_back_a_lease_that_is_not_his() -> None:
    async def story() -> None:
        server = Server()
        leader, other = await leader_and_other(server)
        await other.leadership.resign()
        await asyncio.sleep(5)
        assert leader.acts

    run(story())


def test_a_leader_that_was_stopped_past_its_lease_acts_no_more_and_ends() -> None:
    async def story() -> None:
        server = Server()
        leader, other = await leader_and_other(server)
        await leader.stops()
        await until(lambda: other.acts, within=LATEST)
        assert not leader.acts
        leader.goes_on()
        await until(lambda: bool(leader.why), within=0.1)
        assert leader.why == "the lease system/operator ran out: another operator may act by now, so this one ends"
        assert server.spec["holderIdentity"] == "b"

    run(story())


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_a_leader_that_cannot_renew_ends_before_another_takes_over(how: str) -> None:
    async def story() -> None:
        leader, other = await leader_and_other(Server())
        leader.line.hangs = how == "hangs"
        leader.line.refused = ClusterError("no route to host") if how == "refuses" else None
        took = await until(lambda: bool(leader.why), within=RENEW_DEADLINE + 0.1)
        assert took > RENEW_DEADLINE - RETRY_PERIOD - 0.1
        assert not other.acts
        await until(lambda: other.acts, within=LATEST)

    run(story())


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_an_api_server_that_is_away_for_a_moment_costs_no_leadership(how: str) -> None:
    async def story() -> None:
        leader, other = await leader_and_other(Server())
        for line in (leader.line, other.line):
            line.hangs = how == "hangs"
            line.refused = ClusterError("connection refused") if how == "refuses" else None
        await asyncio.sleep(RENEW_DEADLINE / 2 - RETRY_PERIOD)
        for line in (leader.line, other.line):
            line.hangs, line.refused = False, None
        await asyncio.sleep(LATEST)
        assert (leader.acts, other.acts) == (True, False)

    run(story())


def test_when_the_api_server_was_away_for_a_minute_one_of_those_that_stand_by_leads() -> None:
    async def story() -> None:
        leader, other = await leader_and_other(Server())
        leader.line.refused = other.line.refused = ClusterError("connection refused")
        await asyncio.sleep(60)
        assert leader.why
        assert not other.acts
        other.line.refused = None
        await until(lambda: other.acts, within=LATEST)

    run(story())


def test_a_leader_that_sees_somebody_else_in_its_place_ends_at_once() -> None:
    async def story() -> None:
        server = Server()
        leader, other = await leader_and_other(server)
        assert server.lease is not None
        server.put({**server.lease, "spec": {**server.spec, "holderIdentity": "b"}})  # somebody edits the lease
        await until(lambda: bool(leader.why), within=RETRY_PERIOD + 0.1)
        assert leader.why == "the lease system/operator was taken over by b: this operator ends"
        await until(lambda: other.acts, within=RETRY_PERIOD + 0.1)

    run(story())


def test_a_lease_that_somebody_deletes_is_made_again_by_its_holder() -> None:
    async def story() -> None:
        server = Server()
        leader, other = await leader_and_other(server)
        server.lease = None
        await asyncio.sleep(LATEST)
        assert (leader.acts, other.acts) == (True, False)
        await leader.stops()
        server.lease = None
        took = await until(lambda: other.acts, within=LATEST)
        assert took >= LEASE_DURATION - RETRY_PERIOD

    run(story())


def test_a_lease_that_somebody_empties_still_counts_for_its_holder() -> None:
    async def story() -> None:
        server = Server()
        leader, other = await leader_and_other(server)
        assert server.lease is not None
        await leader.stops()
        server.put({**server.lease, "spec": {}})
        took = await until(lambda: other.acts, within=LATEST)
        assert took >= LEASE_DURATION - RETRY_PERIOD

    run(story())


@pytest.mark.parametrize(("answer", "waits"), [(ClusterError("403 Forbidden"), False), (Busy("503"), True)])
def test_a_server_that_is_busy_is_waited_for_and_one_that_refuses_is_not(answer: ClusterError, waits: bool) -> None:
    async def story() -> None:
        candidate = Operator(Server(), "a")
        candidate.line.refused = answer
        await asyncio.sleep(60)
        assert bool(candidate.why) is not waits
        candidate.line.refused = None
        await asyncio.sleep(5)
        assert candidate.acts is waits

    run(story())


def test_a_lease_that_was_got_although_the_answer_was_lost_is_known_as_ours() -> None:
    async def story() -> None:
        server = Server()
        first = Operator(server, "a")
        await until(lambda: first.acts, within=1)
        second = Operator(server, "b")
        await asyncio.sleep(5)
        await first.stops()
        second.line.drops_answers = True
        await until(lambda: server.spec["holderIdentity"] == "b", within=LATEST)
        assert not second.acts
        second.line.drops_answers = False
        await until(lambda: second.acts, within=RETRY_PERIOD + 1)

    run(story())


def test_two_that_start_together_agree() -> None:
    async def story() -> None:
        server = Server()
        operators = [Operator(server, name) for name in "abc"]
        await asyncio.sleep(60)
        assert sum(operator.acts for operator in operators) == 1
        assert not any(operator.why for operator in operators)

    run(story())


def test_an_api_server_that_is_away_at_the_start_is_waited_for() -> None:
    async def story() -> None:
        operator = Operator(Server(), "a")
        operator.line.refused = Unanswered("connection refused")
        await asyncio.sleep(60)
        assert not operator.why
        operator.line.refused = None
        await until(lambda: operator.acts, within=RETRY_PERIOD + 1)

    run(story())


def test_who_may_not_touch_the_lease_says_so_at_the_start() -> None:
    async def story() -> None:
        leadership = Leadership(line := Line(Server()), PLACE, me="a", end=end)
        line.refused = ClusterError("403 Forbidden: leases is forbidden")
        with pytest.raises(
            ConfigError, match=r"^the lease system/operator cannot be had: 403 Forbidden: leases is forbidden$"
        ):
            await leadership.acquire()

    run(story())


@pytest.mark.parametrize("wall", [0.0, 4e9])
def test_the_wall_clock_decides_nothing(wall: float) -> None:
    mine, theirs = Election(PLACE, "a"), Election(PLACE, "b")
    lease = mine.claim(None, 100.0, wall)
    assert lease is not None
    for seconds in (5.0, 6.0, 5.0 + LEASE_DURATION - 0.1):
        assert theirs.claim(lease, seconds, 2e9) is None
    taken = theirs.claim(lease, 5.0 + LEASE_DURATION, 2e9)
    assert taken is not None
    assert taken["spec"]["acquireTime"] == taken["spec"]["renewTime"] == "2033-05-18T03:33:20.000000Z"


def test_a_renewal_changes_nothing_but_its_time() -> None:
    election = Election(PLACE, "a")
    first = election.claim(None, 0.0, 1e9)
    assert first is not None
    again = election.claim({**first, "metadata": {**first["metadata"], "resourceVersion": "7"}}, 2.0, 1e9 + 2)
    assert again is not None
    assert again["metadata"]["resourceVersion"] == "7"
    assert again["spec"] == {**first["spec"], "renewTime": "2001-09-09T01:46:42.000000Z"}


NAMES = "abc"
FAULT = st.tuples(
    st.sampled_from(["hang", "refuse", "drop", "stop", "mend", "restart", "resign"]),
    st.integers(0, len(NAMES) - 1),
    st.floats(0, 2 * LEASE_DURATION),
)


async def happen(server: Server, operators: list[Operator], what: str, which: int) -> None:
    operator = operators[which]
    line = operator.line
    line.hangs, line.drops_answers = what == "hang", what == "drop"
    line.refused = ClusterError("no route to host") if what == "refuse" else None
    if what == "stop":
        await operator.stops()
    elif what in ("restart", "resign"):
        await operator.stops()
        if what == "resign":
            await operator.leadership.resign()
        operators[which] = Operator(server, f"{operator.name}'", ahead=which * 1000.0)
    elif what == "mend":
        acted = operator.acts
        await operator.stops()
        if acted:
            operator.goes_on()


@settings(max_examples=60, deadline=None)
@given(st.lists(FAULT, max_size=12))
def test_there_are_never_two_and_in_the_end_there_is_one(faults: list[tuple[str, int, float]]) -> None:
    async def story() -> None:
        server = Server()
        operators = [Operator(server, name, ahead=index * 1000.0) for index, name in enumerate(NAMES)]
        for what, which, seconds in faults:
            await happen(server, operators, what, which)
            later = now() + seconds
            while now() < later:
                await asyncio.sleep(0.5)
                assert sum(operator.acts for operator in operators) <= 1
        for which in range(len(operators)):
            await happen(server, operators, "restart", which)
        await until(lambda: any(operator.acts for operator in operators), within=2 * LATEST)
        await asyncio.sleep(LATEST)
        assert sum(operator.acts for operator in operators) == 1

    run(story())
