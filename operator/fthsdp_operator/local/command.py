"""``fthsdp run``: a job on this machine, its pods as processes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from fthsdp.errors import ConfigError
from fthsdp_operator.api import Job
from fthsdp_operator.cluster import Manifest
from fthsdp_operator.local.folder import RunFolder
from fthsdp_operator.local.inject import Injection, check_targets, parse_injection
from fthsdp_operator.local.manifest import load_job
from fthsdp_operator.local.screen import screen_for
from fthsdp_operator.local.session import End, ExitCode, Session
from fthsdp_operator.report import publish, read_record

__all__ = ["add_run_parser", "run"]

_EPILOG = """\
Exit codes: 0 complete, 1 the job failed, 2 bad input, 130 interrupted.
KIND is kill (SIGKILL), freeze (SIGSTOP), term (SIGTERM) or delete (as kubectl delete pod does); without pod=P it hits
all pods of the replica. It happens as soon as step N is final.
"""


def add_run_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``run`` to the command line of ``fthsdp``."""
    parser = commands.add_parser(
        "run",
        help="run a job on this machine, its pods as processes",
        description="Run an FTHSDPJob on this machine: the same manifest, the same operator, pods are processes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("manifest", type=Path, metavar="JOB.YAML", help="file with the FTHSDPJob")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="run folder, replaced if it is one (default: runs/NAME)"
    )
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="KIND:replica=R[,pod=P]@step=N",
        help="a fault to order, for example kill:replica=2@step=20; may be given several times",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the job and say how it went; raises ConfigError before anything was started or left behind."""
    manifest, job = load_job(arguments.manifest)
    injections = [parse_injection(text) for text in arguments.inject]
    check_targets(injections, replicas=job.spec.replicas, pods_per_replica=job.spec.pods_per_replica)
    folder = RunFolder.claim(arguments.out or Path("runs") / job.name)
    try:
        end = _run(manifest, folder, injections)
    finally:
        folder.close()
    _conclude(end, job, folder)
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
    try:
        lines = publish(read_record(folder.path), folder.path, title=f"{job.name}: {job.spec.replicas} replicas")
    except ConfigError:
        lines = [f"No step was recorded. What the pods printed: {folder.logs}"]
    print("\n".join(lines))
