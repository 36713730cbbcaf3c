"""The coordinator's process: the real membership, a store that outlives it, and connections that may be cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.clock import Channel, Owner

from fthsdp.coordinator.events import (
    AskStore,
    Disconnected,
    Drop,
    Effect,
    Event,
    MembershipSettings,
    Persist,
    Received,
    Send,
    StoreAnswered,
    Tick,
)
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.membership import Membership
from fthsdp.coordinator.messages import Exited, Hello, MemberState, State

if TYPE_CHECKING:
    from tests.simulation.replica import Replica
    from tests.simulation.world import World

__all__ = ["SLOWNESS", "Coordinator", "Link"]

TICK = 0.25
LOST_AFTER = 10.0
"""Seconds without an acknowledgement after which a leader's kernel gives its connection up."""
SLOWNESS = 5.0
"""Seconds that may pass until some kernel finds out that a network is back."""


def arrival(until: float, first: float) -> float:
    """Return when something arrives that is sent at ``first``, and again and again: nothing does before ``until``."""
    pause = 0.2
    while first < until:
        first, pause = first + pause, min(2 * pause, 2 * SLOWNESS)
    return first


class Link:
    """One connection of a leader to the coordinator."""

    def __init__(self, coordinator: Coordinator, replica: Replica, number: int) -> None:
        self.number = number
        self.replica = replica
        self._coordinator = coordinator
        self._up = Channel(coordinator.owner)
        self._down = Channel(replica.owner)
        self._open = True
        self._muted = False

    def say(self, state: MemberState) -> None:
        """The leader says where it stands."""
        self._to_coordinator(State(state=state))

    def greet(self) -> None:
        """The leader says hello."""
        replica = self.replica
        self._to_coordinator(
            Hello(
                replica=replica.number,
                attempt=replica.attempt,
                addresses=replica.addresses,
                state=replica.leader.state,
            )
        )

    def _to_coordinator(self, message: Hello | State) -> None:
        if self._open and not self._muted:
            event = Received(
                connection=self.number, replica=self.replica.number, attempt=self.replica.attempt, message=message
            )
            self._up.send(lambda: self._coordinator.handle(event))

    def to_leader(self, effect: Send) -> None:
        """The coordinator says something."""
        if self._open and not self._muted:
            self._down.send(lambda: self.replica.hear(effect.message))

    def stall(self, until: float) -> None:
        """What is said before this time arrives after it, if the leader's kernel waits for so long."""
        clock = self.replica.world.clock
        for channel in (self._up, self._down):
            channel.hold(arrival(until, clock.now + clock.random.uniform(0.0, 1.0)))
        if arrival(until, clock.now) > clock.now + LOST_AFTER:
            clock.after(LOST_AFTER, lambda: self.close(told_at=until + clock.random.uniform(0.0, 2 * SLOWNESS)))

    def mute(self) -> None:
        """Everything that is said from now on is lost, and nobody is told."""
        self._muted = True

    def drop(self) -> None:
        """The coordinator hangs up, after what it has said."""
        if self._open:
            self._open = False
            self._coordinator.links.pop(self.number, None)
            self._down.send(lambda: self.replica.hung_up(self))

    def close(self, *, told_at: float = 0.0) -> None:
        """The connection is gone; both sides notice in their own time, and what was under way is lost.

        The coordinator is told at ``told_at`` at the earliest, and not while it is cut off.
        """
        if not self._open:
            return
        self._open = False
        self._coordinator.links.pop(self.number, None)
        self._up.cut()
        self._down.cut()
        self.replica.owner.soon(lambda: self.replica.hung_up(self))
        event = Disconnected(connection=self.number)
        clock, told_at = self.replica.world.clock, max(told_at, self._coordinator.deaf_until(self.replica))
        self._coordinator.owner.after(
            max(told_at - clock.now, 0.0) + clock.delay(), lambda: self._coordinator.handle(event)
        )


class Coordinator:
    """One life of the coordinator; the next one gets the same store."""

    def __init__(self, world: World, settings: MembershipSettings, store: list[Ledger]) -> None:
        self.world = world
        self.owner = Owner(world.clock)
        self.links: dict[int, Link] = {}
        self.store = store
        self.membership = Membership(settings, ledger=store[-1] if store else None, now=world.clock.now)
        self.dies_after_persist: bool | None = None
        """True: it dies right after it stored its next decision; False: right before."""
        self._cut_off_until = self._storeless_until = 0.0
        self._beside: int | None = None
        """The replica that hears it all the same."""
        self._stopped = False
        self._left: list[Effect] = []
        """What comes after the store has answered."""
        self.owner.after(TICK, self._tick)

    def accept(self, replica: Replica) -> Link:
        """A leader connects."""
        self.world.connections += 1
        link = self.links[self.world.connections] = Link(self, replica, self.world.connections)
        link.greet()
        return link

    @property
    def answers(self) -> bool:
        """Whether the operator gets an answer from it."""
        return self.owner.alive and not self.owner.frozen and self.world.clock.now >= self._cut_off_until

    def deaf_until(self, replica: Replica) -> float:
        """Return when it can hear this replica again; a time that has passed when it can."""
        return 0.0 if replica.number == self._beside else self._cut_off_until

    def reached_by(self, replica: Replica) -> bool:
        """Whether this replica can connect to it."""
        return self.owner.alive and not self.owner.frozen and self.deaf_until(replica) <= self.world.clock.now

    def cut_off(self, seconds: float, *, beside: int | None = None, from_store: bool) -> bool:
        """Neither hear nor be heard by anybody for so long, but by a replica on the same machine; False: it is so."""
        now = self.world.clock.now
        if not self.owner.alive or self._cut_off_until > now:
            return False
        self._beside, self._cut_off_until = beside, now + seconds
        self._storeless_until = self._cut_off_until if from_store else 0.0
        for link in self.links.values():
            if link.replica.number != beside:
                link.stall(self._cut_off_until)
        return True

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.owner.frozen = self._stopped = True
        self.world.clock.after(seconds, self._continue)

    def _continue(self) -> None:
        self._stopped = False
        self._go_on()

    def _go_on(self) -> None:
        """Do what was left undone, in order, unless something still keeps it from that."""
        if self._left and not self._has_store:
            self.world.clock.after(self._store_delay(), self._go_on)
        elif self.owner.alive and not self._stopped:
            self._catch_up()

    def _catch_up(self) -> None:
        self.owner.frozen = False
        left, self._left = self._left, []
        self._execute(left)
        undone, self.owner.backlog = self.owner.backlog, []
        for action in undone:
            self.owner.act(action)

    @property
    def _has_store(self) -> bool:
        return self.world.clock.now >= self._storeless_until

    def _store_delay(self) -> float:
        """Return how long the store's next answer takes."""
        clock = self.world.clock
        return arrival(self._storeless_until, clock.now) - clock.now + clock.delay()

    def handle(self, event: Event) -> None:
        """Take in an event and execute the effects, in order."""
        self._execute(self.membership.handle(event, self.world.clock.now))

    def exited(self, replica: int, attempt: int) -> None:
        """The operator reports the end of an attempt."""
        self.handle(Exited(replica=replica, attempt=attempt, reason="exited", detected=self.world.clock.now))

    def _tick(self) -> None:
        self.handle(Tick())
        self.owner.after(TICK, self._tick)

    def _execute(self, effects: list[Effect]) -> None:
        for number, effect in enumerate(effects):
            match effect:
                case Persist() if not self._has_store:
                    self._left, self.owner.frozen = effects[number:], True
                    self.world.clock.after(self._store_delay(), self._go_on)
                    return
                case AskStore():
                    self.owner.after(self._store_delay(), lambda: self.handle(StoreAnswered()))
                case Persist() if self.dies_after_persist is False:
                    self.die()
                    return
                case Persist(ledger=ledger, expected=expected):
                    self.world.checks.persists(self.store, ledger, expected)
                    self.store.append(ledger)
                    if self.dies_after_persist:
                        self.die()
                        return
                case Send(connection=connection):
                    if connection in self.links:
                        self.links[connection].to_leader(effect)
                case Drop(connection=connection):
                    if connection in self.links:
                        self.links[connection].drop()
                case _:
                    self.world.checks.noted(effect)

    def die(self) -> None:
        """Its process is gone, and with it everything but the store."""
        self.owner.alive = False
        for link in list(self.links.values()):
            link.close()
        self.world.coordinator_died()
