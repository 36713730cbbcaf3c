"""The coordinator's process: the real membership, a store that outlives it, and connections that may be cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.clock import Channel, Owner

from fthsdp.coordinator.events import (
    Disconnected,
    Drop,
    Effect,
    Event,
    MembershipSettings,
    Persist,
    Received,
    Send,
    Tick,
)
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.membership import Membership
from fthsdp.coordinator.messages import Exited, Hello, MemberState, State

if TYPE_CHECKING:
    from tests.simulation.replica import Replica
    from tests.simulation.world import World

__all__ = ["Coordinator", "Link"]

TICK = 0.25


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

    def mute(self) -> None:
        """Everything that is said from now on is lost, and nobody is told."""
        self._muted = True

    def drop(self) -> None:
        """The coordinator hangs up, after what it has said."""
        if self._open:
            self._open = False
            self._coordinator.links.pop(self.number, None)
            self._down.send(lambda: self.replica.hung_up(self))

    def close(self) -> None:
        """The connection is gone; both sides notice in their own time, and what was under way is lost."""
        if not self._open:
            return
        self._open = False
        self._coordinator.links.pop(self.number, None)
        self._up.cut()
        self._down.cut()
        self.replica.owner.soon(lambda: self.replica.hung_up(self))
        event = Disconnected(connection=self.number)
        self._coordinator.owner.soon(lambda: self._coordinator.handle(event))


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
        self.owner.after(TICK, self._tick)

    def accept(self, replica: Replica) -> Link:
        """A leader connects."""
        self.world.connections += 1
        link = self.links[self.world.connections] = Link(self, replica, self.world.connections)
        link.greet()
        return link

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
        for effect in effects:
            match effect:
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
