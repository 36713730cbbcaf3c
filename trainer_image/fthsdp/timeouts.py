"""Every time after which somebody gives up, and the rules between them.

The times belong to different programs: the coordinator, the ranks' transport, the trainer, the operator. Each has its
own settings, and no program knows all of them; so the rules are here, and whoever learns of a set of values has it
checked. The values below are the defaults; a test holds them against the code that uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fthsdp.errors import ConfigError

__all__ = ["RULES", "TIMEOUTS", "Rule", "Timeout", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """One time, in seconds."""

    name: str
    """What it is called in errors."""
    default: float
    meaning: str
    where: str = ""
    """How it is set; empty when it cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``name`` has to be at least ``factor`` times the sum of ``others``, or longer than it."""

    name: str
    others: tuple[str, ...]
    factor: int = 1
    strictly: bool = False
    reason: str

    def holds(self, seconds: Mapping[str, float]) -> bool:
        """Return whether these values keep it. A value that is no number keeps none."""
        left, right = seconds[self.name], self._bound(seconds)
        return left > right if self.strictly else left >= right

    def broken(self, seconds: Mapping[str, float]) -> str:
        """Say in a sentence what was wrong and what would be right."""
        bound = " + ".join(TIMEOUTS[other].name for other in self.others)
        bound = f"{self.factor} x {bound}" if self.factor > 1 else bound
        relation = "longer than" if self.strictly else "at least"
        return (
            f"{TIMEOUTS[self.name].name} is {seconds[self.name]:g} s: it must be {relation} {bound}"
            f" ({self._bound(seconds):g} s): {self.reason}"
        )

    def _bound(self, seconds: Mapping[str, float]) -> float:
        return self.factor * sum(seconds[other] for other in self.others)


TIMEOUTS: dict[str, Timeout] = {
    # the coordinator
    "start_timeout": Timeout(
        name="start-timeout",
        default=600.0,
        meaning="the first epoch waits for all replicas, then for minReplicas only",
        where="`coordinator.startTimeoutSeconds`, `--start-timeout` of the coordinator",
    ),
    "look_again": Timeout(
        name="a newcomer's look",
        default=5.0,
        meaning="a newcomer that waits for a run to begin looks for a newer checkpoint. One that waited while"
        " everything was lost is given that time, and the silence timeout to say what it saw",
    ),
    "silence_timeout": Timeout(
        name="silence-timeout",
        default=5.0,
        meaning="a leader that says nothing is taken out",
        where="`coordinator.silenceTimeoutSeconds`, `--silence-timeout` of the coordinator",
    ),
    "return_timeout": Timeout(
        name="return-timeout",
        default=30.0,
        meaning="a coordinator that was restarted or cut off waits for the members it knows, one that hears nobody for"
        " anybody; and never less than for one that says nothing",
        where="`--return-timeout` of the coordinator",
    ),
    "reconnect_grace": Timeout(
        name="reconnect-grace",
        default=1.0,
        meaning="a leader whose connection closed may come back, unless a ring neighbour misses it too",
        where="`--reconnect-grace` of the coordinator",
    ),
    "answer_timeout": Timeout(
        name="answer-timeout",
        default=10.0,
        meaning="a replica that talks, but leaves a fence or a probe unanswered, is taken out",
        where="`--answer-timeout` of the coordinator",
    ),
    "connect_timeout": Timeout(
        name="connect-timeout",
        default=60.0,
        meaning="the rings of a planned epoch have to connect, or it is given up",
        where="`--connect-timeout` of the coordinator",
    ),
    "stall_timeout": Timeout(
        name="stall-timeout",
        default=300.0,
        meaning="no step has ended: the ranks are asked where they are. Who has kept others waiting for half of it is"
        " taken out",
        where="`coordinator.stallTimeoutSeconds`, `--stall-timeout` of the coordinator",
    ),
    "farewell_timeout": Timeout(
        name="the coordinator's farewell",
        default=5.0,
        meaning="the coordinator takes last records after the end of the run, then exits",
    ),
    # the rings
    "keepalive_interval": Timeout(
        name="the ring's keepalive-interval",
        default=1.0,
        meaning="the longest time without a sign of life to a ring neighbour",
        where="`FTHSDP_KEEPALIVE_INTERVAL` or `FtarSettings.keepalive_interval`",
    ),
    "ring_silence_timeout": Timeout(
        name="the ring's silence-timeout",
        default=5.0,
        meaning="a ring neighbour that sends not even keep-alives breaks the ring",
        where="`FTHSDP_SILENCE_TIMEOUT` or `FtarSettings.silence_timeout`",
    ),
    "ring_connect_timeout": Timeout(
        name="the ring's connect-timeout",
        default=10.0,
        meaning="both neighbours in a new ring have to be connected",
        where="`FTHSDP_CONNECT_TIMEOUT` or `FtarSettings.connect_timeout`",
    ),
    # the trainer
    "dial_timeout": Timeout(
        name="a leader's dial",
        default=5.0,
        meaning="one attempt of a leader to reach the coordinator; then it asks for the address again",
    ),
    "heartbeat_interval": Timeout(
        name="a leader's heartbeat",
        default=1.0,
        meaning="the longest time without a word of a leader to the coordinator",
    ),
    "rank_start_timeout": Timeout(
        name="the start of a replica",
        default=300.0,
        meaning="the ranks of a replica wait for each other when they start",
    ),
    "fetch_silence_timeout": Timeout(
        name="the silence of a fetch",
        default=10.0,
        meaning="a fetch (stripe, reduced gradients) that brings no byte is given up",
    ),
    "leave_timeout": Timeout(
        name="the time to leave",
        default=20.0,
        meaning="a replica told to stop is let go at a boundary, or ends by itself",
        where="two thirds of the pods' grace period",
    ),
    "bye_timeout": Timeout(
        name="the wait for the coordinator's last word",
        default=15.0,
        meaning="a leader that has finished waits until all others have",
    ),
    "group_timeout": Timeout(
        name="the process groups' timeout",
        default=365 * 86400.0,
        meaning="torch gives up a collective inside a replica: never, so that a pause may last as long as it takes",
    ),
    "launcher_patience": Timeout(
        name="the launcher's patience",
        default=30.0,
        meaning="a crashed command whose launcher is told of no new attempt ends its container",
    ),
    "launcher_import": Timeout(
        name="the launcher's wait for imports",
        default=120.0,
        meaning="an interpreter that waits has to have imported what it is to, or the command starts without it",
    ),
    # the operator
    "termination_grace": Timeout(
        name="the pods' grace period",
        default=30.0,
        meaning="a pod told to stop is killed",
        where="`terminationGracePeriodSeconds` of the pod template",
    ),
    "straggler_grace": Timeout(
        name="the grace for stragglers",
        default=20.0,
        meaning="training pods may still run after the coordinator has exited at the end of the run",
    ),
    "coordinator_linger": Timeout(
        name="the grace for the coordinator",
        default=30.0,
        meaning="a coordinator may take to exit by itself after the job is complete",
    ),
    "early_exit_grace": Timeout(
        name="the grace for an early exit",
        default=60.0,
        meaning="a pod that exited with 0 waits for the others of its replica; then the replica has failed",
    ),
    "unreachable_seconds": Timeout(
        name="unreachableSeconds",
        default=60.0,
        meaning="a node that is not Ready is lost for those replicas of which the coordinator hears nothing",
        where="`spec.nodePolicy.unreachableSeconds`",
    ),
    "start_seconds": Timeout(
        name="startSeconds",
        default=1800.0,
        meaning="all pods of a replica run, and the coordinator does not know it; or no container of it can be started",
        where="`spec.deadlines.startSeconds`",
    ),
    "stalled": Timeout(
        name="the patience with what replicas wait for",
        default=300.0,
        meaning="what a replica waits for makes the condition Stalled true",
    ),
    "move_patience": Timeout(
        name="the patience of planned moves",
        default=600.0,
        meaning="a replica leaves an ill or cordoned node though another one is not back yet",
    ),
    "force_overdue": Timeout(
        name="the delay of force",
        default=2.0,
        meaning="a pod on a dead node that is past its grace period is removed by force, where that is allowed",
    ),
    "lease_duration": Timeout(
        name="the duration of the lease",
        default=15.0,
        meaning="an operator that stands by takes over a lease that nobody renews",
    ),
    "renew_deadline": Timeout(
        name="the deadline of renewals",
        default=10.0,
        meaning="an operator that could not renew its lease ends",
    ),
    "renew_period": Timeout(
        name="the period of renewals",
        default=2.0,
        meaning="the longest time between two looks at the lease",
    ),
}
"""By the name under which ``check`` takes a value."""


RULES: tuple[Rule, ...] = (
    Rule(
        name="silence_timeout",
        others=("heartbeat_interval",),
        factor=2,
        reason="leaders speak once a second, and one late word is no failure",
    ),
    Rule(
        name="silence_timeout",
        others=("reconnect_grace",),
        reason="who is known to be cut off is not waited for longer than who is only silent",
    ),
    Rule(
        name="return_timeout",
        others=("dial_timeout",),
        strictly=True,
        reason="a leader that dials the address of a coordinator that is gone needs a second attempt",
    ),
    Rule(
        name="answer_timeout",
        others=("heartbeat_interval",),
        reason="an answer that was lost with its connection comes with the next heartbeat",
    ),
    Rule(
        name="ring_silence_timeout",
        others=("keepalive_interval",),
        factor=3,
        reason="one late keep-alive is no failure",
    ),
    Rule(
        name="connect_timeout",
        others=("ring_connect_timeout",),
        strictly=True,
        reason="a ring that does not connect says why before the epoch is given up",
    ),
    Rule(
        name="stall_timeout",
        others=("silence_timeout", "answer_timeout"),
        strictly=True,
        reason="who is silent or does not answer is found out first",
    ),
    Rule(
        name="stall_timeout",
        others=("ring_silence_timeout", "ring_connect_timeout"),
        strictly=True,
        reason="a ring that broke is replaced first",
    ),
    Rule(
        name="group_timeout",
        others=("start_timeout", "stall_timeout"),
        strictly=True,
        reason="the coordinator finds out who hangs, not a watchdog inside a replica",
    ),
    Rule(
        name="rank_start_timeout",
        others=("launcher_import",),
        factor=2,
        reason="a rank that starts without the interpreter that was to import for it still comes in time",
    ),
    Rule(
        name="straggler_grace",
        others=("bye_timeout",),
        strictly=True,
        reason="a leader that waits for the last word still ends by itself",
    ),
    Rule(
        name="coordinator_linger",
        others=("farewell_timeout",),
        strictly=True,
        reason="the last records are not cut off",
    ),
    Rule(
        name="early_exit_grace",
        others=("bye_timeout", "straggler_grace"),
        strictly=True,
        reason="the pods of a replica may end so far apart at the end of a run",
    ),
    Rule(
        name="start_seconds",
        others=("rank_start_timeout",),
        strictly=True,
        reason="ranks that wait for each other in vain end by themselves, and say for whom",
    ),
    Rule(
        name="lease_duration",
        others=("renew_deadline",),
        strictly=True,
        reason="what an operator has sent before it ends has arrived before another one acts",
    ),
    Rule(
        name="renew_deadline",
        others=("renew_period",),
        factor=3,
        reason="one renewal that fails is no loss",
    ),
)


def check(given: Mapping[str, float]) -> None:
    """Raise ConfigError that names the first rule which these values break.

    Each rule is checked of which all times are given or cannot be set; at least one of them has to be given.
    """
    fixed = {name: timeout.default for name, timeout in TIMEOUTS.items() if not timeout.where}
    seconds = fixed | dict(given)
    for rule in RULES:
        names = {rule.name, *rule.others}
        if names & given.keys() and names <= seconds.keys() and not rule.holds(seconds):
            raise ConfigError(rule.broken(seconds))
