"""Each alert fires when it should, and not before, as Prometheus itself evaluates it (``promtool test rules``)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ALERTS = Path(__file__).parents[3] / "charts" / "fthsdp-operator" / "files" / "alerts.yaml"
PROMTOOL = shutil.which("promtool")
HOUR = 60
OPERATOR = '{namespace="RELEASE_NAMESPACE", pod="a"}'
SECOND = '{namespace="RELEASE_NAMESPACE", pod="c"}'
ANOTHER = '{namespace="elsewhere", pod="b"}'
JOB = 'namespace="training", job="llama"'
WELL = {f"fthsdp_queue_depth{OPERATOR}": "0x1000", f"fthsdp_leader{OPERATOR}": "1x1000"}
"""What an operator says that is well. Values are those of one minute after the other."""


def state(name: str) -> dict[str, str]:
    return {f'fthsdp_job_state{{{JOB}, state="{name}"}}': "1x1000"}


def requests(code: str, values: str, *, verb: str = "get") -> dict[str, str]:
    return {f'fthsdp_api_requests_total{{namespace="RELEASE_NAMESPACE", verb="{verb}", code="{code}"}}': values}


def refused(resource: str) -> dict[str, str]:
    """Return what is said of a resource that the API server does not show, and of one that it shows."""
    name = 'fthsdp_watch_forbidden{namespace="RELEASE_NAMESPACE", watched_namespace="training", resource='
    return {f'{name}"{resource}"}}': "1x1000", f'{name}"fthsdpjobs"}}': "0x1000"}


def roll(name: str) -> dict[str, str]:
    return {f'fthsdp_job_roll{{{JOB}, state="{name}"}}': "1x1000"}


def seconds(histogram: str, labels: str, *, bound: float, longer: bool) -> dict[str, str]:
    """Return a histogram to which a call a minute is added, shorter or longer than a bound of its buckets."""
    return {
        f'{histogram}_bucket{{{labels}le="{bound}"}}': "0x1000" if longer else "0+1x1000",
        f'{histogram}_bucket{{{labels}le="{4 * bound}"}}': "0+1x1000",
        f'{histogram}_bucket{{{labels}le="+Inf"}}': "0+1x1000",
    }


def availability(share: float) -> dict[str, str]:
    return {
        f"fthsdp_available_replica_seconds_total{{{JOB}}}": f"0+{180 * share}x1000",
        f"fthsdp_desired_replica_seconds_total{{{JOB}}}": "0+180x1000",
    }


QUEUE = ("fthsdp_queue_wait_seconds", 'namespace="RELEASE_NAMESPACE", ')
OUTAGE = ("fthsdp_replica_outage_seconds", 'namespace="RELEASE_NAMESPACE", ')
FAILURES = 'fthsdp_replica_failures_total{namespace="RELEASE_NAMESPACE", reason="OOMKilled", action="Restart"}'
WATCH = f"fthsdp_watch_age_seconds{OPERATOR}"
ERRORS = f"fthsdp_reconcile_errors_total{OPERATOR}"
STEP = f"fthsdp_job_step{{{JOB}}}"
AVOIDED = f"fthsdp_job_avoided_nodes{{{JOB}}}"
CORNERED = f"fthsdp_job_replicas_on_avoided_nodes{{{JOB}}}"
OUTDATED = f"fthsdp_job_outdated_replicas{{{JOB}}}"
STANDBY = {f"fthsdp_leader{OPERATOR}": "0x1000"}
ELSEWHERE = {f"fthsdp_queue_depth{ANOTHER}": "0x1000", f"fthsdp_leader{ANOTHER}": "1x1000"}

CASES: dict[str, tuple[dict[str, str], int, set[str]]] = {
    # what is measured, after how many minutes, which alerts fire
    "all is well": (WELL | state("Running") | {STEP: "0+1x1000"} | availability(0.99), 300, set()),
    "nothing is scraped, for a moment": ({}, 4, set()),
    "nothing is scraped": ({}, 6, {"FTHSDPOperatorDown"}),
    "only the operator of another release is scraped": (ELSEWHERE, 6, {"FTHSDPOperatorDown"}),
    "one of two operators stands by": (WELL | {f"fthsdp_leader{SECOND}": "0x1000"}, 5, set()),
    "all operators stand by, for a moment": (WELL | STANDBY, 1, set()),
    "all operators stand by": (WELL | STANDBY, 3, {"FTHSDPNoLeader"}),
    "all of one release stand by": (WELL | STANDBY | ELSEWHERE, 3, {"FTHSDPNoLeader"}),
    "a watch hears something each five minutes": (WELL | {WATCH: "300x1000"}, 60, set()),
    "a watch has been silent for eight minutes": (WELL | {WATCH: "0+60x1000"}, 8, {"FTHSDPWatchSilent"}),
    "a reconcile fails now and then": (WELL | {ERRORS: "0+1x1000"}, HOUR, set()),
    "reconciles fail": (WELL | {ERRORS: "0+6x1000"}, 30, {"FTHSDPReconcileErrors"}),
    "one request was forbidden": (WELL | requests("403", "0x30 1x1000") | requests("200", "0+60x1000"), 41, set()),
    "requests are forbidden": (
        WELL | requests("403", "0+1x1000") | requests("200", "0+60x1000"),
        20,
        {"FTHSDPForbidden"},
    ),
    "nodes are not shown": (
        WELL | refused("nodes") | requests("403", "0+1x1000", verb="list") | requests("200", "0+60x1000"),
        HOUR,
        set(),
    ),
    "pods are not shown": (WELL | refused("pods") | requests("200", "0+60x1000"), 20, {"FTHSDPForbidden"}),
    "one request in twenty fails": (WELL | requests("500", "0+3x1000") | requests("200", "0+57x1000"), HOUR, set()),
    "half of the requests fail": (
        WELL | requests("429", "0+30x1000") | requests("200", "0+30x1000"),
        20,
        {"FTHSDPApiErrors"},
    ),
    "workers are quick": (WELL | seconds(*QUEUE, bound=2.5, longer=False), HOUR, set()),
    "workers are slow": (WELL | seconds(*QUEUE, bound=5, longer=True), 30, {"FTHSDPQueueSlow"}),
    "a job has failed": (WELL | state("Failed"), 2, {"FTHSDPJobFailed"}),
    "a job is complete": (WELL | state("Complete"), 300, set()),
    "a job is suspended": (WELL | state("Suspended"), 300, set()),
    "a job pauses for nine minutes": (WELL | state("Paused"), 9, set()),
    "a job pauses": (WELL | state("Paused"), 11, {"FTHSDPJobPaused"}),
    "a replica is away for a while": (WELL | state("Degraded") | {STEP: "0+1x1000"}, 29, set()),
    "a replica is away": (WELL | state("Degraded") | {STEP: "0+1x1000"}, 31, {"FTHSDPJobDegraded"}),
    "a job starts slowly": (WELL | state("Starting"), 59, set()),
    "a job does not start": (WELL | state("Pending"), 61, {"FTHSDPJobNotStarting"}),
    "a node is avoided for nine minutes": (WELL | {AVOIDED: "1x9 0x1000", CORNERED: "0x1000"}, 12, set()),
    "a node is avoided": (WELL | {AVOIDED: "2x1000", CORNERED: "0x1000"}, 11, {"FTHSDPNodesAvoided"}),
    "a replica had no other place": (
        WELL | {AVOIDED: "1x1000", CORNERED: "1x1000"},
        11,
        {"FTHSDPNodesAvoided", "FTHSDPReplicasOnAvoidedNodes"},
    ),
    "a step takes ten minutes": (WELL | state("Running") | {STEP: " ".join(f"{n}x9" for n in range(30))}, 200, set()),
    "a job makes no step": (WELL | state("Running") | {STEP: "7x1000"}, 36, {"FTHSDPJobMakesNoSteps"}),
    "a template reaches a replica each 50 minutes": (
        WELL | roll("Rolling") | {OUTDATED: " ".join(f"{n}x49" for n in (5, 4, 3, 2, 1))},
        250,
        set(),
    ),
    "a template reaches no replica": (WELL | roll("Rolling") | {OUTDATED: "5x9 4x1000"}, 80, {"FTHSDPRollSlow"}),
    "a template does not work": (WELL | roll("RollStalled") | {OUTDATED: "4x1000"}, 11, {"FTHSDPRollStalled"}),
    "a template finds no room, for a moment": (WELL | roll("NoRoom") | {OUTDATED: "5x1000"}, 9, set()),
    "a template finds no room": (WELL | roll("NoRoom") | {OUTDATED: "5x1000"}, 300, {"FTHSDPRollStalled"}),
    "a template is left to restarts": (WELL | roll("OnRestart") | {OUTDATED: "5x1000"}, 300, set()),
    "replicas train for half of the time": (WELL | availability(0.5), 80, {"FTHSDPAvailabilityLow"}),
    "replicas fail now and then": (WELL | {FAILURES: " ".join(f"{n}x19" for n in range(9))}, 120, set()),
    "replicas fail again and again": (WELL | {FAILURES: "0+1x1000"}, HOUR, {"FTHSDPFailuresMany"}),
    "recoveries are quick": (WELL | seconds(*OUTAGE, bound=600, longer=False), 400, set()),
    "recoveries are slow": (WELL | seconds(*OUTAGE, bound=1800, longer=True), 30, {"FTHSDPRecoverySlow"}),
}


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    written = {rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
    assert {name for _, _, firing in CASES.values() for name in firing} == written


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: it is in the Debian package 'prometheus'")
@pytest.mark.parametrize("case", CASES)
def test_what_fires_when(case: str, tmp_path: Path) -> None:
    series, minutes, firing = CASES[case]
    alerts = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{minutes}m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
    }
    measured = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": measured, "promql_expr_test": [alerts]}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}))
    command = [str(PROMTOOL), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
