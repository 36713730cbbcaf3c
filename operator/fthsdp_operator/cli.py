"""``fthsdp``: the command line. It parses, calls, and turns errors into one sentence and an exit code.

Exit codes: 0 done, 1 it did not work, 2 what was asked for was wrong, 130 interrupted, 141 nobody reads the output any
more. Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fthsdp.errors import ConfigError, FthsdpError

if TYPE_CHECKING:
    from fthsdp_operator.kube.lease import Place

__all__ = ["COORDINATOR_IMAGE", "main"]

COORDINATOR_IMAGE = "FTHSDP_COORDINATOR_IMAGE"
"""Image of coordinators whose job names none: the operator's own, which the chart puts here."""

IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""There in every pod that may talk to the API server."""
GARBAGE = 50_000
"""Objects that the operator makes between two searches for cycles. A page of a list has that many, and no cycle."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        chosen = _parser(given[0] if given else "").parse_args(given)
        code = int(chosen.run(chosen))
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        return _complain(_missing(error), 2)
    except ConfigError as error:
        return _complain(str(error), 2)
    except FthsdpError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return _unread()


def _unread() -> int:
    """Be as quiet as any other command when ``head`` has read enough, also when the interpreter flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return 128 + signal.SIGPIPE


def _complain(sentence: str, code: int) -> int:
    print(f"fthsdp: {sentence}", file=sys.stderr)
    return code


def _missing(error: ModuleNotFoundError) -> str:
    name = (error.name or "").partition(".")[0]
    if name.startswith("fthsdp"):
        raise error
    extra = "trainer" if name in ("torch", "numpy", "matplotlib") else "operator"
    return f"this needs the Python package {name}: install it with 'pip install \"fthsdp[{extra}]\"'"


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser(command: str) -> argparse.ArgumentParser:
    """Return the parser for a command; of the others it only knows the names."""
    parser = argparse.ArgumentParser(
        prog="fthsdp",
        description="Fault-tolerant training: only the replica with the broken machine restarts, the others train on.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, words, add in (
        ("run", "run a job on this machine, its pods as processes", _add_run),
        ("report", "tell in plain words what happened in a run", _add_report),
        ("plan", "print what the operator would do for a job, and why", _add_plan),
        ("operator", "run the operator, in a cluster or outside of it", _add_operator),
        ("version", "print the version", _add_version),
    ):
        if name == command:
            add(commands)
        else:
            commands.add_parser(name, help=words)
    return parser


def _add_run(commands: Commands) -> None:
    from fthsdp_operator.local.command import add_run_parser

    add_run_parser(commands)


def _add_report(commands: Commands) -> None:
    from fthsdp_operator.local.command import add_report_parser

    add_report_parser(commands)


def _add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        description="Print what the operator would do for a job as it stands, and why. Nothing is done; no cluster is"
        " needed.",
    )
    parser.add_argument(
        "job", type=Path, metavar="JOB.YAML", help="as you wrote it, or 'kubectl get fthsdp NAME -o yaml'"
    )
    parser.add_argument(
        "pods",
        type=Path,
        metavar="PODS.YAML",
        nargs="*",
        help="its pods: 'kubectl get pods -l fthsdp.dev/job=NAME -o yaml'; and nodes: 'kubectl get nodes -o yaml'",
    )
    parser.add_argument(
        "--at",
        metavar="TIME",
        help="as if it were this time, for example 2026-01-31T12:00:00Z (default: now)",
    )
    parser.add_argument("-o", "--output", choices=("words", "yaml", "json"), default="words", help="(default: words)")
    parser.set_defaults(run=_plan)


def _plan(chosen: argparse.Namespace) -> int:
    import yaml

    from fthsdp_operator.documents import load_objects
    from fthsdp_operator.preview import preview

    now = time.time() if chosen.at is None else _time(chosen.at)
    objects = [item for path in (chosen.job, *chosen.pods) for item in load_objects(path)]
    found = preview(objects, now, coordinator_image=_coordinator_image(), with_pods=bool(chosen.pods))
    if chosen.output == "json":
        print(json.dumps(found.data(), indent=2))
    elif chosen.output == "yaml":
        print(yaml.safe_dump(found.data(), sort_keys=False, allow_unicode=True), end="")
    else:
        print("\n".join(found.words()))
    return 0


def _time(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--at {text}: it has to be a time like 2026-01-31T12:00:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _add_version(commands: Commands) -> None:
    commands.add_parser("version", description="Print the version.").set_defaults(run=_print_version)


def _add_operator(commands: Commands) -> None:
    parser = commands.add_parser("operator", description="Watch FTHSDPJobs and run them, until stopped by a signal.")
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="how to reach the cluster; in a pod its service account, else $KUBECONFIG or ~/.kube/config if left out",
    )
    parser.add_argument(
        "--namespace",
        metavar="N",
        action="append",
        default=[],
        dest="namespaces",
        help="watch only this namespace; may be given more than once; all of them if left out",
    )
    parser.add_argument(
        "--coordinator-image",
        metavar="IMAGE",
        default=_coordinator_image(),
        help=f"image of coordinators whose job names none (default: ${COORDINATOR_IMAGE}, or %(default)s)",
    )
    parser.add_argument(
        "--health-port",
        metavar="PORT",
        type=int,
        help="answer GET /healthz here for as long as the operator is alive; nowhere if left out",
    )
    parser.add_argument(
        "--leader-elect",
        action="store_true",
        help="act only while holding a Lease, so that of several operators one acts and another takes its place",
    )
    parser.add_argument(
        "--lease-namespace",
        metavar="N",
        help="with --leader-elect: namespace of the Lease (default: the one of the pod that this runs in)",
    )
    parser.add_argument(
        "--lease-name",
        metavar="NAME",
        help="with --leader-elect: its name; operators of one name take turns (default: fthsdp-operator)",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="PORT",
        type=int,
        help="answer GET /metrics here, for Prometheus; nowhere if left out",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="a line for people, or a JSON object a line (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="log this and what is worse (default: %(default)s)",
    )
    parser.set_defaults(run=_operator)


def _operator(chosen: argparse.Namespace) -> int:
    in_cluster = chosen.kubeconfig is None and IN_CLUSTER.exists()
    lease = _lease(chosen, in_cluster=in_cluster)
    from fthsdp_operator.kube.requests import Access, find_kubeconfig
    from fthsdp_operator.process import handlers, logs

    logs.configure(logs.Level(chosen.log_level), logs.LogFormat(chosen.log_format))
    gc.freeze()  # what was imported stays
    gc.set_threshold(GARBAGE)
    asyncio.run(
        handlers.run(
            access=Access(kubeconfig=None if in_cluster else find_kubeconfig(chosen.kubeconfig)),
            namespaces=chosen.namespaces,
            coordinator_image=chosen.coordinator_image,
            health_port=chosen.health_port,
            lease=lease,
            metrics_port=chosen.metrics_port,
        )
    )
    return 0


def _coordinator_image() -> str:
    return os.environ.get(COORDINATOR_IMAGE) or f"fthsdp-operator:{_version()}"


def _lease(chosen: argparse.Namespace, *, in_cluster: bool) -> Place | None:
    """Return where the Lease is, or None without leader election; raises ConfigError."""
    if not chosen.leader_elect:
        for option in ("lease_namespace", "lease_name"):
            if getattr(chosen, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')} says something about a Lease: add --leader-elect")
        return None
    namespace = chosen.lease_namespace or (IN_CLUSTER.with_name("namespace").read_text().strip() if in_cluster else "")
    if not namespace:
        raise ConfigError("--leader-elect outside of a cluster: say where the Lease is, with --lease-namespace N")
    from fthsdp_operator.kube.lease import Place

    return Place(namespace=namespace, name=chosen.lease_name or "fthsdp-operator")


def _print_version(chosen: argparse.Namespace) -> int:
    print(f"fthsdp {_version()}")
    return 0


def _version() -> str:
    try:
        return version("fthsdp")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
