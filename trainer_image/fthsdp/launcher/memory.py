"""Whether the kernel has killed somebody for memory: its own counters, of the cgroup that is this container."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["oom_kills"]


def oom_kills(*, cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many processes of our cgroup, or of one below it, were killed so far; 0 where nobody counts.

    The kernel counts before it kills. A container may see its own cgroup where those of the machine would be.
    """
    for file in _counters(cgroups, own):
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def _counters(cgroups: Path, own: Path) -> list[Path]:
    """Return the files in which the counter may stand, the likelier ones first."""
    found: list[Path] = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                root, name = cgroups / "memory", "memory.oom_control"
            elif number == "0":
                root, name = cgroups, "memory.events"
            else:
                continue
            found += [root / path.lstrip("/") / name, root / name]
    return found
