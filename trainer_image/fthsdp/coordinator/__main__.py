"""``python -m fthsdp.coordinator``: one job's coordinator, as a process or in its own pod.

Steps that are final go to stdout, one JSON object a line; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fthsdp.coordinator.archive import Archive
from fthsdp.coordinator.events import MembershipSettings
from fthsdp.coordinator.server import Coordinator
from fthsdp.coordinator.store import EpochStore, FileStore, StoreConflict
from fthsdp.environment import read_key_file
from fthsdp.errors import ConfigError
from fthsdp.exit_codes import EXIT_CONFIG, EXIT_TERMINATED
from fthsdp.tls import Tls

__all__ = ["main"]

log = logging.getLogger("fthsdp.coordinator")

DEFAULT_PORT = 29400


class _Parser(argparse.ArgumentParser):
    """Answers bad arguments with one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_CONFIG, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fthsdp.coordinator",
        description="Decides who is a member of a training job's replicas, under which epoch, and how a broken step"
        " ends. One process per job. Killed and started again with the same store, it goes on where it was.",
        epilog="Prints one JSON object per final step on stdout, and its log on stderr. Exit codes: 0 the run has"
        f" finished; {EXIT_CONFIG} something is wrong with the arguments, the key or the store; 1 another"
        f" coordinator of this job took over; {EXIT_TERMINATED} stopped by SIGTERM.",
        allow_abbrev=False,
    )
    need = parser.add_argument_group("required")
    need.add_argument("--job", required=True, metavar="NAME", help="name of the job; others are refused")
    need.add_argument("--replicas", required=True, type=int, metavar="R", help="replicas that the job should have")
    need.add_argument(
        "--min-replicas", required=True, type=int, metavar="M", help="active replicas below which training pauses"
    )
    need.add_argument("--key-file", required=True, type=Path, metavar="PATH", help="file that holds the job's key")
    need.add_argument(
        "--store", required=True, metavar="STORE", help="where epochs are kept: file:PATH or configmap:NAMESPACE/NAME"
    )
    parser.add_argument(
        "--spares", type=int, default=0, metavar="K", help="replicas beyond R kept ready (default %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="TCP port; 0 picks a free one and logs it (default %(default)s)"
    )
    parser.add_argument("--host", default="", help="address to listen on (default: all, of IPv4 and IPv6)")
    parser.add_argument(
        "--record-dir", type=Path, metavar="DIR", help="folder for steps.jsonl, joins.jsonl, events.jsonl, report.json"
    )
    _add_times(parser)
    parser.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="default %(default)s"
    )
    return parser


def _add_times(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("times, in seconds")
    for name, text in (
        ("start-timeout", "wait this long for all replicas, then start with min-replicas"),
        ("silence-timeout", "take a replica out that has said nothing for this long"),
        ("return-timeout", "wait this long for the members after a restart or a time cut off, or while hearing nobody"),
        ("reconnect-grace", "a leader whose connection closed may take this long to come back"),
        ("answer-timeout", "a replica may take this long to answer a fence"),
        ("connect-timeout", "a planned change may take this long to connect"),
        ("stall-timeout", "ask all ranks where they are when no step has ended for this long"),
    ):
        default = MembershipSettings.__dataclass_fields__[name.replace("-", "_")].default
        times.add_argument(f"--{name}", type=float, default=default, metavar="S", help=f"{text} (default {default:g})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the coordinator until the job has finished; return the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=args.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return asyncio.run(_run(args))
    except ConfigError as error:
        print(f"python -m fthsdp.coordinator: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except StoreConflict as error:
        log.error("%s", error)
        return 1


async def _run(args: argparse.Namespace) -> int:
    if not 0 <= args.port < 65536:
        raise ConfigError(f"port is {args.port}: it must be between 0 and 65535")
    settings = MembershipSettings(
        replicas=args.replicas,
        min_replicas=args.min_replicas,
        spares=args.spares,
        start_timeout=args.start_timeout,
        silence_timeout=args.silence_timeout,
        return_timeout=args.return_timeout,
        reconnect_grace=args.reconnect_grace,
        answer_timeout=args.answer_timeout,
        connect_timeout=args.connect_timeout,
        stall_timeout=args.stall_timeout,
    )
    key = read_key_file(args.key_file, given=f"--key-file {args.key_file}")
    tls = Tls.from_environment()
    archive = Archive(args.record_dir) if args.record_dir else None
    coordinator = Coordinator(
        settings,
        job=args.job,
        key=key,
        store=await _open_store(args.store),
        archive=archive,
        out=sys.stdout,
        tls=tls,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        finished = await coordinator.run(args.host, args.port, stop=stop)
    except OSError as error:
        where = f"{args.host or 'all addresses'}:{args.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error
    return 0 if finished else EXIT_TERMINATED


async def _open_store(text: str) -> EpochStore:
    kind, _, place = text.partition(":")
    if kind == "file" and place:
        return FileStore(Path(place))
    namespace, _, name = place.partition("/")
    if kind == "configmap" and namespace and name and "/" not in name:
        # Kubernetes is only needed, and only installed, where such a store is used.
        from fthsdp.coordinator.configmap_store import ConfigMapStore

        return await ConfigMapStore.connect(namespace, name)
    raise ConfigError(f"store {text!r} is neither file:PATH nor configmap:NAMESPACE/NAME")


if __name__ == "__main__":
    sys.exit(main())
