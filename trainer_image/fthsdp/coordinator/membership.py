"""Who is a member, under which epoch number, and how a broken step ends: the coordinator's state machine.

It is pure: ``handle(event, now)`` returns effects; whoever runs it (the server, a simulation) executes them in order.
It is level-triggered: facts about leaders are kept (their newest state, who is lost), and after each event ``_advance``
asks what these facts demand. So it does not matter in which order, how often, or over which connection they arrived.

At any time the job is in one of these situations::

    waiting    no epoch with a state exists: the first one is made when enough replicas said hello
    running    ``_record`` is current; at most one planned ``_proposal`` is on its way to follow it
    gathering  a member is lost or fenced: everybody who may be in an epoch up to ``_fence`` is asked for its fence;
               when all who are alive have answered, the decision is persisted and installed
    finishing  somebody knows that the last step is final: the others are told, then all are dismissed

A gather always ends, because whoever does not answer is lost: by its exit, its closed connection, its silence, or
because it talks without answering. A proposal may be dropped for nothing until its Go; from then on it counts as begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

from fthsdp.coordinator.decide import decide, propose
from fthsdp.coordinator.events import (
    Decided,
    Disconnected,
    Drop,
    Effect,
    Event,
    Fenced,
    Finished,
    Left,
    MembershipSettings,
    Persist,
    Proposed,
    Received,
    Removed,
    Send,
    Tick,
    Withdrawn,
)
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.messages import (
    Announce,
    Break,
    Bye,
    Cause,
    Close,
    EpochRecord,
    Exited,
    FromCoordinator,
    Go,
    Hello,
    Install,
    Member,
    MemberState,
    Outcome,
    RefusedMember,
    ReplicaStatus,
    Role,
    State,
    Welcome,
)

__all__ = ["Membership"]

RETRY_DELAY = 1.0
"""Seconds before a planned epoch whose rings did not connect is tried under a new number."""


@dataclass(slots=True, kw_only=True)
class _Peer:
    """The newest incarnation of one replica."""

    replica: int
    attempt: int
    addresses: tuple[str, ...]
    state: MemberState = field(default_factory=MemberState)
    connection: int | None = None
    """The newest connection; None while it has none."""
    greeted: bool = True
    """False: known from the ledger only, it has not yet come back to this coordinator."""
    heard: float
    """When it last said something."""
    deadline: float | None = None
    """When it is lost unless it reconnects; None while connected."""
    baseless: float | None = None
    """Since when it is a shadow that has nothing to catch up from in its epoch."""
    sent: set[tuple[str, int]] = field(default_factory=set)
    """What was said on this connection, so that nothing is repeated with each heartbeat."""

    def as_member(self) -> Member:
        return Member(replica=self.replica, attempt=self.attempt, role=Role.SHADOW, addresses=self.addresses)


@dataclass(slots=True, kw_only=True)
class _Proposal:
    record: EpochRecord
    since: float
    may_have_begun: bool = False
    """Go was said, perhaps by a coordinator before this one: it can only be ended by a fence."""
    go: bool = False
    """Go was said by this coordinator."""
    entered: bool = False
    """Somebody reported having entered it."""


class Membership:
    """Makes every decision about the members of one job."""

    def __init__(self, settings: MembershipSettings, *, ledger: Ledger | None = None, now: float) -> None:
        self._settings = settings
        self._now = now
        self._effects: list[Effect] = []
        self._peers: dict[int, _Peer] = {}
        self._lost: dict[int, int] = {}
        """By replica, the newest attempt known to be gone."""
        self._highest = 0
        """The newest epoch number ever given out."""
        self._record: EpochRecord | None = None
        self._proposal: _Proposal | None = None
        self._fence: int | None = None
        self._fence_since = now
        self._waiting_since = now
        self._retry_at = now
        self._finished: int | None = None
        self._done = False
        if ledger is not None:
            self._restore(ledger)

    def _restore(self, ledger: Ledger) -> None:
        self._highest = ledger.number
        self._record = ledger.current
        if ledger.proposal is not None:
            self._proposal = _Proposal(record=ledger.proposal, since=self._now, may_have_begun=True)
        for member in self._union().values():
            self._peers[member.replica] = _Peer(
                replica=member.replica,
                attempt=member.attempt,
                addresses=member.addresses,
                greeted=False,
                heard=self._now,
                deadline=self._now + self._settings.silence_timeout,
            )

    # --- what others may ask ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the current epoch; 0 before the first."""
        return self._record.number if self._record else 0

    @property
    def paused(self) -> bool:
        """Whether too few active replicas are left to train."""
        return self._record is not None and self._record.paused

    @property
    def finished(self) -> bool:
        """Whether all members have finished the run."""
        return self._done

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Return what is known of each replica."""
        return tuple(self._status(peer) for _, peer in sorted(self._peers.items()))

    def _status(self, peer: _Peer) -> ReplicaStatus:
        member = self._record.member(peer.replica) if self._record else None
        inside = member is not None and member.attempt == peer.attempt
        return ReplicaStatus(
            replica=peer.replica,
            attempt=peer.attempt,
            role=member.role if member and inside else None,
            step=peer.state.step,
            connected=peer.connection is not None,
        )

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at this time and return what is to be done about it, in order."""
        self._pass_time(now)
        match event:
            case Received(message=Hello() as hello):
                self._hello(event.connection, hello)
            case Received(message=State() as message):
                self._state(event, message.state)
            case Disconnected():
                self._disconnected(event.connection)
            case Exited():
                self._exited(event)
            case Tick():
                pass
            case _ as never:
                assert_never(never)  # type: ignore[arg-type]
        self._advance()
        effects, self._effects = self._effects, []
        return effects

    def _pass_time(self, now: float) -> None:
        """Move the clock. Time in which the coordinator itself stood still is no evidence against anybody."""
        gap = now - self._now
        if gap > self._settings.silence_timeout / 2:
            for peer in self._peers.values():
                peer.heard += gap
                peer.deadline = None if peer.deadline is None else peer.deadline + gap
            self._fence_since += gap
            if self._proposal is not None:
                self._proposal.since += gap
        self._now = now

    def _hello(self, connection: int, hello: Hello) -> None:
        replica, attempt = hello.replica, hello.attempt
        refusal = self._refusal(hello)
        if refusal:
            self._refuse(connection, replica, attempt, refusal)
            return
        known = self._peers.get(replica)
        if known is not None and known.attempt < attempt:
            self._lose(known, Cause.REPLACED, f"attempt {attempt} has started")
        elif known is not None and known.connection is not None:
            self._effects.append(Drop(connection=known.connection))
        self._lost[replica] = max(self._lost.get(replica, -1), attempt - 1)
        peer = _Peer(
            replica=replica, attempt=attempt, addresses=hello.addresses, connection=connection, heard=self._now
        )
        self._peers[replica] = peer
        self._send(peer, Welcome(silence_timeout=self._settings.silence_timeout))
        self._learn(peer, hello.state)

    def _refuse(self, connection: int, replica: int, attempt: int, reason: str) -> None:
        message = RefusedMember(reason=reason)
        self._effects.append(Send(connection=connection, replica=replica, attempt=attempt, message=message))
        self._effects.append(Drop(connection=connection))

    def _refusal(self, hello: Hello) -> str:
        """Why this leader is turned away for good; empty when it is not."""
        replica, attempt = hello.replica, hello.attempt
        name = f"replica {replica} attempt {attempt}"
        known = self._peers.get(replica)
        if not 0 <= replica < self._settings.replicas or attempt < 0:
            return f"{name} does not exist: this job has replicas 0…{self._settings.replicas - 1}"
        if attempt <= self._lost.get(replica, -1):
            return f"{name} was taken out or replaced: start it again under a higher attempt"
        if known is not None and attempt < known.attempt:
            return f"{name} is stale: attempt {known.attempt} is running"
        if known is not None and attempt == known.attempt and hello.addresses != known.addresses:
            return f"{name} is in use by another process: a new one needs a higher attempt"
        ranks = self._world_size(but=replica)
        if ranks is not None and len(hello.addresses) != ranks:
            return f"{name} has {len(hello.addresses)} ranks, but the other replicas have {ranks}"
        if not hello.addresses:
            return f"{name} names no address: there must be one for each rank"
        if hello.state.epoch > self._highest:
            return f"{name} knows epoch {hello.state.epoch}, but the newest here is {self._highest}: the store was lost"
        inside = self._union().get(replica)
        if hello.state.epoch and not hello.state.leaving and (inside is None or inside.attempt != attempt):
            return f"{name} is no member any more: start it again, so that it catches up from the others"
        return ""

    def _world_size(self, *, but: int) -> int | None:
        ranks = [len(m.addresses) for m in self._union().values()]
        return next(iter(ranks + [len(p.addresses) for r, p in self._peers.items() if r != but]), None)

    def _state(self, event: Received, state: MemberState) -> None:
        peer = self._peers.get(event.replica)
        if peer is not None and peer.connection == event.connection:
            self._learn(peer, state)

    def _learn(self, peer: _Peer, state: MemberState) -> None:
        starved = state.epoch > 0 and state.step is None and state.base == 0
        if not starved:
            peer.baseless = None
        elif peer.baseless is None or state.epoch != peer.state.epoch:
            peer.baseless = self._now
        peer.state = state
        peer.heard = self._now
        if self._proposal is not None and state.epoch >= self._proposal.record.number:
            self._proposal.entered = True
        if state.finished is not None:
            self._finished = max(state.finished, self._finished or 0)

    def _disconnected(self, connection: int) -> None:
        for peer in self._peers.values():
            if peer.connection == connection:
                peer.connection = None
                peer.deadline = self._now + self._settings.reconnect_grace

    def _exited(self, event: Exited) -> None:
        peer = self._peers.get(event.replica)
        if peer is not None and peer.attempt <= event.attempt:
            self._lose(peer, Cause.EXITED, event.reason, detected=event.detected)
        self._lost[event.replica] = max(self._lost.get(event.replica, -1), event.attempt)

    # --- who is there -----------------------------------------------------------------------------------------------

    def _is_lost(self, member: Member) -> bool:
        return member.attempt <= self._lost.get(member.replica, -1)

    def _union(self) -> dict[int, Member]:
        """Everybody alive who may be in the current epoch or in the proposed one."""
        members = [*(self._record.members if self._record else ())]
        members += self._proposal.record.members if self._proposal else ()
        return {m.replica: m for m in members if not self._is_lost(m)}

    def _gathered(self) -> dict[int, Member]:
        """Everybody whose answer to the fence is needed.

        A paused job takes joiners in by a decision. Who is let go by an epoch that has begun is not waited for.
        """
        joiners = {p.replica: p.as_member() for p in self._joiners()} if self.paused else {}
        entered = self._proposal is not None and self._proposal.entered
        return joiners | {r: m for r, m in self._union().items() if not (entered and self._has_left(m))}

    def _joiners(self) -> Iterator[_Peer]:
        """Newcomers that wait to be taken in."""
        union = self._union()
        for replica, peer in sorted(self._peers.items()):
            if replica not in union and peer.connection is not None and not peer.state.epoch and not peer.state.leaving:
                yield peer

    def _has_left(self, member: Member) -> bool:
        """Whether this member of the current epoch is let go by the proposal, which may have begun."""
        proposal = self._proposal
        return proposal is not None and proposal.may_have_begun and proposal.record.member(member.replica) is None

    # --- evidence ---------------------------------------------------------------------------------------------------

    def _weigh_evidence(self) -> None:
        for peer in list(self._peers.values()):
            suspicion = self._suspicion(peer) if peer.deadline is not None and peer.greeted else ""
            if peer.deadline is not None and (self._now >= peer.deadline or suspicion):
                self._lose(peer, Cause.CONNECTION_LOST, suspicion or "its connection closed")
            elif peer.connection is not None and self._now - peer.heard >= self._settings.silence_timeout:
                self._lose(peer, Cause.SILENT, f"nothing was heard of it for {self._settings.silence_timeout:g} s")
            elif self._is_mute(peer):
                waited = f"it did not answer a fence for {self._settings.answer_timeout:g} s"
                self._lose(peer, Cause.HUNG, f"{waited}: one of its ranks hangs")

    def _suspicion(self, peer: _Peer) -> str:
        """What a ring neighbour says against this peer in an epoch that has begun, if any does."""
        for member in self._union().values():
            state = self._peers[member.replica].state
            if peer.replica in state.suspects and self._is_broken(member):
                return f"its connection closed, and replica {member.replica} reports: {state.reason or 'ring broken'}"
        return ""

    def _is_mute(self, peer: _Peer) -> bool:
        return (
            self._fence is not None
            and self._now - self._fence_since >= self._settings.answer_timeout
            and peer.replica in self._gathered()
            and peer.state.fence < self._fence
        )

    def _lose(self, peer: _Peer, cause: Cause, reason: str, *, detected: float | None = None) -> None:
        """Take a replica out for good. Only this function does, and each caller has its evidence."""
        member = self._union().get(peer.replica)
        member = member if member is not None and member.attempt == peer.attempt else None
        expected = (
            peer.state.finished is not None
            or (bool(peer.state.leaving) and (member is None or self._has_left(member)))
            or (self._finished is not None and not peer.greeted)
        )
        self._lost[peer.replica] = max(self._lost.get(peer.replica, -1), peer.attempt)
        del self._peers[peer.replica]
        if not expected:
            self._effects.append(
                Removed(
                    replica=peer.replica,
                    attempt=peer.attempt,
                    cause=cause,
                    reason=reason,
                    member=member is not None,
                    detected=self._now if detected is None else detected,
                )
            )
        if peer.connection is not None:
            self._refuse(peer.connection, peer.replica, peer.attempt, f"taken out of the job ({cause}): {reason}")

    # --- what the facts demand --------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._weigh_evidence()
        while self._progress():
            pass
        for peer in self._peers.values():
            if peer.connection is not None:
                self._tell(peer)

    def _progress(self) -> bool:
        """Make at most one transition; return whether one was made."""
        if self._finished is not None:
            return self._finish()
        if self._fence is not None:
            return self._decide()
        if self._record is None or not self._record.members:
            return self._start()
        reason = self._break()
        if reason:
            self._begin_gather(reason)
            return True
        if self._proposal is not None:
            return self._advance_proposal(self._proposal)
        return self._change(self._record)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Make the first epoch, or the first one after everything was lost."""
        members = [p.as_member().model_copy(update={"role": Role.ACTIVE}) for p in self._joiners()]
        patient = self._now - self._waiting_since < self._settings.start_timeout
        if len(members) < (self._settings.replicas if patient else self._settings.min_replicas):
            return False
        self._decided(EpochRecord(number=self._highest + 1, members=tuple(members), outcome=Outcome(step=0)))
        return True

    # --- gathering --------------------------------------------------------------------------------------------------

    def _begun(self) -> EpochRecord | None:
        """The proposal, if it may have begun."""
        return self._proposal.record if self._proposal and self._proposal.may_have_begun else None

    def _break(self) -> str:
        """Why the current epoch cannot go on; empty when it can."""
        assert self._record is not None
        begun = self._begun()
        for member in (*self._record.members, *(begun.members if begun else ())):
            if self._is_lost(member) and not self._has_left(member):
                return f"replica {member.replica} is gone"
        for member in self._union().values():
            if self._is_broken(member) and not self._has_left(member):
                state = self._peers[member.replica].state
                return f"replica {member.replica} reports: {state.reason or 'its ring is broken'}"
        return ""

    def _is_broken(self, member: Member) -> bool:
        """Whether this member says that an epoch that counts cannot go on."""
        if self._record is None:
            return False
        state, begun = self._peers[member.replica].state, self._begun()
        if begun is not None and max(state.fence, state.broken) >= begun.number:
            return True
        newest = max(self._record.number, state.epoch)
        inside = self._record.member(member.replica) is not None
        return inside and (state.fence >= newest or state.broken == newest)

    def _begin_gather(self, reason: str) -> None:
        if self._proposal is not None and not self._proposal.may_have_begun:
            self._withdraw(reason)
        self._fence = self._highest
        self._fence_since = self._now
        self._effects.append(Fenced(epoch=self._fence, reason=reason))

    def _decide(self) -> bool:
        assert self._record is not None
        assert self._fence is not None
        members = self._gathered()
        states = {r: self._peers[r].state for r in members}
        if any(state.fence < self._fence for state in states.values()):
            return False
        base = self._proposal.record if self._proposal and self._proposal.entered else self._record
        record = decide(
            states,
            members=members,
            base=base,
            number=self._highest + 1,
            wanted=self._settings.replicas,
            least=self._settings.min_replicas,
        )
        if record is None:
            self._begin_again()
        else:
            self._decided(record)
        return True

    def _decided(self, record: EpochRecord) -> None:
        left = [m for m in self._union().values() if record.member(m.replica) is None]
        self._fence = self._proposal = None
        self._record = record
        self._persist(Ledger(current=record))
        self._effects.append(Decided(record=record))
        self._let_go(left)

    def _begin_again(self) -> None:
        """Nobody with a state is left: whoever caught up from the lost ones has to start again too."""
        orphans = list(self._union().values())
        self._fence = self._proposal = self._record = None
        self._waiting_since = self._now
        self._effects.append(Decided(record=None))
        for peer in [self._peers[m.replica] for m in orphans if not self._peers[m.replica].state.leaving]:
            self._lose(peer, Cause.ORPHANED, "nobody with a state is left: start again")

    # --- planned changes --------------------------------------------------------------------------------------------

    def _change(self, record: EpochRecord) -> bool:
        """Plan the next epoch when all have entered this one and something is to be changed."""
        peers = {m.replica: self._peers[m.replica] for m in record.members}
        states = {r: p.state for r, p in peers.items()}
        if self._now < self._retry_at or any(s.epoch < record.number for s in states.values()):
            return False
        stranded = [r for r, peer in peers.items() if self._is_stranded(peer)]
        if record.paused:
            return self._change_paused(record, states, stranded)
        proposed = propose(
            states,
            base=record,
            joiners=[p.as_member() for p in self._joiners()],
            stranded=stranded,
            number=self._highest + 1,
            wanted=self._settings.replicas,
            least=self._settings.min_replicas,
        )
        if proposed is None:
            return False
        self._proposal = _Proposal(record=proposed, since=self._now)
        self._persist(Ledger(current=record, proposal=proposed))
        self._effects.append(Proposed(record=proposed))
        return True

    def _change_paused(self, record: EpochRecord, states: dict[int, MemberState], stranded: list[int]) -> bool:
        """While paused no ring carries a boundary, so changes are made by a decision."""
        steps = [s.step for s in states.values() if s.step is not None]
        vacant = len(record.active) < self._settings.replicas
        ready = [r for r, s in states.items() if r not in record.active and s.step is not None and s.step == max(steps)]
        if not (any(self._joiners()) or stranded or (vacant and ready) or any(s.leaving for s in states.values())):
            return False
        self._begin_gather("the membership changes while the job is paused")
        return True

    def _is_stranded(self, peer: _Peer) -> bool:
        """Whether a shadow has nothing to catch up from and will get nothing from this epoch."""
        assert self._record is not None
        if peer.baseless is None:
            return False
        promised = peer.replica in self._record.snapshots
        return not promised or self._now - peer.baseless >= self._settings.silence_timeout

    def _advance_proposal(self, proposal: _Proposal) -> bool:
        record = proposal.record
        states = {m.replica: self._peers[m.replica].state for m in record.members if not self._is_lost(m)}
        if not proposal.may_have_begun:
            reason = self._obstacle(record, states)
            if reason:
                self._withdraw(reason)
                return True
        if not proposal.go:
            return self._say_go(proposal, states)
        if record.members and all(s.epoch >= record.number for s in states.values()):
            return self._adopt(record)
        if not record.members and not self._union():
            return self._adopt(record)
        return False

    def _obstacle(self, record: EpochRecord, states: dict[int, MemberState]) -> str:
        """Why this proposal cannot come about."""
        lost = [m.replica for m in record.members if self._is_lost(m)]
        if lost:
            return f"replica {lost[0]} is gone before it could join"
        broken = [r for r, s in states.items() if s.broken >= record.number]
        if broken:
            self._retry_at = self._now + RETRY_DELAY
            return f"replica {broken[0]} could not connect: {states[broken[0]].reason or 'no reason given'}"
        return ""

    def _say_go(self, proposal: _Proposal, states: dict[int, MemberState]) -> bool:
        number = proposal.record.number
        if proposal.entered or all(max(s.connected, s.epoch) >= number for s in states.values()):
            proposal.go = proposal.may_have_begun = True
            return True
        if self._now - proposal.since < self._settings.connect_timeout:
            return False
        return self._give_up_on(proposal, [r for r, s in states.items() if max(s.connected, s.epoch) < number])

    def _give_up_on(self, proposal: _Proposal, laggards: list[int]) -> bool:
        """The rings of a proposal do not come up and nobody says why."""
        reason = f"the rings of epoch {proposal.record.number} did not connect in {self._settings.connect_timeout:g} s"
        newcomers = [r for r in laggards if self._record is None or self._record.member(r) is None]
        for replica in newcomers:
            self._lose(self._peers[replica], Cause.HUNG, reason)
        if proposal.may_have_begun:
            self._begin_gather(reason)
        else:
            self._retry_at = self._now + RETRY_DELAY
            self._withdraw(reason)
        return True

    def _withdraw(self, reason: str) -> None:
        assert self._proposal is not None
        self._effects.append(Withdrawn(epoch=self._proposal.record.number, reason=reason))
        self._proposal = None

    def _adopt(self, record: EpochRecord) -> bool:
        """The proposal has begun for all its members: it is the current epoch."""
        assert self._record is not None
        left = [m for m in self._record.members if record.member(m.replica) is None]
        self._record, self._proposal = record, None
        self._waiting_since = self._now
        self._let_go(left)
        return True

    def _let_go(self, members: list[Member]) -> None:
        for member in members:
            peer = self._peers.get(member.replica)
            reason = peer.state.leaving if peer is not None and peer.attempt == member.attempt else ""
            reason = reason or "it had asked to leave"
            self._effects.append(Left(replica=member.replica, attempt=member.attempt, reason=reason))

    # --- finishing --------------------------------------------------------------------------------------------------

    def _finish(self) -> bool:
        """The last step is final: nothing needs to be decided any more."""
        assert self._finished is not None
        self._fence = self._proposal = None
        members = self._record.members if self._record else ()
        open_ends = [m for m in members if not self._is_lost(m) and self._peers[m.replica].state.finished is None]
        if self._done or open_ends:
            return False
        self._done = True
        self._effects.append(Finished(step=self._finished))
        return True

    # --- what each leader has to know -------------------------------------------------------------------------------

    def _tell(self, peer: _Peer) -> None:
        """Say to this leader what its newest state shows that it lacks, once per connection."""
        if self._finished is not None:
            if self._done:
                self._say(peer, 0, Bye())
            elif peer.state.finished is None:
                self._say(peer, self._finished, Close(step=self._finished))
            return
        member = self._union().get(peer.replica)
        if member is None or member.attempt != peer.attempt:
            if peer.state.leaving:
                self._say(peer, 0, Bye())
            elif self._fence is not None and peer.replica in self._gathered():
                self._say_break(peer)
        elif self._fence is not None:
            self._say_break(peer)
        else:
            self._tell_epochs(peer)

    def _say_break(self, peer: _Peer) -> None:
        assert self._fence is not None
        if peer.state.fence < self._fence:
            self._say(peer, self._fence, Break(epoch=self._fence))

    def _tell_epochs(self, peer: _Peer) -> None:
        record, proposal, state = self._record, self._proposal, peer.state
        if record and record.outcome and record.member(peer.replica) and state.epoch < record.number:
            self._say(peer, record.number, Install(record=record))
        if proposal is not None and state.epoch < proposal.record.number:
            if state.connected < proposal.record.number:
                self._say(peer, proposal.record.number, Announce(record=proposal.record))
            if proposal.go:
                self._say(peer, proposal.record.number, Go(epoch=proposal.record.number))

    def _say(self, peer: _Peer, number: int, message: FromCoordinator) -> None:
        if (message.kind, number) not in peer.sent:
            peer.sent.add((message.kind, number))
            self._send(peer, message)

    def _send(self, peer: _Peer, message: FromCoordinator) -> None:
        if peer.connection is not None:
            self._effects.append(
                Send(connection=peer.connection, replica=peer.replica, attempt=peer.attempt, message=message)
            )

    def _persist(self, ledger: Ledger) -> None:
        self._effects.append(Persist(ledger=ledger, expected=self._highest))
        self._highest = ledger.number
