"""What runs in the pods, as far as an operator can see it: replicas that train, and the coordinator that counts them.

A model: the real coordinator and the real step loops have a simulation of their own, in the folder above.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.operator.nodes import Node, Process

from fthsdp.coordinator.messages import Cause, Crash, Exited, ReplicaStatus, Role, Status, Verdict
from fthsdp.exit_codes import EXIT_LOST, EXIT_REFUSED, EXIT_TERMINATED
from fthsdp_operator.api import CONFIG_ANNOTATION

if TYPE_CHECKING:
    from tests.simulation.operator.world import World

__all__ = ["Coordinator", "Group", "Ledger", "Training"]

SILENCE = 5.0
"""Seconds after which a leader that says nothing is taken out; and before a closed connection becomes a verdict."""
RECONNECT = 30.0
"""Seconds that a coordinator which has restarted waits for those it knows."""
HANGS = 20.0
"""Seconds after which a rank that does not take part is found out."""
START = 600.0
"""Seconds after which the run begins with as many as there are."""
RETRY = 2.0
"""Seconds between two attempts to reach the coordinator."""
AGAIN = 4.0
"""Seconds after which a launcher tells of a crash again."""

Who = tuple[int, int]
"""Replica and attempt."""


@dataclass(eq=False)
class Group:
    """The processes of one attempt of a replica."""

    job: str
    who: Who
    size: int
    processes: dict[int, Process] = field(default_factory=dict)
    frozen: bool = False
    leaving: bool = False
    finishing: bool = False
    mute: bool = False
    """It hangs before its first word to the coordinator."""
    steps: int = 0
    """Those that it has trained in."""

    @property
    def intact(self) -> bool:
        """All ranks are there, and reach each other and the coordinator."""
        whole = len(self.processes) == self.size and not self.frozen
        return whole and all(
            process.alive and process.crashed is None and process.node.reachable for process in self.processes.values()
        )


@dataclass
class Ledger:
    """What outlives a coordinator, in its ConfigMap."""

    lost: dict[int, int] = field(default_factory=dict)
    members: dict[int, int] = field(default_factory=dict)
    """Attempts by replica, of those that are in the epoch."""
    active: set[int] = field(default_factory=set)


@dataclass
class Peer:
    """A replica as the coordinator knows it."""

    attempt: int
    full: bool = False
    """It has the state."""
    greeted: bool = True


class Coordinator:
    """One coordinator, from its start to its end."""

    def __init__(self, training: Training, process: Process, config: str, ledger: Ledger) -> None:
        self.process = process
        settings = json.loads(config)
        self.replicas, self.least = settings["replicas"], settings["minReplicas"]
        self.groups = self.replicas + settings["spares"]
        self.ledger = ledger
        self.finished = False
        self._abandoned: set[int] = set()
        self._training = training
        self._world = training.world
        self._began = self._world.now
        self._verdicts: dict[int, tuple[float, Verdict]] = {}
        self.peers = {r: Peer(a, full=True, greeted=False) for r, a in ledger.members.items()}
        for replica, attempt in ledger.lost.items():
            self._judge(replica, attempt, Cause.CONNECTION_LOST)
        self._world.after(RECONNECT, self._lose_the_silent)

    # --- what it says ---

    @property
    def paused(self) -> bool:
        """Too few train. Once somebody has finished, nothing is decided any more, and so nothing pauses."""
        return bool(self.ledger.members) and len(self.ledger.active) < self.least and not self._training.over

    def status(self) -> Status:
        """What the operator hears."""
        members = tuple(
            ReplicaStatus(
                replica=replica,
                attempt=peer.attempt,
                role=self._role(replica) if replica in self.ledger.members else None,
                step=self._training.step if peer.full else None,
            )
            for replica, peer in sorted(self.peers.items())
        )
        heard = [verdict for _, (since, verdict) in sorted(self._verdicts.items()) if self._world.now >= since]
        return Status(
            epoch=1,
            paused=self.paused,
            finished=self.finished,
            step=self._training.step,
            loss=2.0,
            replicas=members,
            verdicts=tuple(heard),
            abandoned=tuple(sorted(self._abandoned)),
        )

    def _role(self, replica: int) -> Role:
        return Role.ACTIVE if replica in self.ledger.active else Role.SHADOW

    # --- what it hears ---

    def hello(self, group: Group) -> bool:
        """A leader greets; return whether it may stay."""
        replica, attempt = group.who
        known = self.peers.get(replica)
        if replica >= self.groups or attempt <= self.ledger.lost.get(replica, -1):
            return False
        if known is not None and known.attempt >= attempt:
            known.greeted |= known.attempt == attempt
            return known.attempt == attempt
        if known is not None:
            self.lose(replica, known.attempt, Cause.REPLACED)
        self._give_up(replica, attempt - 1)
        self._abandoned.discard(replica)
        self.peers[replica] = Peer(attempt)
        return True

    def _lose_the_silent(self) -> None:
        for replica, peer in list(self.peers.items()):
            group = self._training.group(replica, peer.attempt)
            if not peer.greeted and self._runs and not (group is not None and group.finishing):
                self.lose(replica, peer.attempt, Cause.CONNECTION_LOST)

    def exited(self, message: Exited) -> None:
        """The operator says that somebody is gone."""
        peer = self.peers.get(message.replica)
        if peer is not None and peer.attempt <= message.attempt:
            self.lose(message.replica, peer.attempt, Cause.EXITED)
        self._give_up(message.replica, message.attempt)
        if message.final and (peer is None or peer.attempt <= message.attempt):
            self._abandoned.add(message.replica)

    def crashed(self, process: Process) -> None:
        """A launcher says that what it launched has crashed."""
        assert process.who is not None
        assert process.crashed is not None
        replica, attempt = process.who
        peer = self.peers.get(replica)
        self.exited(Exited(replica=replica, attempt=attempt, reason="it crashed", detected=self._world.now))
        _, known = self._verdicts.get(replica, (0.0, None))
        newest = -1 if known is None else known.attempt
        vague = known is not None and known.cause is Cause.CONNECTION_LOST
        if (peer is None or peer.attempt <= attempt) and (newest < attempt or (vague and newest == attempt)):
            oom = process.ended[1] == "OOMKilled"
            crash = Crash(pod=process.index, exit_code=process.crashed, oom_killed=oom)
            self._judge(replica, attempt, Cause.EXITED, crash)

    def lose(self, replica: int, attempt: int, cause: Cause) -> None:
        """Take somebody out for good, who is refused from now on."""
        peer = self.peers.get(replica)
        if peer is None or peer.attempt != attempt or not self._runs:
            return
        self._world.note(f"coordinator: replica {replica} attempt {attempt} is out: {cause}")
        self._forget(replica)
        self._give_up(replica, attempt)
        self._world.blame(self.process.job, (replica, attempt), str(cause))
        if cause not in (Cause.EXITED, Cause.REPLACED, Cause.ORPHANED):
            self._judge(replica, attempt, cause)
        group = self._training.group(replica, attempt)
        if group is not None and not group.finishing:
            self._world.after(0.3, self._training.refuse, group)

    def leaves(self, group: Group) -> bool:
        """Somebody asks to leave at a boundary: return whether it can go, and nobody has to start from nothing."""
        replica, attempt = group.who
        peer = self.peers.get(replica)
        if peer is None or peer.attempt != attempt:
            return False
        others = [peer for other, peer in self.peers.items() if other != replica]
        if peer.full and others and not any(other.full for other in others):
            return False
        self._forget(replica)
        return True

    def _forget(self, replica: int) -> None:
        self.peers.pop(replica, None)
        self.ledger.members.pop(replica, None)
        self.ledger.active.discard(replica)

    def _give_up(self, replica: int, attempt: int) -> None:
        if attempt >= 0:
            self.ledger.lost[replica] = max(attempt, self.ledger.lost.get(replica, 0))

    def _judge(self, replica: int, attempt: int, cause: Cause, crash: Crash | None = None) -> None:
        since = self._world.now + (SILENCE if cause is Cause.CONNECTION_LOST else 0.0)
        reason = f"{cause} in a simulation"
        verdict = Verdict(replica=replica, attempt=attempt, cause=cause, reason=reason, crash=crash)
        self._verdicts[replica] = (since, verdict)

    # --- what it does ---

    @property
    def _runs(self) -> bool:
        return self._training.coordinator is self and self.process.alive

    def decide(self) -> None:
        """Begin the run, take in who waits, and let as many train as are wanted."""
        if not self.ledger.members:
            waiting = {replica: peer for replica, peer in self.peers.items() if peer.greeted}
            patient = self._world.now - self._began < START
            if waiting and len(waiting) >= (self.replicas if patient else self.least):
                for replica, peer in waiting.items():
                    peer.full, self.ledger.members[replica] = True, peer.attempt
        elif not any(peer.full for peer in self.peers.values()):
            self._world.note("coordinator: nobody is left who has the state")
            for replica, attempt in list(self.ledger.members.items()):
                self.lose(replica, attempt, Cause.ORPHANED)
            self._began = self._world.now
        for replica, peer in sorted(self.peers.items()):
            if peer.greeted and self.ledger.members and replica not in self.ledger.members:
                self.ledger.members[replica] = peer.attempt
                self._world.after(self._world.random.uniform(1.0, 10.0), self._caught_up, replica, peer.attempt)
        ready = [r for r, peer in sorted(self.peers.items()) if peer.full and r not in self.ledger.active]
        for replica in ready[: max(0, self.replicas - len(self.ledger.active))]:
            self.ledger.active.add(replica)

    def _caught_up(self, replica: int, attempt: int) -> None:
        peer = self.peers.get(replica)
        if peer is not None and peer.attempt == attempt and any(peer.full for peer in self.peers.values()):
            peer.full = True


class Training:
    """All processes of the job."""

    def __init__(self, world: World, *, steps: int) -> None:
        self.world = world
        self.steps = steps
        self.step = 0
        self.coordinator: Coordinator | None = None
        self.hanging_starts = 0
        """So many of the next replicas hang before their first word to the coordinator."""
        self._groups: dict[tuple[str, Who], Group] = {}
        self._ledgers: dict[str, Ledger] = {}
        """By the UID of the ConfigMap that holds them."""

    def group(self, replica: int, attempt: int, job: str | None = None) -> Group | None:
        """Return the processes of an attempt."""
        return self._groups.get((job or self.world.job_uid, (replica, attempt)))

    @property
    def over(self) -> bool:
        """The last step is done."""
        return self.step >= self.steps

    def reached(self) -> Coordinator | None:
        """Return the coordinator, if it can be reached."""
        there = self.coordinator
        return there if there is not None and there.process.alive and there.process.node.reachable else None

    def training(self) -> set[int]:
        """Replicas that train, and with which nothing is wrong."""
        there = self.coordinator
        if there is None:
            return set()
        members = {r: self.group(r, a, there.process.job) for r, a in there.ledger.members.items()}
        return {r for r, g in members.items() if r in there.ledger.active and g is not None and g.intact}

    def members(self) -> list[Group]:
        """Replicas in the epoch with which nothing is wrong: a rank that hangs is missed there, and nowhere else."""
        there = self.coordinator
        known = {} if there is None else there.ledger.members
        groups = (self.group(replica, attempt) for replica, attempt in sorted(known.items()))
        return [group for group in groups if group is not None and group.intact]

    # --- processes ---

    def started(self, process: Process) -> None:
        """A kubelet has started a process."""
        if process.who is None:
            self._coordinator_started(process)
            return
        group = self._groups.setdefault(
            (process.job, process.who), Group(process.job, process.who, self.world.pods_per_replica)
        )
        group.processes[process.index] = process
        if len(group.processes) == group.size and self.hanging_starts:
            self.hanging_starts -= 1
            group.mute = True
            self.world.blame(group.job, group.who, "hangs while it starts")
        if len(group.processes) == group.size:
            self.world.after(self.world.random.choice([1.0, 2.0, 15.0]), self._hello, group)

    def _coordinator_started(self, process: Process) -> None:
        pod, epoch = self.world.server.pod(process.uid), self.world.epoch_uid()
        if pod is None or not process.alive:
            return
        if epoch is None:
            self.world.after(RETRY, self._coordinator_started, process)
            return
        ledger = self._ledgers.setdefault(epoch, Ledger())
        self.coordinator = Coordinator(self, process, pod["metadata"]["annotations"][CONFIG_ANNOTATION], ledger)
        for group in self._groups.values():
            if group.job == process.job and group.intact and not group.finishing:
                self.world.after(self.world.random.uniform(0.3, 3.0), self._hello, group)

    def _hello(self, group: Group) -> None:
        if group.mute or not group.intact or group.job != self.world.job_uid:
            return
        there = self.reached()
        if there is None or there.finished or there.process.job != group.job:
            self.world.after(RETRY, self._hello, group)
        elif not there.hello(group):
            self.refuse(group)

    def refuse(self, group: Group) -> None:
        """The coordinator turns somebody away."""
        self._all_end(group, EXIT_REFUSED, "was refused")

    def _all_end(self, group: Group, code: int, why: str) -> None:
        for process in list(group.processes.values()):
            if process.alive and process.crashed is None and not group.frozen and process.node.reachable:
                self.world.blame(group.job, group.who, why)
                self.world.after(self.world.random.uniform(0.05, 1.5), self.world.nodes.command_ends, process, code)

    def ended(self, process: Process) -> None:
        """A process has ended, and the others of its replica cannot go on."""
        if process.who is None:
            return
        group = self._groups[process.job, process.who]
        self.world.blame(group.job, group.who, f"{process.pod} ended with {process.ended[0]}")
        if group.finishing or group.leaving:
            return
        if process.index == 0:
            self.world.after(0.1, self._lost_connection, group)
        if self.world.random.random() < 0.8:
            self._all_end(group, EXIT_LOST, "lost a rank")
        else:
            self.world.after(HANGS, self._found_hanging, group)

    def tell_crash(self, process: Process) -> None:
        """A launcher tells the coordinator of a crash, again and again: one that has heard it may forget it."""
        if not process.alive or process.crashed is None or self.stands_still(process):
            return
        there = self.reached()
        if there is None or there.process.job != process.job or not process.node.reachable:
            self.world.after(RETRY, self.tell_crash, process)
        else:
            there.crashed(process)
            self.world.after(AGAIN, self.tell_crash, process)

    def stands_still(self, process: Process) -> bool:
        """Everything in its container is frozen."""
        group = None if process.who is None else self._groups.get((process.job, process.who))
        return group is not None and group.frozen

    def _lost_connection(self, group: Group) -> None:
        self._lose(group, Cause.CONNECTION_LOST)

    def _found_hanging(self, group: Group) -> None:
        self._lose(group, Cause.HUNG)

    def _lose(self, group: Group, cause: Cause) -> None:
        there = self.reached()
        if there is None and any(process.alive for process in group.processes.values()):
            self.world.after(RETRY, self._lose, group, cause)
        elif there is not None and there.process.job == group.job and not group.intact:
            there.lose(*group.who, cause)

    def told(self, process: Process) -> None:
        """A process is asked to stop: its replica leaves at a boundary, if there is one to come."""
        if process.who is None:
            self.world.after(0.2, self.world.nodes.ends_with, process, EXIT_TERMINATED)
            return
        group = self._groups[process.job, process.who]
        if not group.leaving:
            group.leaving = True
            self.world.after(self.world.random.choice([0.2, 1.0, 4.0]), self._leave, group)

    def _leave(self, group: Group) -> None:
        there = self.reached()
        if group.frozen or not any(process.alive for process in group.processes.values()):
            return
        if there is not None and there.process.job == group.job and group.who[0] in there.peers:
            if group.intact and there.leaves(group):
                self._all_end(group, 0, "left")
            else:
                self.world.after(RETRY, self._leave, group)
            return
        group.leaving = False
        for process in list(group.processes.values()):
            if process.told:
                self.world.nodes.ends_with(process, EXIT_TERMINATED)

    # --- nodes and ranks that nobody hears ---

    def unreachable(self, node: Node) -> None:
        """A node is cut off."""
        for group in self._on(node):
            self.world.blame(group.job, group.who, f"{node.name} was lost")
            leader = group.processes.get(0)
            silent = leader is not None and leader.node is node
            after = self._went_silent if silent else self._found_hanging
            self.world.after(SILENCE if silent else HANGS, after, group)

    def reachable(self, node: Node) -> None:
        """A node is back: whoever was taken out meanwhile is told so."""
        there = self.reached()
        for group in self._on(node):
            known = there.peers.get(group.who[0]) if there is not None and there.process.job == group.job else None
            if not group.finishing and (known is None or known.attempt != group.who[1]) and group.intact:
                self.world.after(1.0, self._hello, group)

    def _on(self, node: Node) -> list[Group]:
        keys = {(process.job, process.who) for process in node.processes.values() if process.who is not None}
        return [group for key, group in self._groups.items() if key in keys]

    def freeze(self, group: Group) -> None:
        """All ranks of a replica stand still for good."""
        group.frozen = True
        self.world.blame(group.job, group.who, "froze")
        self.world.after(SILENCE, self._went_silent, group)

    def _went_silent(self, group: Group) -> None:
        self._lose(group, Cause.SILENT)

    # --- steps ---

    def tick(self) -> None:
        """A second passes."""
        there = self.reached()
        if there is not None:
            there.decide()
        self._train()
        if there is not None and self.over and not there.finished:
            groups = [self.group(r, a, there.process.job) for r, a in there.ledger.members.items()]
            if groups and all(group is None or not group.intact for group in groups):
                there.finished = True
                self.world.note("coordinator: the run is over")
                delay = self.world.random.choice([0.5, 3.0, 90.0])
                self.world.after(delay, self.world.nodes.ends_with, there.process, 0)

    def _train(self) -> None:
        there = self.coordinator
        if there is None:
            return
        active = len(there.ledger.active)
        # With too few it pauses, and while a ring is broken it waits for a decision.
        if not self.over and active >= max(1, there.least) and len(self.training()) == active:
            self._step(there)
        if not self.over:
            return
        for replica, attempt in there.ledger.members.items():
            group = self.group(replica, attempt, there.process.job)
            if group is not None and group.intact and not group.finishing:
                self._finish(group)

    def _step(self, there: Coordinator) -> None:
        """All of them do a step, but for those whose program fails in its first one."""
        self.step += 1
        for replica in self.training():
            group = self.group(replica, there.ledger.members[replica], there.process.job)
            assert group is not None
            bad = [it for it in group.processes.values() if it.image == "fails-later"]
            if bad and not self.over:
                self.world.after(0.1, self.world.nodes.command_ends, bad[0], 1)
            else:
                group.steps += 1

    def _finish(self, group: Group) -> None:
        group.finishing = True
        self.world.note(f"replica {group.who[0]} attempt {group.who[1]} has finished")
        for process in list(group.processes.values()):
            delay = self.world.random.choice([0.1, 1.0, 8.0])
            self.world.after(delay, self.world.nodes.ends_with, process, 0)
