"""The launcher with another patience: ``python -m tests.local.launcher.patience SECONDS -- COMMAND …``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from fthsdp.launcher.__main__ import settings_from
from fthsdp.launcher.report import tell
from fthsdp.launcher.supervisor import Supervisor

if __name__ == "__main__":
    env = dict(os.environ)
    settings = replace(settings_from(sys.argv[2:], env), patience=float(sys.argv[1]))
    sys.exit(Supervisor(settings, report=tell(env)).run())
