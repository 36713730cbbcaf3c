"""``python -m fthsdp.launcher -- COMMAND …``: run the command so that it can be restarted in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fthsdp.environment import ATTEMPT, ATTEMPT_FILE, PRELOAD
from fthsdp.errors import ConfigError
from fthsdp.exit_codes import EXIT_CONFIG
from fthsdp.launcher.report import tell
from fthsdp.launcher.supervisor import Settings, Supervisor

__all__ = ["main", "settings_from"]


def settings_from(arguments: Sequence[str], env: Mapping[str, str]) -> Settings:
    """Read command line and environment; raises ConfigError that says what is wrong with them."""
    if arguments[:1] != ["--"] or len(arguments) < 2:
        raise ConfigError("python -m fthsdp.launcher -- COMMAND …: the command is missing")
    if not env.get(ATTEMPT_FILE):
        raise ConfigError(f"{ATTEMPT_FILE} is not set: it names the file with the attempt that is to run")
    born = env.get(ATTEMPT, "0")
    if not born.isdecimal():
        raise ConfigError(f"{ATTEMPT}={born!r} is not a whole number of at least 0")
    preload = tuple(name.strip() for name in env.get(PRELOAD, "").split(",") if name.strip())
    return Settings(
        command=tuple(arguments[1:]), env=env, born=int(born), attempts=Path(env[ATTEMPT_FILE]), preload=preload
    )


def main() -> int:
    """Run the launcher and return the exit code of the container."""
    env = dict(os.environ)
    try:
        settings = settings_from(sys.argv[1:], env)
    except ConfigError as error:
        print(f"fthsdp: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return Supervisor(settings, report=tell(env)).run()


if __name__ == "__main__":
    sys.exit(main())
