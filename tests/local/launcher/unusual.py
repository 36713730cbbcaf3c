"""A launcher that is not as usual: ``python -m tests.local.launcher.unusual JSON -- COMMAND …``.

The JSON has settings of the launcher, such as ``patience``, and ``fork_takes``: seconds for which a new process stands
still before it does anything.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace

from fthsdp.launcher.__main__ import settings_from
from fthsdp.launcher.report import tell
from fthsdp.launcher.supervisor import Supervisor

if __name__ == "__main__":
    env, given = dict(os.environ), json.loads(sys.argv[1])
    fork_takes = given.pop("fork_takes", 0.0)
    os.register_at_fork(after_in_child=lambda: time.sleep(fork_takes))
    settings = replace(settings_from(sys.argv[2:], env), **given)
    sys.exit(Supervisor(settings, report=tell(env)).run())
