"""``fthsdp run`` and ``fthsdp report``: a job on this machine, and what happened in a run here or on a cluster."""

from __future__ import annotations

import argparse
import asyncio
import errno
import sys
from pathlib import Path
from typing import TypeAlias

from fthsdp.coordinator.archive import Archive
from fthsdp.errors import ConfigError, FthsdpError
from fthsdp_operator.api import Job
from fthsdp_operator.cluster import Manifest
from fthsdp_operator.local.folder import RunFolder
from fthsdp_operator.local.inject import Injection, check_targets, parse_injection
from fthsdp_operator.local.manifest import load_job
from fthsdp_operator.local.screen import screen_for
from fthsdp_operator.local.session import End, ExitCode, Session
from fthsdp_operator.reports.report import publish, read_record, settle

__all__ = ["add_report_parser", "add_run_parser"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Full, full for this user (or its files are limited), read-only, broken: nothing that a traceback would help with."""

_RUN_EPILOG = """\
KIND is kill (SIGKILL), freeze (SIGSTOP), term (SIGTERM) or delete (as kubectl delete pod does); without pod=P it hits
all pods of the replica. It happens as soon as step N is final.

Exit codes: 0 complete, 1 the job failed, 2 bad input, 130 interrupted.
"""


def add_run_parser(commands: Commands) -> None:
    """Add ``run`` to the command line of ``fthsdp``."""
    parser = commands.add_parser(
        "run",
        description="Run an FTHSDPJob on this machine: the same manifest, the same operator, pods are processes.",
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("manifest", type=Path, metavar="JOB.YAML", help="file with the FTHSDPJob")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder; an earlier run is replaced (runs/NAME)")
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="KIND:replica=R[,pod=P]@step=N",
        help="a fault to order, for example kill:replica=2@step=20; may be given several times",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Run the job, say how it went and return the exit code; raises ConfigError for bad input."""
    manifest, job = load_job(given.manifest)
    injections = [parse_injection(text) for text in given.inject]
    check_targets(injections, replicas=job.spec.groups, pods_per_replica=job.spec.pods_per_replica)
    folder = RunFolder.claim(given.out or Path("runs") / job.name)
    try:
        end = _run(manifest, folder, injections)
        _conclude(end, job, folder)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise FthsdpError(f"the run folder {folder.path}: {error.strerror}") from error
    finally:
        folder.close()
    return end.code


def _run(manifest: Manifest, folder: RunFolder, injections: list[Injection]) -> End:
    async def session() -> End:
        with screen_for(sys.stdout) as screen:
            return await Session(manifest, folder=folder, injections=injections, screen=screen).run()

    return asyncio.run(session())


def _conclude(end: End, job: Job, folder: RunFolder) -> None:
    """Say how the run ended; of a run that never began because its input was bad nothing is kept."""
    if end.code is ExitCode.BAD_INPUT:
        folder.remove()
        raise ConfigError(f"job {job.name}: {end.message}")
    if end.code is not ExitCode.COMPLETE:
        print(f"fthsdp: job {job.name}: {end.message}", file=sys.stderr)
    settle(folder.path, outcome=end.code.name.lower())
    try:
        record = read_record(folder.path)
    except ConfigError:
        print(f"No step was recorded. What the pods printed is in {folder.logs}")
        return
    print("\n".join(publish(record, folder.path, title=f"{job.name}: {job.spec.replicas} replicas")))


# --- report ---------------------------------------------------------------------------------------------------------


def add_report_parser(commands: Commands) -> None:
    """Add ``report`` to the command line of ``fthsdp``."""
    parser = commands.add_parser(
        "report",
        description="Tell in plain words what happened in a run, and draw its picture.",
    )
    parser.add_argument("source", metavar="DIR|JOB", help="folder of a run on this machine, or with --out a job's name")
    parser.add_argument("--out", type=Path, metavar="DIR", help="read the job from the cluster and put its record here")
    parser.add_argument("-n", "--namespace", default="default", help="of the job on the cluster (default: %(default)s)")
    parser.add_argument("--kubeconfig", metavar="FILE", help="how to reach the cluster (default: as kubectl)")
    parser.set_defaults(run=report)


def report(given: argparse.Namespace) -> int:
    """Print what happened in a run; raises ConfigError."""
    if given.out is None:
        folder = Path(given.source)
        lines = publish(read_record(folder), folder, title=folder.resolve().name)
    else:
        lines = _report_from_cluster(given.source, given.namespace, given.kubeconfig, given.out)
    print("\n".join(lines))
    return 0


def _report_from_cluster(job: str, namespace: str, kubeconfig: str | None, out: Path) -> list[str]:
    from fthsdp_operator.kube.requests import Access, find_kubeconfig
    from fthsdp_operator.reports.cluster_record import fetch_record

    access = Access(kubeconfig=find_kubeconfig(kubeconfig))
    record, log = asyncio.run(fetch_record(access, namespace=namespace, job=job))
    folder = RunFolder.claim(out)
    try:
        (folder.logs / f"{job}-coordinator.log").write_text(log)
        Archive(folder.path).write_report(record.report)
        return publish(record, folder.path, title=f"{namespace}/{job}: {record.report['replicas']} replicas")
    finally:
        folder.close()
