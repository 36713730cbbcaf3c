"""Who is a member, under which epoch number, and how a broken step ends: the coordinator's state machine.

It is pure: ``handle(event, now)`` returns effects; whoever runs it (the server, a simulation) executes them in order.
It is level-triggered: facts about leaders are kept, and after each event ``_advance`` asks what they demand.
So it does not matter in which order, how often, or over which connection these facts arrived.

At any time the job is in one of these situations::

    waiting    no epoch with a state exists: the first one is made when enough replicas said hello
    running    the record is current; at most one planned proposal is on its way to follow it
    gathering  a member is lost or fenced: everybody who may be in an epoch up to ``_fence`` is asked for its fence;
               when all who are alive have answered, the decision is persisted and installed
    finishing  somebody knows that the last step is final: the others are told, then all are dismissed

A gather always ends, because whoever does not answer is lost: by its exit, its closed connection, its silence, or
because it talks without answering. While the job runs and no step ends, everybody is asked where its ranks are
(``hangs``). A proposal may be dropped for nothing until its Go; from then on it counts as begun.
"""

from __future__ import annotations

from typing import assert_never

from fthsdp.coordinator.decide import decide, may_leave, propose
from fthsdp.coordinator.doubt import Doubt
from fthsdp.coordinator.events import (
    AskStore,
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
    Stalled,
    Started,
    StoreAnswered,
    Tick,
    Withdrawn,
)
from fthsdp.coordinator.facts import Facts, Peer, Proposal
from fthsdp.coordinator.hangs import Diagnosis, HangWatch
from fthsdp.coordinator.ledger import Ledger
from fthsdp.coordinator.messages import (
    Announce,
    Break,
    Bye,
    Cause,
    Close,
    Crash,
    EpochRecord,
    Exited,
    FromCoordinator,
    Go,
    Hello,
    Install,
    Member,
    MemberState,
    Probe,
    RefusedMember,
    ReplicaStatus,
    State,
    Verdict,
    Welcome,
)
from fthsdp.coordinator.start import LOOK_AGAIN, first_epoch, replaced
from fthsdp.scramble import fingerprint

__all__ = ["Membership"]

RETRY_DELAY = 1.0
"""Seconds before a planned epoch whose rings did not connect is tried under a new number."""

_SAID = (Cause.STATE_DIVERGED, Cause.FROZEN)
"""Causes by which a replica can begin its own ``failed``."""
_MAY_BE_THERE = (Cause.SILENT, Cause.HUNG, Cause.FAILED, *_SAID, Cause.CONNECTION_LOST)
"""Causes after which processes of the attempt may still run."""


class Membership:
    """Makes every decision about the members of one job."""

    def __init__(self, settings: MembershipSettings, *, ledger: Ledger | None = None, now: float) -> None:
        self._settings = settings
        self._facts = Facts(settings=settings)
        self._doubt = Doubt(silence_timeout=settings.silence_timeout, return_timeout=settings.longest_return, real=now)
        self._now = now
        """The time that counts: that in which the coordinator could have heard the others."""
        self._effects: list[Effect] = []
        self._fence: int | None = None
        self._fence_since = now
        self._waiting_since = now
        self._retry_at = now
        self._watch = HangWatch(stall_timeout=settings.stall_timeout, answer_timeout=settings.answer_timeout, now=now)
        self._stall = ""
        """Why the rings have to be made anew although none is broken."""
        self._finished: int | None = None
        self._verdicts: dict[int, tuple[float, Verdict]] = {}
        """By replica, the newest one and since when it is to be heard."""
        self._done = False
        self._untold: Started | None = None
        """A start that the coordinator before this one may not have lived to tell."""
        if ledger is not None:
            self._restore(ledger)

    def _restore(self, ledger: Ledger) -> None:
        self._facts.highest = ledger.number
        self._facts.record = ledger.current
        self._facts.lost = dict(ledger.lost)
        self._facts.ranks = ledger.ranks
        if ledger.replaced is not None:
            self._untold = _start_of(ledger.current, ledger.replaced)
        for replica, attempt in ledger.lost.items():
            # Whoever started it may not have heard of it before the coordinator before this one was gone.
            self._judge(replica, attempt, Cause.CONNECTION_LOST, "it was taken out before this coordinator started")
        if ledger.proposal is not None:
            self._facts.proposal = Proposal(record=ledger.proposal, since=self._now, may_have_begun=True)
        for member in self._facts.union().values():
            self._facts.peers[member.replica] = Peer(
                replica=member.replica,
                attempt=member.attempt,
                process=ledger.processes.get(member.replica) or fingerprint(member.addresses),
                greeted=False,
                heard=self._now,
                deadline=self._now + self._settings.longest_return,
            )

    # --- what others may ask ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the current epoch; 0 before the first."""
        return self._facts.record.number if self._facts.record else 0

    @property
    def newest(self) -> int:
        """The highest number given out, whether that epoch counts yet or not; 0 before the first."""
        return self._facts.highest

    @property
    def paused(self) -> bool:
        """Whether too few active replicas are left to train."""
        return self._facts.paused

    @property
    def finished(self) -> bool:
        """Whether all members have finished the run."""
        return self._done

    @property
    def abandoned(self) -> tuple[int, ...]:
        """Replicas of which no other attempt is expected."""
        return tuple(sorted(self._facts.abandoned))

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Who was taken out by this coordinator although its processes may still run."""
        return tuple(verdict for _, (since, verdict) in sorted(self._verdicts.items()) if self._now >= since)

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Return what is known of each replica."""
        return tuple(self._status(peer) for _, peer in sorted(self._facts.peers.items()))

    def _status(self, peer: Peer) -> ReplicaStatus:
        member = self._facts.record.member(peer.replica) if self._facts.record else None
        inside = member is not None and member.attempt == peer.attempt
        return ReplicaStatus(
            replica=peer.replica,
            attempt=peer.attempt,
            role=member.role if member and inside else None,
            step=peer.state.step,
        )

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event at this time and return what is to be done about it, in order."""
        self._doubt.pass_time(now)
        self._now = self._doubt.now
        match event:
            case Received(message=Hello() as hello):
                self._hello(event.connection, hello)
            case Received(message=State() as message):
                self._state(event, message.state)
            case Disconnected():
                self._disconnected(event.connection)
            case Exited():
                self._exited(event)
            case StoreAnswered():
                self._doubt.answered()
            case Tick():
                pass
            case _ as never:
                assert_never(never)  # type: ignore[arg-type]
        self._advance()
        effects, self._effects = self._effects, []
        return effects

    def _hello(self, connection: int, hello: Hello) -> None:
        replica, attempt = hello.replica, hello.attempt
        refusal = self._facts.refusal(hello)
        if refusal:
            self._refuse(connection, replica, attempt, refusal)
            return
        known = self._facts.peers.get(replica)
        if known is not None and known.attempt < attempt:
            self._lose(known, Cause.REPLACED, f"attempt {attempt} has started")
        elif known is not None and known.connection is not None:
            self._effects.append(Drop(connection=known.connection))
        self._facts.give_up(replica, attempt - 1)
        self._facts.abandoned.discard(replica)
        peer = Peer(
            replica=replica,
            attempt=attempt,
            process=fingerprint(hello.addresses),
            addresses=hello.addresses,
            connection=connection,
            heard=self._now,
            connected=self._now,
            arrived=known.arrived if known is not None and known.attempt == attempt else self._now,
        )
        self._facts.peers[replica] = peer
        if known is not None and not known.greeted:
            self._facts.locate(peer)
        self._send(peer, Welcome())
        self._learn(peer, hello.state)

    def _refuse(self, connection: int, replica: int, attempt: int, reason: str) -> None:
        message = RefusedMember(reason=reason)
        self._effects.append(Send(connection=connection, replica=replica, attempt=attempt, message=message))
        self._effects.append(Drop(connection=connection))

    def _state(self, event: Received, state: MemberState) -> None:
        peer = self._facts.peers.get(event.replica)
        if peer is not None and peer.connection == event.connection:
            self._learn(peer, state)

    def _learn(self, peer: Peer, state: MemberState) -> None:
        peer.learn(state, self._now)
        proposal = self._facts.proposal
        if proposal is not None and state.epoch >= proposal.record.number:
            proposal.entered = True
        if state.finished is not None:
            self._finished = max(state.finished, self._finished or 0)
            self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        """Who has not come back to this coordinator by now may have finished too, and ended."""
        for peer in self._facts.peers.values():
            if not peer.greeted and peer.deadline is not None:
                peer.deadline = min(peer.deadline, self._now + self._settings.silence_timeout)

    def _disconnected(self, connection: int) -> None:
        for peer in self._facts.peers.values():
            if peer.connection == connection:
                peer.connection = None
                peer.deadline = self._now + self._settings.reconnect_grace

    def _exited(self, event: Exited) -> None:
        peer = self._facts.peers.get(event.replica)
        if peer is not None and peer.attempt <= event.attempt:
            self._lose(peer, Cause.EXITED, event.reason, detected=event.detected)
        self._facts.give_up(event.replica, event.attempt)
        if event.final and (peer is None or peer.attempt <= event.attempt):
            self._facts.abandoned.add(event.replica)
        if event.crash is not None and (peer is None or peer.attempt <= event.attempt):
            self._crashed(event)

    def _crashed(self, event: Exited) -> None:
        """Keep what a launcher says for the operator: the first crash of an attempt, as the others follow from it."""
        _, known = self._verdicts.get(event.replica, (0.0, None))
        known_attempt = -1 if known is None else known.attempt
        vague = known is not None and known.cause is Cause.CONNECTION_LOST
        if known_attempt < event.attempt or (vague and known_attempt == event.attempt):
            self._judge(event.replica, event.attempt, Cause.EXITED, event.reason, crash=event.crash)

    # --- evidence ---------------------------------------------------------------------------------------------------

    def _weigh_evidence(self) -> None:
        for peer in list(self._facts.peers.values()):
            suspicion = self._facts.suspicion(peer) if peer.deadline is not None and peer.greeted else ""
            if peer.state.failed:
                self._lose(peer, _cause_of(peer.state.failed), peer.state.failed)
            elif not self._doubt.over:
                continue
            elif peer.deadline is not None and (self._now >= peer.deadline or suspicion):
                self._lose(peer, Cause.CONNECTION_LOST, suspicion or "its connection closed")
            elif peer.connection is not None and self._now - peer.heard >= self._settings.silence_timeout:
                self._lose(peer, Cause.SILENT, f"nothing was heard of it for {self._settings.silence_timeout:g} s")
            elif self._is_mute(peer):
                waited = f"it did not answer a fence for {self._settings.answer_timeout:g} s"
                self._lose(peer, Cause.HUNG, f"{waited}: one of its ranks hangs")
        if self._doubt.over:
            self._look_for_hangs()

    def _is_mute(self, peer: Peer) -> bool:
        return (
            self._fence is not None
            and self._now - self._fence_since >= self._settings.answer_timeout
            and peer.replica in self._facts.gathered()
            and peer.state.fence < self._fence
        )

    def _look_for_hangs(self) -> None:
        record = self._facts.record
        members = self._facts.taking_part()
        peers = {r: self._facts.peers[r] for r in members}
        if record is None or not peers or self._fence is not None or self._finished is not None:
            self._watch.rest(self._now)
            return
        if record.paused and all(p.state.epoch >= record.number for p in peers.values()):
            self._watch.rest(self._now)
            return
        diagnosis = self._watch.look(
            {r: p.state for r, p in peers.items()},
            members=members,
            connected={r: p.connected for r, p in peers.items() if p.connection is not None},
            record=record,
            now=self._now,
        )
        if diagnosis is not None:
            self._act_on(diagnosis)

    def _act_on(self, found: Diagnosis) -> None:
        """Take out who holds up the others; with nobody to blame, make new rings, or wait on."""
        self._effects.append(Stalled(step=found.step, reason=found.summary))
        for replica, evidence in found.hung.items():
            self._lose(self._facts.peers[replica], Cause.HUNG, evidence)
        if found.joined:
            self._stall = f"step {found.step} does not end though everybody has joined it: {found.summary}"

    def _lose(self, peer: Peer, cause: Cause, reason: str, *, detected: float | None = None) -> None:
        """Take a replica out for good. Only this function does, and each caller has its evidence."""
        member = self._facts.union().get(peer.replica)
        member = member if member is not None and member.attempt == peer.attempt else None
        expected = (
            peer.state.finished is not None
            or (self._facts.has_left(member) if member is not None else bool(peer.state.leaving))
            or (self._finished is not None and not peer.greeted)
        )
        self._facts.give_up(peer.replica, peer.attempt)
        del self._facts.peers[peer.replica]
        if cause in _MAY_BE_THERE:
            self._judge(peer.replica, peer.attempt, cause, reason)
        if not expected:
            self._effects.append(
                Removed(
                    replica=peer.replica,
                    attempt=peer.attempt,
                    cause=cause,
                    reason=reason,
                    member=member is not None,
                    detected=self._doubt.real if detected is None else detected,
                )
            )
        if peer.connection is not None:
            self._refuse(peer.connection, peer.replica, peer.attempt, f"taken out of the job ({cause}): {reason}")

    def _judge(self, replica: int, attempt: int, cause: Cause, reason: str, *, crash: Crash | None = None) -> None:
        # Who only lost its connections has most probably ended, and whoever started it will see how.
        since = self._now + (self._settings.silence_timeout if cause is Cause.CONNECTION_LOST else 0.0)
        verdict = Verdict(replica=replica, attempt=attempt, cause=cause, reason=reason, crash=crash)
        self._verdicts[replica] = (since, verdict)

    # --- what the facts demand --------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self._doubt.look(self._facts.peers.values()):
            self._effects.append(AskStore())
        self._weigh_evidence()
        while self._progress():
            pass
        for peer in self._facts.peers.values():
            if peer.connection is not None:
                self._tell(peer)

    def _progress(self) -> bool:
        """Make at most one transition; return whether one was made."""
        if self._finished is not None:
            return self._finish()
        if self._fence is not None:
            return self._decide()
        if self._facts.record is None or not self._facts.record.members:
            return self._start()
        reason = self._facts.break_reason() or self._stall
        if reason:
            self._stall = ""
            self._begin_gather(reason)
            return True
        if self._facts.proposal is not None:
            return self._advance_proposal(self._facts.proposal)
        return self._change(self._facts.record)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Make the first epoch, or the first one after everything was lost."""
        waiting = list(self._facts.joiners())
        waited = self._now - self._waiting_since
        patient = waited < self._settings.start_timeout
        if len(waiting) < (self._facts.expected if patient else self._settings.min_replicas):
            return False
        if waited < LOOK_AGAIN + self._settings.silence_timeout and any(
            p.arrived < self._waiting_since for p in waiting
        ):
            return False  # who was here before everything was lost has yet to see the checkpoint that was left behind
        states = {p.replica: p.state for p in waiting}
        record = first_epoch(
            states,
            members={p.replica: p.as_member() for p in waiting},
            number=self._facts.highest + 1,
            wanted=self._settings.replicas,
            least=self._settings.min_replicas,
        )
        others = replaced(states)
        self._decided(record, replaced=others)
        self._effects.append(_start_of(record, others))
        return True

    # --- gathering --------------------------------------------------------------------------------------------------

    def _begin_gather(self, reason: str) -> None:
        if self._facts.proposal is not None and not self._facts.proposal.may_have_begun:
            self._withdraw(reason)
        self._fence = self._facts.highest
        self._fence_since = self._now
        self._effects.append(Fenced(epoch=self._fence, reason=reason))

    def _decide(self) -> bool:
        assert self._facts.record is not None
        assert self._fence is not None
        members = self._facts.gathered()
        states = {r: self._facts.peers[r].state for r in members}
        if any(state.fence < self._fence for state in states.values()):
            return False
        proposal = self._facts.proposal
        base = proposal.record if proposal is not None and proposal.entered else self._facts.record
        record = decide(
            states,
            members=members,
            base=base,
            number=self._facts.highest + 1,
            wanted=self._settings.replicas,
            least=self._settings.min_replicas,
        )
        if record is None:
            self._begin_again()
        else:
            self._decided(record, stepped_in=tuple(r for r in record.active if r not in base.active))
        return True

    def _decided(
        self, record: EpochRecord, *, stepped_in: tuple[int, ...] = (), replaced: tuple[int, ...] | None = None
    ) -> None:
        left = [m for m in self._facts.union().values() if record.member(m.replica) is None]
        self._fence = self._facts.proposal = None
        self._facts.record = record
        self._persist(record, replaced=replaced)
        self._effects.append(Decided(record=record, stepped_in=stepped_in))
        self._let_go(left)

    def _begin_again(self) -> None:
        """Nobody with a state is left: whoever caught up from the lost ones has to start again too.

        The next epoch is a first one, from the newest checkpoint that those who come back can read. Who has entered no
        epoch yet is as good as new, and waits for it.
        """
        peers = [self._facts.peers[m.replica] for m in self._facts.union().values()]
        orphans = [peer for peer in peers if peer.state.epoch and not peer.state.leaving]
        self._fence = self._facts.proposal = self._facts.record = None
        self._waiting_since = self._now
        self._effects.append(Decided(record=None))
        for peer in orphans:
            self._lose(peer, Cause.ORPHANED, "nobody with a state is left: start again")

    # --- planned changes --------------------------------------------------------------------------------------------

    def _change(self, record: EpochRecord) -> bool:
        """Plan the next epoch when all have entered this one and something is to be changed."""
        peers = {m.replica: self._facts.peers[m.replica] for m in record.members}
        states = {r: p.state for r, p in peers.items()}
        if self._now < self._retry_at or any(s.epoch < record.number for s in states.values()):
            return False
        stranded = [r for r, peer in peers.items() if self._facts.is_stranded(peer, self._now)]
        if record.paused:
            return self._change_paused(record, states, stranded)
        proposed = propose(
            states,
            base=record,
            joiners=[p.as_member() for p in self._facts.joiners()],
            stranded=stranded,
            number=self._facts.highest + 1,
            wanted=self._settings.replicas,
            least=self._settings.min_replicas,
        )
        if proposed is None:
            return False
        self._facts.proposal = Proposal(record=proposed, since=self._now)
        self._persist(record, proposed)
        self._effects.append(Proposed(record=proposed))
        return True

    def _change_paused(self, record: EpochRecord, states: dict[int, MemberState], stranded: list[int]) -> bool:
        """While paused no ring carries a boundary, so changes are made by a decision."""
        steps = [s.step for s in states.values() if s.step is not None]
        joiners = any(self._facts.joiners())
        vacant = len(record.active) < self._settings.replicas
        ready = [r for r, s in states.items() if r not in record.active and s.step is not None and s.step == max(steps)]
        if not (joiners or stranded or (vacant and ready) or may_leave(states, newcomers=joiners)):
            return False
        self._begin_gather("the membership changes while the job is paused")
        return True

    def _advance_proposal(self, proposal: Proposal) -> bool:
        record = proposal.record
        alive = [m.replica for m in record.members if not self._facts.is_lost(m)]
        states = {r: self._facts.peers[r].state for r in alive}
        if not proposal.may_have_begun:
            reason = self._obstacle(record, states)
            if reason:
                self._withdraw(reason)
                return True
        if not proposal.go:
            return self._say_go(proposal, states)
        if record.members and all(s.epoch >= record.number for s in states.values()):
            return self._adopt(record)
        if not record.members and not self._facts.union():
            return self._adopt(record)
        return False

    def _obstacle(self, record: EpochRecord, states: dict[int, MemberState]) -> str:
        """Why this proposal cannot come about."""
        lost = [m.replica for m in record.members if self._facts.is_lost(m)]
        if lost:
            return f"replica {lost[0]} is gone before it could join"
        broken = [r for r, s in states.items() if s.broken >= record.number]
        if broken:
            self._retry_at = self._now + RETRY_DELAY
            return f"replica {broken[0]} could not connect: {states[broken[0]].reason or 'no reason given'}"
        return ""

    def _say_go(self, proposal: Proposal, states: dict[int, MemberState]) -> bool:
        number = proposal.record.number
        if proposal.entered or all(max(s.connected, s.epoch) >= number for s in states.values()):
            proposal.go = proposal.may_have_begun = True
            return True
        if self._now - proposal.since < self._settings.connect_timeout:
            return False
        return self._give_up_on(proposal, [r for r, s in states.items() if max(s.connected, s.epoch) < number])

    def _give_up_on(self, proposal: Proposal, laggards: list[int]) -> bool:
        """The rings of a proposal do not come up and nobody says why."""
        reason = f"the rings of epoch {proposal.record.number} did not connect in {self._settings.connect_timeout:g} s"
        newcomers = [r for r in laggards if self._facts.record is None or self._facts.record.member(r) is None]
        for replica in newcomers:
            self._lose(self._facts.peers[replica], Cause.HUNG, reason)
        if proposal.may_have_begun:
            self._begin_gather(reason)
        else:
            self._retry_at = self._now + RETRY_DELAY
            self._withdraw(reason)
        return True

    def _withdraw(self, reason: str) -> None:
        assert self._facts.proposal is not None
        self._effects.append(Withdrawn(epoch=self._facts.proposal.record.number, reason=reason))
        self._facts.proposal = None

    def _adopt(self, record: EpochRecord) -> bool:
        """The proposal has begun for all its members: it is the current epoch."""
        assert self._facts.record is not None
        left = [m for m in self._facts.record.members if record.member(m.replica) is None]
        self._facts.record, self._facts.proposal = record, None
        self._waiting_since = self._now
        self._let_go(left)
        return True

    def _let_go(self, members: list[Member]) -> None:
        for member in members:
            peer = self._facts.peers.get(member.replica)
            reason = peer.state.leaving if peer is not None and peer.attempt == member.attempt else ""
            reason = reason or "it had asked to leave"
            self._effects.append(Left(replica=member.replica, attempt=member.attempt, reason=reason))

    # --- finishing --------------------------------------------------------------------------------------------------

    def _finish(self) -> bool:
        """The last step is final: nothing needs to be decided any more."""
        assert self._finished is not None
        self._fence = None
        if self._facts.begun is None:
            self._facts.proposal = None  # else its newcomers are members, who are told and dismissed with the others
        members = self._facts.union().values()
        if self._done or any(self._facts.peers[m.replica].state.finished is None for m in members):
            return False
        self._done = True
        self._effects.append(Finished(step=self._finished))
        return True

    # --- what each leader has to know -------------------------------------------------------------------------------

    def _tell(self, peer: Peer) -> None:
        """Say to this leader what its newest state shows that it lacks, once per connection."""
        if self._finished is not None:
            if self._done:
                self._say(peer, 0, Bye())
            elif peer.state.finished is None:
                self._say(peer, self._finished, Close(step=self._finished))
            return
        member = self._facts.union().get(peer.replica)
        if member is None or member.attempt != peer.attempt:
            if peer.state.leaving:
                self._say(peer, 0, Bye())
            elif self._fence is not None and peer.replica in self._facts.gathered():
                self._say_break(peer)
        elif self._fence is not None:
            self._say_break(peer)
        else:
            self._tell_epochs(peer)
            self._say_probe(peer)

    def _say_break(self, peer: Peer) -> None:
        assert self._fence is not None
        if peer.state.fence < self._fence:
            self._say(peer, self._fence, Break(epoch=self._fence))

    def _say_probe(self, peer: Peer) -> None:
        if self._watch.asking and peer.state.probe < self._watch.number and peer.replica in self._facts.taking_part():
            self._say(peer, self._watch.number, Probe(number=self._watch.number))

    def _tell_epochs(self, peer: Peer) -> None:
        record, proposal, state = self._facts.record, self._facts.proposal, peer.state
        if record and record.outcome and record.member(peer.replica) and state.epoch < record.number:
            if not _is_located(record):
                return  # somebody in it has not yet come back to this coordinator: it will, or there is another epoch
            self._tell_start(record)
            self._say(peer, record.number, Install(record=record))
        if proposal is not None and state.epoch < proposal.record.number and _is_located(proposal.record):
            if state.connected < proposal.record.number:
                self._say(peer, proposal.record.number, Announce(record=proposal.record))
            if proposal.go:
                self._say(peer, proposal.record.number, Go(epoch=proposal.record.number))

    def _tell_start(self, record: EpochRecord) -> None:
        """Tell of the start of an earlier coordinator that nobody has heard of: whoever enters the epoch has."""
        untold, self._untold = self._untold, None
        states = [self._facts.peers[m.replica].state for m in self._facts.union().values()]
        if untold is not None and untold.epoch == record.number and all(s.epoch < record.number for s in states):
            self._effects.append(untold)

    def _say(self, peer: Peer, number: int, message: FromCoordinator) -> None:
        if (message.kind, number) not in peer.sent:
            peer.sent.add((message.kind, number))
            self._send(peer, message)

    def _send(self, peer: Peer, message: FromCoordinator) -> None:
        if peer.connection is not None:
            self._effects.append(
                Send(connection=peer.connection, replica=peer.replica, attempt=peer.attempt, message=message)
            )

    def _persist(
        self,
        current: EpochRecord,
        proposal: EpochRecord | None = None,
        *,
        replaced: tuple[int, ...] | None = None,
    ) -> None:
        processes = {r: self._facts.peers[r].process for r in self._facts.union() if r in self._facts.peers}
        ranks = max((len(member.addresses) for member in self._facts.union().values()), default=0)
        ledger = Ledger.of(
            current, proposal, lost=self._facts.lost, processes=processes, ranks=ranks, replaced=replaced
        )
        self._effects.append(Persist(ledger=ledger, expected=self._facts.highest))
        self._facts.highest = ledger.number


def _is_located(record: EpochRecord) -> bool:
    return all(member.addresses for member in record.members)


def _start_of(record: EpochRecord, others: tuple[int, ...]) -> Started:
    assert record.outcome is not None, "an epoch with which a run starts has a step"
    return Started(epoch=record.number, step=record.outcome.step, replicas=record.active, replaced=others)


def _cause_of(failed: str) -> Cause:
    word = failed.partition(":")[0]
    return next((cause for cause in _SAID if cause == word), Cause.FAILED)
