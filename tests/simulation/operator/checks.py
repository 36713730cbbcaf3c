"""What must hold in every run, whatever happens in it; each violation says what was seen, and what came before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.simulation.operator import still
from tests.simulation.operator.server import name_of, uid_of

from fthsdp.coordinator.messages import Exited, Role
from fthsdp_operator.api import (
    ATTEMPT_LABEL,
    CONFIG_ANNOTATION,
    JOB_UID_LABEL,
    KIND,
    REASONS,
    REPLICA_LABEL,
    Job,
    JobState,
    JobStatus,
    OnCordon,
    ReplicaState,
    ReplicaStatus,
    RuleAction,
    SuccessPolicy,
    UpdateType,
    parse_job,
)
from fthsdp_operator.api.reasons import meanings
from fthsdp_operator.cluster import Manifest
from fthsdp_operator.manifests.render import BUDGET, coordinator_config, min_available
from fthsdp_operator.observed.observe import NodeView, Observed, view
from fthsdp_operator.rules import plan as rules
from fthsdp_operator.rules.actions import Create, Delete, Plan
from fthsdp_operator.rules.nodes import MOVE_PATIENCE, PLANNED

if TYPE_CHECKING:
    from tests.simulation.operator.operators import Operator
    from tests.simulation.operator.world import World

__all__ = ["Checks", "Violation"]

TOLD = 100
"""Lines of the story that a counterexample shows."""
SAME = 0.01
"""Seconds by which times may differ that mean the same: in a status they have milliseconds."""
BUSY = 250
"""Looks of one operator within SOON that are no longer explained by what happens."""
SOON = 10.0
"""Seconds."""
SAME_LOSS = 120.0
"""Seconds between the failure of a replica and the loss of a node that are taken for one."""
_REASONS = {kind: meanings(words).keys() for kind, words in REASONS.items()}
_TERMINAL = (JobState.COMPLETE, JobState.FAILED)
_ENDED = (ReplicaState.FINISHED, ReplicaState.FAILED)
_TRAIN = (ReplicaState.ACTIVE, ReplicaState.SPARE, ReplicaState.FINISHED)
_AWAY = (ReplicaState.SUSPENDED, ReplicaState.REMOVED, ReplicaState.ABANDONED)


class Violation(AssertionError):
    """Something that must never happen."""


class Checks:
    """Looks at every plan and at everything that an operator does."""

    def __init__(self, world: World, *, share_of_stills: float) -> None:
        """``share_of_stills``: the share of plans after which time stands still, to see where they lead."""
        self._world = world
        self._share = share_of_stills
        self._seen_whole: set[tuple[str, int, int]] = set()
        """Attempts all of whose pods were seen, by the job's UID."""
        self._created: set[tuple[str, str]] = set()
        self._left: dict[tuple[str, int], float] = {}
        """When a replica with which nothing was wrong was taken away last, by the job's UID and its index."""
        self._trained: set[tuple[str, int]] = set()
        """Replicas that have trained since they were added to their job, or came back to it, by its UID."""
        self.violation: Violation | None = None
        self.plans = 0
        self.stills = 0

    def whole(self) -> frozenset[tuple[str, int, int]]:
        """Return the attempts of which a status has said that all their pods are there."""
        return frozenset(self._seen_whole)

    def fail(self, text: str) -> None:
        """Report a violation."""
        story = "\n".join(self._world.history[-TOLD:])
        when = f"at {self._world.loop.time():.2f} s of seed {self._world.seed}"
        self.violation = self.violation or Violation(f"{text}\n{when}; before that:\n{story}")
        raise self.violation

    # --- plans --------------------------------------------------------------------------------------------------------

    def planned(self, operator: Operator, job: Job, observed: Observed, now: float, todo: Plan) -> None:
        """An operator has made a plan."""
        self.plans += 1
        operator.job, operator.todo = job, todo
        operator.saw = frozenset(pod.uid for pod in observed.pods)
        self._rests(operator)
        self._wakes_in_time(job, observed, now, todo)
        self._holds_the_minimum(job, observed, todo)
        self._rolls_gently(job, observed, todo)
        self._keeps_apart(job, observed, todo)
        self._moves_with_care(job, observed, todo)
        self._stays_only_where_it_may(job, observed, todo)
        there = self._world.server.get(KIND, job.name)
        if there is None or there["metadata"]["resourceVersion"] != job.metadata.resource_version:
            return  # its status comes too late, and then nothing is done
        if self._world.random.random() < self._share * (1.0 if todo.actions else 0.1):
            self.stills += 1
            complaint = still.complaint(job, observed, now, self._world.random)
            if complaint:
                self.fail(complaint)

    def _rests(self, operator: Operator) -> None:
        """Nobody looks at a job again and again with nothing to show for it."""
        operator.looks = [time for time in operator.looks if time > self._world.now - SOON] + [self._world.now]
        if len(operator.looks) > BUSY:
            self.fail(f"{operator.name} has looked at the job {len(operator.looks)} times in {SOON:g} s")

    def _wakes_in_time(self, job: Job, observed: Observed, now: float, todo: Plan) -> None:
        """Whatever is due later is woken for, even if no event ever comes again."""
        if job.metadata.deletion_timestamp is not None:
            return
        due = [entry.next_restart_time for entry in todo.status.replica_statuses if entry.next_restart_time is not None]
        ttl, end = job.spec.ttl_seconds_after_finished, todo.status.completion_time
        if job.status.terminal:
            due = [end + ttl] if ttl is not None and end is not None else []
        elif not job.spec.suspend and not todo.status.terminal:
            silent = observed.coordinator is None
            due.append(now + (max(rules.POLL, rules.LONGEST_POLL) if silent else rules.POLL))
        missed = [time for time in due if now < time < todo.wake_at - SAME]
        if missed:
            wake = f"wake_at is {todo.wake_at - now:.1f} s"
            self.fail(f"nobody is woken for what is due in {min(missed) - now:.1f} s: {wake}")

    def _holds_the_minimum(self, job: Job, observed: Observed, todo: Plan) -> None:
        """Who trains is not taken away while fewer than minReplicas would be left, as far as anybody can know."""
        suspended = job.spec.suspend or job.status.state is JobState.SUSPENDED  # what that had not stopped yet goes too
        if suspended or todo.status.terminal or observed.coordinator is None or observed.coordinator.finished:
            return
        if job.spec.update_policy.type is UpdateType.RECREATE and _stopping(todo):
            return  # that is what it is for
        deleted = {action.uid for action in todo.actions if isinstance(action, Delete)}
        going = {(pod.replica, pod.attempt) for pod in observed.trainers if pod.uid in deleted and pod.replica >= 0}
        active = {(it.replica, it.attempt) for it in observed.coordinator.replicas if it.role is Role.ACTIVE}
        healthy = {who for who in going & active if not self._world.blamed(job.metadata.uid, who)}
        left = [it for it in todo.status.replica_statuses if it.state in _TRAIN]
        if healthy and len(left) < job.spec.min_replicas <= len(left) + len(healthy):
            self.fail(
                f"the replicas and attempts {sorted(healthy)} are taken away, and {len(left)} replicas are left that"
                f" train: minReplicas is {job.spec.min_replicas}"
            )

    def _rolls_gently(self, job: Job, observed: Observed, todo: Plan) -> None:
        """A changed template takes only as many away as the user allows, and nobody who has it already."""
        wanted, policy = job.spec.revision, job.spec.update_policy
        active = {(it.replica, it.attempt) for it in self._members(observed) if it.role is Role.ACTIVE}
        taken = [old for old, new in self._pairs(job, todo) if _rolled(old, new) and (old.index, old.attempt) in active]
        if not taken:
            return
        numbers = [old.index for old in taken]
        if any(old.revision == wanted for old in taken):
            self.fail(f"the replicas {numbers} are replaced, and one of them runs the template as it is")
        if policy.type is not UpdateType.ROLLING:
            self.fail(f"the replicas {numbers} are replaced, and updatePolicy.type is {policy.type}")
        entries = [it for it in todo.status.replica_statuses if it.index < job.spec.groups]
        away = sum(it.state not in (*_TRAIN, ReplicaState.FAILED, ReplicaState.ABANDONED) for it in entries)
        if away > policy.max_unavailable:
            self.fail(
                f"the replicas {numbers} are replaced, and {away} are away: maxUnavailable is {policy.max_unavailable}"
            )
        steps = {it.index: self._steps(job, it) for it in entries if it.revision == wanted and it.index not in numbers}
        active = {it.index for it in entries if it.state is ReplicaState.ACTIVE}
        young = [index for index in steps.keys() & active if steps[index] < policy.min_ready_steps]
        if len(young) + away > policy.max_unavailable:
            self.fail(f"the replicas {numbers} are replaced, and {young} have not trained long enough: {steps}")
        failed = [it.index for it in entries if it.index in steps and _broke_with(it, wanted) and not _stands_by(it)]
        if failed and not any(steps[index] >= policy.min_ready_steps for index in steps.keys() & active):
            self.fail(f"the replicas {numbers} are replaced, and {failed} have failed with that template")
        if sum(it.state in _TRAIN for it in entries) < job.spec.min_replicas:
            self.fail(f"the replicas {numbers} are replaced, and fewer than {job.spec.min_replicas} are left")

    def _steps(self, job: Job, entry: ReplicaStatus) -> int:
        """Return the steps that an attempt has trained in."""
        group = self._world.training.group(entry.index, entry.attempt, job.metadata.uid)
        return 0 if group is None else group.steps

    def _keeps_apart(self, job: Job, observed: Observed, todo: Plan) -> None:
        """Under Recreate nobody starts beside those who run another template."""
        if job.spec.update_policy.type is not UpdateType.RECREATE:
            return
        old = [
            it.index
            for it in todo.status.replica_statuses
            if it.index < job.spec.groups and it.revision != job.spec.revision and it.state not in (*_AWAY, *_ENDED)
            if [pod.phase for pod in observed.group(it.index, it.attempt)].count("Running") == job.spec.pods_per_replica
        ]
        created = [it.manifest for it in todo.actions if isinstance(it, Create) and it.manifest["kind"] == "Pod"]
        started = [name_of(pod) for pod in created if REPLICA_LABEL in pod["metadata"]["labels"]]
        if old and started:
            self.fail(f"{started} are created, and the replicas {old} run another template: updatePolicy is Recreate")

    @staticmethod
    def _members(observed: Observed) -> tuple[Any, ...]:
        return observed.coordinator.replicas if observed.coordinator is not None else ()

    @staticmethod
    def _pairs(job: Job, todo: Plan) -> list[tuple[ReplicaStatus, ReplicaStatus]]:
        pairs = ((job.status.replica(new.index), new) for new in todo.status.replica_statuses)
        return [(old, new) for old, new in pairs if old is not None]

    def _moves_with_care(self, job: Job, observed: Observed, todo: Plan) -> None:
        """One replica at a time leaves its node by choice, and nobody for a node's word while it is heard."""
        moved = [new for old, new in self._pairs(job, todo) if new.restarts == old.restarts + 1]
        reasons = {it.index: it.last_failure.reason for it in moved if it.last_failure is not None}
        chosen = [index for index, reason in reasons.items() if reason in PLANNED]
        if len(chosen) > 1:
            self.fail(f"the replicas {chosen} leave their nodes at the same time")
        self._leave_alone(job, observed, chosen)
        for entry in moved:
            who = entry.index, entry.attempt - 1
            heard = observed.member(*who) is not None
            if reasons.get(entry.index) == "NodeLost" and heard and not self._world.blamed(job.metadata.uid, who):
                self.fail(f"replica {entry.index} is heard, and taken for lost with its node")

    def _stays_only_where_it_may(self, job: Job, observed: Observed, todo: Plan) -> None:
        """Nobody is restarted in pods that it is to leave, or left in pods of which one is lost with its node."""
        for old, new in self._pairs(job, todo):
            if new.pods_attempt is None:
                continue
            for pod in observed.group(old.index, old.attempt):
                node = observed.nodes.get(pod.node or "")
                if node is None or not pod.alive:
                    continue
                if new.attempt > old.attempt and _is_to_leave(job, old, node):
                    self.fail(f"replica {new.index} is restarted in {pod.name}, and is to leave {node.name}")
                waits = new.attempt == old.attempt and old.state is new.state is ReplicaState.STARTING
                heard = observed.coordinator is None or observed.member(old.index, old.attempt) is not None
                failure, since = old.last_failure, node.not_ready_since
                same = failure is not None and since is not None and abs(since - failure.time) <= SAME_LOSS
                if waits and same and not heard and not todo.status.terminal:
                    self.fail(f"replica {new.index} waits for {pod.name}, which is lost with {node.name}")

    def _leave_alone(self, job: Job, observed: Observed, chosen: list[int]) -> None:
        """Who trains does not leave its node while another one is away that was taken away as well."""
        active = {it.replica for it in self._members(observed) if it.role is Role.ACTIVE}
        ready = {it.replica for it in self._members(observed) if it.role is not None and it.step is not None}
        for other in job.status.replica_statuses:
            left = self._left.get((job.metadata.uid, other.index), -math.inf)
            away = other.state in (ReplicaState.PENDING, ReplicaState.STARTING) and other.index not in ready
            late = self._world.now - left > MOVE_PATIENCE - 30.0
            if away and not late and active.intersection(chosen) - {other.index}:
                self.fail(f"the replicas {chosen} leave their nodes, and replica {other.index} is not back")

    # --- the status ---------------------------------------------------------------------------------------------------

    def writes_status(self, operator: Operator, before: Manifest, after: Manifest) -> None:
        """An operator has written a status."""
        old = JobStatus.model_validate(before.get("status") or {})
        new = JobStatus.model_validate(after["status"])
        self._note_status(operator, old, new)
        self._stays_ended(old, new)
        self._says_why(new)
        for entry in new.replica_statuses:
            known = old.replica(entry.index)
            self._note_life(uid_of(after), known, entry)
            if known is not None:
                self._next_attempt(operator, parse_job(after), known, entry)
                self._restarts_in_place(uid_of(after), known, entry)
            if entry.state not in (ReplicaState.PENDING, ReplicaState.BACKOFF, *_AWAY):
                self._seen_whole.add((uid_of(after), entry.index, entry.attempt))
        self._bounds_what_is_avoided(operator, parse_job(after), new)
        if new.state in _TERMINAL and old.state not in _TERMINAL:
            self._ends_for_a_reason(new)
            self._counts_all(parse_job(after), new)

    def _note_life(self, job: str, old: ReplicaStatus | None, new: ReplicaStatus) -> None:
        """Remember who has trained, and who was taken away with nothing wrong."""
        key, failure = (job, new.index), new.last_failure
        if new.state is ReplicaState.ACTIVE:
            self._trained.add(key)
        elif new.state in _AWAY:
            self._trained.discard(key)
        if old is None or new.attempt == old.attempt or old.state in (*_AWAY, ReplicaState.BACKOFF):
            return
        if _rolled(old, new) or (failure is not None and failure.reason in PLANNED):
            self._left[key] = self._world.now

    def _counts_all(self, job: Job, new: JobStatus) -> None:
        """Under All nobody is passed over who has trained and has not finished."""
        failed = [it.index for it in new.replica_statuses if it.state is ReplicaState.FAILED]
        missed = [index for index in failed if (job.metadata.uid, index) in self._trained]
        if missed and new.state is JobState.COMPLETE and job.spec.success.policy is SuccessPolicy.ALL:
            self.fail(f"the job is Complete under All, and the replicas {missed} have not finished")

    def _bounds_what_is_avoided(self, operator: Operator, job: Job, new: JobStatus) -> None:
        """Nodes are avoided for a time only, and only so many."""
        names, most = [it.name for it in new.avoided_nodes], job.spec.node_policy.avoid.max_nodes
        if len(names) > most or len(set(names)) < len(names):
            self.fail(f"{names} are avoided, and maxNodes is {most}")
        late = [
            it.name for it in new.avoided_nodes if it.until < self._world.now + operator.skew - 1.0 - 2 * operator.slow
        ]
        if late and new.state not in _TERMINAL and not job.spec.suspend:
            self.fail(f"{late} are still avoided after their time")

    def _note_status(self, operator: Operator, old: JobStatus, new: JobStatus) -> None:
        changed = [entry for entry in new.replica_statuses if old.replica(entry.index) != entry]
        told = ", ".join(f"r{entry.index} {entry.state} a{entry.attempt}" for entry in changed)
        if told or old.state is not new.state:
            self._world.note(f"{operator.name} writes {new.state} {new.ready}: {told}")

    def _stays_ended(self, old: JobStatus, new: JobStatus) -> None:
        """Complete and Failed are never left again."""
        if old.state in _TERMINAL and (new.state, new.completion_time) != (old.state, old.completion_time):
            self.fail(f"a job that was {old.state} becomes {new.state}")

    def _says_why(self, new: JobStatus) -> None:
        """Each condition has one of its own reasons: those that docs/api.md lists."""
        for it in new.conditions:
            if it.type not in _REASONS or it.reason not in _REASONS[it.type]:
                self.fail(f"condition {it.type} is {it.status} because of {it.reason}, which is none of its reasons")

    def _next_attempt(self, operator: Operator, job: Job, old: ReplicaStatus, new: ReplicaStatus) -> None:
        """Attempts grow one by one; each was paid for once, and something had happened to the one before."""
        attempts, restarts = new.attempt - old.attempt, new.restarts - old.restarts
        what = f"replica {new.index} goes from attempt {old.attempt} ({old.state}) to {new.attempt} ({new.state})"
        if attempts not in (0, 1):
            self.fail(f"{what}: attempts grow one by one")
        if attempts == 0:
            if restarts or len(new.recent_restarts) > len(old.recent_restarts):
                self.fail(f"{what}: a restart is counted without a new attempt")
            early = self._world.gave_up
            again = old.state is ReplicaState.FAILED and new.state is ReplicaState.SUSPENDED
            if old.state in _ENDED and new.state not in (*_ENDED, ReplicaState.REMOVED) and not (early or again):
                self.fail(f"{what}: it had ended")
            return
        if old.state in _ENDED and not self._world.gave_up:
            self.fail(f"{what}: it had ended, and is started again")
        if old.state is ReplicaState.SUSPENDED and job.spec.checkpoint is not None and new.state not in _ENDED:
            self._have_stopped(operator, job, what)
        if old.state in _AWAY:
            if restarts:
                self.fail(f"{what}: coming back costs a restart")
            return
        if _rolled(old, new):
            return  # whether that was right is seen where it is planned
        self._is_paid_for(job, old, new, what)
        who = old.index, old.attempt
        if not self._world.blamed(job.metadata.uid, who) and not self._world.nodes.is_suspect(job.metadata.uid, who):
            self.fail(f"{what}: nothing had happened to it")

    def _have_stopped(self, operator: Operator, job: Job, what: str) -> None:
        """Nobody writes a checkpoint any more, or lets go who does: nobody of those who are to start again together."""
        for pod in self._world.server.pods(job.name):
            replica = pod["metadata"]["labels"].get(REPLICA_LABEL)
            entry = None if replica is None else job.status.replica(int(replica))
            mine = uid_of(pod) in operator.saw and entry is not None and entry.state is ReplicaState.SUSPENDED
            end = self._world.nodes.ends(pod) if mine else None
            if end is not None and pod["status"]["phase"] == "Running" and self._world.now + operator.skew < end:
                self.fail(f"{what}: {name_of(pod)} still stops")

    def _restarts_in_place(self, job: str, old: ReplicaStatus, new: ReplicaStatus) -> None:
        """What has happened to a pod, and the operator could not know yet, happens to the attempt that it begins."""
        if new.attempt == old.attempt or new.pods_attempt is None:
            return
        processes = (it for node in self._world.nodes.all.values() for it in node.processes.values() if node.reachable)
        stay = [it for it in processes if (it.job, it.who) == (job, (old.index, old.attempt)) and it.alive]
        pods = [self._world.server.pod(it.uid) for it in stay]
        well = [pod for pod in pods if pod is not None and "deletionTimestamp" not in pod["metadata"]]
        if len(well) < self._world.pods_per_replica:
            self._world.blame(job, (new.index, new.attempt), "a pod of it had ended or was deleted before")

    def _is_paid_for(self, job: Job, old: ReplicaStatus, new: ReplicaStatus, what: str) -> None:
        """A restart is counted once, and there are never more within the window than the budget allows."""
        budget = job.spec.failure_policy.per_replica
        if new.restarts != old.restarts + 1 or len(new.recent_restarts) > len(old.recent_restarts) + 1:
            self.fail(f"{what}: restarts go from {old.restarts} to {new.restarts}, recent {len(new.recent_restarts)}")
        newest = max(new.recent_restarts, default=0.0)
        recent = [time for time in new.recent_restarts if newest - time < budget.window_seconds]
        if len(recent) > budget.limit:
            self.fail(f"{what}: {len(recent)} restarts within {budget.window_seconds} s, the limit is {budget.limit}")
        forgotten = set(old.recent_restarts) - set(new.recent_restarts)
        if new.last_failure is not None and new.last_failure.reason == "NodeLost" and old.last_failure is not None:
            forgotten -= {old.last_failure.time}  # it was the same loss
        if any(newest - time < budget.window_seconds - SAME for time in forgotten) and newest in new.recent_restarts:
            self.fail(f"{what}: restarts within the window are forgotten")

    def _ends_for_a_reason(self, new: JobStatus) -> None:
        ending = next((it for it in new.conditions if it.type == str(new.state) and it.status == "True"), None)
        if ending is None or not ending.reason or not ending.message:
            self.fail(f"the job is {new.state} and does not say why")
        if new.state is JobState.COMPLETE and not self._world.training.over and not self._world.gave_up:
            self.fail(f"the job is Complete after {self._world.training.step} of {self._world.training.steps} steps")
        late = ending is not None and ending.reason == "DeadlineExceeded"
        if new.state is JobState.FAILED and not late and not self._world.any_blamed():
            self.fail("the job is Failed, and nothing had happened to any replica")

    # --- what is created ----------------------------------------------------------------------------------------------

    def creates(self, operator: Operator, manifest: Mapping[str, Any]) -> None:
        """An operator is about to create an object."""
        job, todo = operator.job, operator.todo
        assert job is not None
        assert todo is not None
        name = manifest["metadata"]["name"]
        if job.spec.suspend or job.status.state in _TERMINAL or job.metadata.deletion_timestamp is not None:
            self.fail(f"{operator.name} creates {name} for a job that is suspended, has ended or goes")
        if manifest["kind"] == "Pod" and REPLICA_LABEL in manifest["metadata"]["labels"]:
            self._creates_trainer(operator, job, manifest)

    def _creates_trainer(self, operator: Operator, job: Job, manifest: Mapping[str, Any]) -> None:
        name, (replica, attempt) = manifest["metadata"]["name"], _who(manifest)
        written = self._written(job)
        entry = written.replica(replica) if written is not None else None
        if replica >= job.spec.groups:
            self.fail(f"{operator.name} creates {name}, and the job has {job.spec.groups} groups of pods")
        if written is None:
            return  # the job is gone, and the garbage collector takes this along
        if entry is None or attempt > entry.attempt:
            self.fail(f"{operator.name} creates {name} before that attempt stands in the status")
            return
        if attempt == entry.attempt and (entry.next_restart_time or 0.0) > self._world.now + operator.skew + SAME:
            self.fail(f"{operator.name} creates {name} before its wait is over")
        self._asked_to_go(operator, job, replica, attempt, name)
        key = (job.metadata.uid, name)
        if key in self._created and (key[0], replica, attempt) in operator.knows_whole:
            self.fail(f"{operator.name} gives attempt {attempt} of replica {replica} the pod {name} a second time")
        self._created.add(key)

    def _asked_to_go(self, operator: Operator, job: Job, replica: int, attempt: int, name: str) -> None:
        """No two attempts live by our doing: those before were asked to stop."""
        for pod in self._world.server.pods(job.name):
            labels = pod["metadata"]["labels"]
            mine = labels[JOB_UID_LABEL] == job.metadata.uid and REPLICA_LABEL in labels
            if not mine or _who(pod)[0] != replica or _who(pod)[1] >= attempt or uid_of(pod) not in operator.saw:
                continue
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running"):
                self.fail(f"{operator.name} creates {name} while {name_of(pod)} runs, which nobody asked to stop")

    def _written(self, job: Job) -> JobStatus | None:
        there = self._world.server.get(KIND, job.name)
        if there is None or uid_of(there) != job.metadata.uid:
            return None
        return JobStatus.model_validate(there.get("status") or {})

    # --- what is deleted ----------------------------------------------------------------------------------------------

    def deletes(self, operator: Operator, thing: Manifest, *, force: bool) -> None:
        """An operator is about to delete an object."""
        job = operator.job
        assert job is not None
        if thing["kind"] == KIND:
            self._deletes_job(operator, job)
        elif thing["kind"] == BUDGET:
            if thing["spec"]["minAvailable"] == min_available(job):
                self.fail(f"{operator.name} deletes a disruption budget that is as the job wants it")
        elif REPLICA_LABEL not in thing["metadata"]["labels"]:
            self._deletes_coordinator(operator, job, thing)
        elif force:
            self._forces(operator, job, thing)
        elif "deletionTimestamp" not in thing["metadata"]:
            self._deletes_trainer(operator, job, thing)
            self._world.blame(job.metadata.uid, _who(thing), f"{name_of(thing)} was deleted by {operator.name}")

    def _forces(self, operator: Operator, job: Job, pod: Manifest) -> None:
        """A training pod is removed by force only where that is allowed, and after its grace period."""
        end = self._world.nodes.ends(pod)
        if not job.spec.node_policy.force_delete or end is None or end > self._world.now + operator.skew:
            self.fail(f"{operator.name} removes {name_of(pod)} by force")

    def _deletes_job(self, operator: Operator, job: Job) -> None:
        ttl, end = job.spec.ttl_seconds_after_finished, job.status.completion_time
        if ttl is None or end is None or end + ttl > self._world.now + operator.skew + SAME:
            self.fail(f"{operator.name} deletes the job before its time is up")

    def _deletes_coordinator(self, operator: Operator, job: Job, pod: Manifest) -> None:
        """It is lost only when it has failed, its node does not answer, or the job is not what it was told."""
        wrong = pod["metadata"]["annotations"][CONFIG_ANNOTATION] != coordinator_config(job)
        going = "deletionTimestamp" in pod["metadata"] or _phase(pod) in ("Succeeded", "Failed")
        node = self._world.nodes.all.get(pod["spec"].get("nodeName", ""))
        lost = node is not None and (node.outages or node.name in self._world.nodes.suspects)
        if not (wrong or going or lost or job.spec.suspend or job.status.terminal):
            self.fail(f"{operator.name} deletes a coordinator with which nothing is wrong")
        if job.spec.suspend and not going:
            self._have_stopped(operator, job, f"{operator.name} deletes the coordinator of a suspended job")

    def _deletes_trainer(self, operator: Operator, job: Job, pod: Manifest) -> None:
        who, name = _who(pod), name_of(pod)
        if job.spec.suspend or job.status.terminal:
            return
        written = self._written(job)
        entry = written.replica(who[0]) if written is not None else None
        if entry is None or who[1] > entry.attempt:
            return  # the job or its status is another one by now
        if who[1] == entry.attempt and entry.state not in (*_ENDED, *_AWAY):
            self.fail(f"{operator.name} deletes {name} before the status says why: replica {who[0]} is {entry.state}")
        if who[0] >= job.spec.groups or entry.state is ReplicaState.SUSPENDED:
            return  # the user has scaled it away, or all stop to start again
        blamed = self._world.blamed(job.metadata.uid, who)
        if who[1] == entry.attempt and not blamed and not self._is_over(job, written):
            self.fail(f"{operator.name} deletes {name}, and nothing had happened to that replica")

    def _is_over(self, job: Job, written: JobStatus | None) -> bool:
        """The run is over and its coordinator has ended: whoever still runs waits in vain."""
        pods = [pod for pod in self._world.server.pods(job.name) if REPLICA_LABEL not in pod["metadata"]["labels"]]
        finished = written is not None and any(it.state is ReplicaState.FINISHED for it in written.replica_statuses)
        return any(_phase(pod) == "Succeeded" for pod in pods) or (finished and not pods)

    # --- what is labelled ---

    def labels(self, operator: Operator, pod: Manifest, labels: Mapping[str, str]) -> None:
        """An operator is about to tell a pod which attempt it is to run."""
        job, attempt = operator.job, int(labels[ATTEMPT_LABEL])
        assert job is not None
        written = self._written(job)
        entry = written.replica(_who(pod)[0]) if written is not None else None
        if entry is not None and attempt > entry.attempt:
            self.fail(f"{operator.name} tells {name_of(pod)} to run attempt {attempt} before it stands in the status")
        if attempt != _who(pod)[1] and not self._world.blamed(job.metadata.uid, _who(pod)):
            self.fail(f"{operator.name} restarts what {name_of(pod)} runs, and nothing had happened to that replica")

    # --- what is told -------------------------------------------------------------------------------------------------

    def tells(self, operator: Operator, job: Job, message: Exited) -> None:
        """An operator tells the coordinator that an attempt is gone: it takes it out at once."""
        who, there = (message.replica, message.attempt), self._world.training.reached()
        known = None if there is None else there.peers.get(message.replica)
        is_member = known is not None and known.attempt == message.attempt
        leaves = not is_member and self._world.nodes.is_suspect(job.metadata.uid, who)
        if not leaves and not self._world.blamed(job.metadata.uid, who):
            self.fail(
                f"{operator.name} tells that replica {message.replica} attempt {message.attempt} is gone,"
                " and nothing had happened to it"
            )

    # --- at the end ---------------------------------------------------------------------------------------------------

    def comes_to_an_end(self, job: Manifest | None) -> None:
        """With nothing in its way a job ends: it is Complete, or Failed with a reason, or gone."""
        if job is None:
            return
        status = JobStatus.model_validate(job.get("status") or {})
        if status.state not in _TERMINAL:
            entries = ", ".join(f"r{entry.index} {entry.state} a{entry.attempt}" for entry in status.replica_statuses)
            self.fail(f"nothing is in its way any more, and the job does not end: {status.state} ({entries})")

    def stops_everything(self, job: Manifest | None) -> None:
        """After the end no pod of the job runs."""
        running = [name_of(p) for p in self._world.server.pods() if p["status"]["phase"] in ("Pending", "Running")]
        if job is not None and running:
            self.fail(f"the job has ended, and {', '.join(running)} still run")

    def leaves_nothing(self) -> None:
        """After its deletion nothing of a job is left."""
        left = [f"{kind} {name}" for kind, name in self._world.server.objects]
        if left:
            self.fail(f"the job is deleted, and there is still {', '.join(left)}")


def _is_to_leave(job: Job, entry: ReplicaStatus, node: NodeView) -> bool:
    """A node is left, unless the replica came to it for want of another."""
    cordoned = node.unschedulable and job.spec.node_policy.on_cordon is OnCordon.MIGRATE
    came = entry.last_failure is not None and entry.last_failure.node == node.name
    came |= node.name in {it.name for it in job.status.avoided_nodes}
    return (cordoned or ("GPUMissing", "True") in node.conditions) and not came


def _rolled(old: ReplicaStatus, new: ReplicaStatus) -> bool:
    """It starts again with another template, at no cost."""
    changed = new.attempt > old.attempt and new.revision != old.revision and new.restarts == old.restarts
    return changed and old.state not in _AWAY


def _broke_with(entry: ReplicaStatus, revision: str) -> bool:
    failure = entry.last_failure
    return (
        failure is not None and failure.revision == revision and failure.action is not RuleAction.RESTART_REPLICA_FREE
    )


def _stands_by(entry: ReplicaStatus) -> bool:
    """A spare that failed while it became one, and has become one since."""
    failure = entry.last_failure
    return entry.state is ReplicaState.SPARE and failure is not None and failure.during is not ReplicaState.ACTIVE


def _stopping(todo: Plan) -> bool:
    return any(entry.state is ReplicaState.SUSPENDED for entry in todo.status.replica_statuses)


def _phase(pod: Manifest) -> str:
    """Return what has become of the container that counts; others may run beside it."""
    seen = view(pod)
    assert seen is not None
    return seen.phase


def _who(pod: Mapping[str, Any]) -> tuple[int, int]:
    labels = pod["metadata"]["labels"]
    return int(labels[REPLICA_LABEL]), int(labels[ATTEMPT_LABEL])
