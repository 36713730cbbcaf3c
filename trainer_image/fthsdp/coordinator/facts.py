"""What the coordinator knows about a job's members, and what can be read from it. Nothing here decides or acts.

The facts are: the current epoch and the proposed one, the newest incarnation of each replica with its newest state, and
which attempts are gone. Everything else (who may be in an epoch, whose answer is needed, who is suspected, why an epoch
cannot go on) is computed from them when asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fthsdp import timeouts
from fthsdp.coordinator.events import MembershipSettings
from fthsdp.coordinator.messages import EpochRecord, Hello, Member, MemberState, Role
from fthsdp.errors import ConfigError
from fthsdp.scramble import fingerprint

__all__ = ["Facts", "Peer", "Proposal"]


@dataclass(slots=True, kw_only=True)
class Peer:
    """The newest incarnation of one replica."""

    replica: int
    attempt: int
    process: str
    """Fingerprint of its addresses."""
    addresses: tuple[str, ...] = ()
    """Empty until it has come back to a new coordinator."""
    state: MemberState = field(default_factory=MemberState)
    connection: int | None = None
    """The newest connection; None while it has none."""
    greeted: bool = True
    """False: known from the ledger only, it has not yet come back to this coordinator."""
    heard: float
    """When it last said something."""
    connected: float = 0.0
    """When its newest connection began."""
    arrived: float = 0.0
    """When it said hello for the first time."""
    deadline: float | None = None
    """When it is lost unless it reconnects; None while connected."""
    baseless: float | None = None
    """Since when it is a shadow that has nothing to catch up from in its epoch."""
    sent: set[tuple[str, int]] = field(default_factory=set)
    """What was said on this connection, so that nothing is repeated with each heartbeat."""

    def as_member(self, role: Role = Role.SHADOW) -> Member:
        """Return its entry for an epoch record."""
        return Member(replica=self.replica, attempt=self.attempt, role=role, addresses=self.addresses)

    def learn(self, state: MemberState, now: float) -> None:
        """Take in what it says of itself."""
        starved = state.epoch > 0 and state.step is None and state.base == 0
        if not starved:
            self.baseless = None
        elif self.baseless is None or state.epoch != self.state.epoch:
            self.baseless = now
        self.state = state
        self.heard = now

    @property
    def may_go(self) -> bool:
        """Whether it is no failure when its connection closes."""
        return bool(self.state.leaving) or self.state.finished is not None


@dataclass(slots=True, kw_only=True)
class Proposal:
    """A planned epoch that is not yet current."""

    record: EpochRecord
    since: float
    may_have_begun: bool = False
    """Go was said, perhaps by a coordinator before this one: it can only be ended by a fence."""
    go: bool = False
    """Go was said by this coordinator."""
    entered: bool = False
    """Somebody reported having entered it."""


@dataclass(slots=True, kw_only=True)
class Facts:
    """All that is known."""

    settings: MembershipSettings
    record: EpochRecord | None = None
    """The current epoch; None when there is none with a state."""
    proposal: Proposal | None = None
    peers: dict[int, Peer] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    """By replica, the newest attempt known to be gone."""
    abandoned: set[int] = field(default_factory=set)
    """Replicas of which no other attempt is expected. A coordinator that starts anew is told again."""
    highest: int = 0
    """The newest epoch number ever given out."""
    ranks: int = 0
    """Of each member of the epochs that a coordinator before this one has made; 0: none is known."""

    # --- who is there -----------------------------------------------------------------------------------------------

    def is_lost(self, member: Member) -> bool:
        """Whether this incarnation is gone."""
        return member.attempt <= self.lost.get(member.replica, -1)

    def give_up(self, replica: int, attempt: int) -> None:
        """Remember that this attempt and all before it are gone; there is none before the first."""
        if attempt >= 0:
            self.lost[replica] = max(self.lost.get(replica, 0), attempt)

    @property
    def expected(self) -> int:
        """How many replicas a run waits for before it begins: those that are wanted, as far as they can come."""
        able = self.settings.replicas + self.settings.spares - len(self.abandoned)
        return max(self.settings.min_replicas, min(self.settings.replicas, able))

    @property
    def paused(self) -> bool:
        """Whether too few active replicas are left to train."""
        return self.record is not None and self.record.paused

    @property
    def begun(self) -> EpochRecord | None:
        """The proposed epoch, if it may have begun."""
        return self.proposal.record if self.proposal and self.proposal.may_have_begun else None

    def locate(self, peer: Peer) -> None:
        """Put its addresses into the epochs that a coordinator before this one has made."""

        def addresses_of(member: Member) -> tuple[str, ...]:
            here = (member.replica, member.attempt) == (peer.replica, peer.attempt)
            return peer.addresses if here else member.addresses

        if self.record is not None:
            self.record = self.record.with_addresses(addresses_of)
        if self.proposal is not None:
            self.proposal.record = self.proposal.record.with_addresses(addresses_of)

    def union(self) -> dict[int, Member]:
        """Everybody alive who may be in the current epoch or in the proposed one."""
        members = [*(self.record.members if self.record else ())]
        members += self.proposal.record.members if self.proposal else ()
        return {m.replica: m for m in members if not self.is_lost(m)}

    def gathered(self) -> dict[int, Member]:
        """Everybody whose answer to a fence is needed.

        A paused job takes joiners in by a decision. Who is let go by an epoch that has begun is not waited for.
        """
        joiners = {p.replica: p.as_member() for p in self.joiners()} if self.paused else {}
        entered = self.proposal is not None and self.proposal.entered
        return joiners | {r: m for r, m in self.union().items() if not (entered and self.has_left(m))}

    def taking_part(self) -> dict[int, Member]:
        """Everybody who has to do something so that a step ends."""
        inside = [*(self.record.members if self.record else ()), *(self.begun.members if self.begun else ())]
        return {m.replica: m for m in inside if not (self.is_lost(m) or self.has_left(m))}

    def joiners(self) -> Iterator[Peer]:
        """Newcomers that wait to be taken in, in order.

        Who does not know yet from which state it could begin is still being built, and would hold up a ring.
        """
        union = self.union()
        for replica, peer in sorted(self.peers.items()):
            waits = peer.state.origin and not (peer.state.epoch or peer.state.leaving)
            if replica not in union and peer.connection is not None and waits:
                yield peer

    def has_left(self, member: Member) -> bool:
        """Whether this member of the current epoch is let go by the proposal, which may have begun."""
        return self.begun is not None and self.begun.member(member.replica) is None

    def is_stranded(self, peer: Peer, now: float) -> bool:
        """Whether a shadow has nothing to catch up from and will get nothing from the current epoch."""
        if peer.baseless is None or self.record is None:
            return False
        promised = peer.replica in self.record.snapshots
        return not promised or now - peer.baseless >= self.settings.silence_timeout

    # --- who may come in --------------------------------------------------------------------------------------------

    def refusal(self, hello: Hello) -> str:
        """Why this leader is turned away for good; empty when it is not."""
        name = f"replica {hello.replica} attempt {hello.attempt}"
        questions = (self._unknown, self._stale, self._misshapen, self._out_of_step, self._untimely)
        reason = next((reason for question in questions if (reason := question(hello))), "")
        return f"{name} {reason}" if reason else ""

    def _unknown(self, hello: Hello) -> str:
        last = self.settings.replicas + self.settings.spares - 1
        if 0 <= hello.replica <= last and hello.attempt >= 0:
            return ""
        return f"does not exist: this job has replicas 0…{last}{', spares included' if self.settings.spares else ''}"

    def _stale(self, hello: Hello) -> str:
        known = self.peers.get(hello.replica)
        if hello.attempt <= self.lost.get(hello.replica, -1):
            return "was taken out or replaced: start it again under a higher attempt"
        if known is not None and hello.attempt == known.attempt and fingerprint(hello.addresses) != known.process:
            return "is in use by another process: a new one needs a higher attempt"
        return ""

    def _misshapen(self, hello: Hello) -> str:
        if not hello.addresses:
            return "names no address: there must be one for each rank"
        ranks = [self.ranks] if self.ranks and self.union() else []
        ranks += [len(m.addresses) for m in self.union().values() if m.addresses]
        ranks += [len(p.addresses) for r, p in self.peers.items() if r != hello.replica and p.addresses]
        if ranks and len(hello.addresses) != ranks[0]:
            return f"has {len(hello.addresses)} ranks, but the other replicas have {ranks[0]}"
        return ""

    def _out_of_step(self, hello: Hello) -> str:
        if hello.state.epoch > self.highest:
            return f"knows epoch {hello.state.epoch}, but the newest here is {self.highest}: the store was lost"
        inside = self.union().get(hello.replica)
        if hello.state.epoch and not hello.state.leaving and (inside is None or inside.attempt != hello.attempt):
            return "is no member any more: start it again, so that it catches up from the others"
        return ""

    def _untimely(self, hello: Hello) -> str:
        try:
            timeouts.check(self.settings.times | hello.times)
        except ConfigError as error:
            return f"does not fit the coordinator: {error}"
        return ""

    # --- what speaks against an epoch -------------------------------------------------------------------------------

    def break_reason(self) -> str:
        """Why the current epoch cannot go on; empty when it can."""
        assert self.record is not None
        for member in (*self.record.members, *(self.begun.members if self.begun else ())):
            if self.is_lost(member) and not self.has_left(member):
                return f"replica {member.replica} is gone"
        for member in self.union().values():
            if self.says_broken(member) and not self.has_left(member):
                state = self.peers[member.replica].state
                return f"replica {member.replica} reports: {state.reason or 'its ring is broken'}"
        return ""

    def says_broken(self, member: Member) -> bool:
        """Whether this member says that an epoch that counts cannot go on."""
        if self.record is None:
            return False
        state, begun = self.peers[member.replica].state, self.begun
        if begun is not None and max(state.fence, state.broken) >= begun.number:
            return True
        newest = max(self.record.number, state.epoch)
        inside = self.record.member(member.replica) is not None
        return inside and (state.fence >= newest or state.broken == newest)

    def suspicion(self, peer: Peer) -> str:
        """What a ring neighbour says against this peer in an epoch that has begun; empty when none does."""
        for member in self.union().values():
            state = self.peers[member.replica].state
            if peer.replica in state.suspects and self.says_broken(member):
                return f"its connection closed, and replica {member.replica} reports: {state.reason or 'ring broken'}"
        return ""
