"""``fthsdp``: the command line. It parses, calls, and turns errors into one sentence and an exit code.

Exit codes: 0 done, 1 it did not work, 2 what was asked for was wrong, 130 interrupted, 141 nobody reads the output any
more. Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

from fthsdp.errors import ConfigError, FthsdpError

__all__ = ["COORDINATOR_IMAGE", "main"]

COORDINATOR_IMAGE = "FTHSDP_COORDINATOR_IMAGE"
"""Image of coordinators whose job names none: the operator's own, which the chart puts here."""

IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""There in every pod that may talk to the API server."""


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
        default=os.environ.get(COORDINATOR_IMAGE) or f"fthsdp-operator:{_version()}",
        help=f"image of coordinators whose job names none (default: ${COORDINATOR_IMAGE}, or %(default)s)",
    )
    parser.add_argument(
        "--health-port",
        metavar="PORT",
        type=int,
        help="answer GET /healthz here for as long as the operator is alive; nowhere if left out",
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
    kubeconfig = _kubeconfig(chosen.kubeconfig)
    from fthsdp_operator import handlers, logs
    from fthsdp_operator.apiserver import Access

    logs.configure(logs.Level(chosen.log_level), logs.LogFormat(chosen.log_format))
    asyncio.run(
        handlers.run(
            access=Access(kubeconfig=kubeconfig),
            namespaces=chosen.namespaces,
            coordinator_image=chosen.coordinator_image,
            health_port=chosen.health_port,
            metrics_port=chosen.metrics_port,
        )
    )
    return 0


def _kubeconfig(given: str | None) -> str | None:
    """Return the kubeconfig to use, or None for the pod's service account; raises ConfigError when there is neither."""
    if given is None and IN_CLUSTER.exists():
        return None
    path = Path(given or os.environ.get("KUBECONFIG") or "~/.kube/config").expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no kubeconfig at {path}: name one with --kubeconfig FILE")
    return str(path)


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
