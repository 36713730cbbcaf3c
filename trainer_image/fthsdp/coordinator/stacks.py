"""What the stack of a rank that does not go on tells: where it is, and whether it waits for another rank."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["place", "waits_for_others"]

_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/fthsdp/")
_COLLECTIVES = ("/torch/distributed/",)


def place(stack: str) -> str:
    """Return the innermost frame of the user's own code, or the innermost of all: file, line, function and source."""
    frames = _frames(stack)
    own = [frame for frame in frames if not any(part in frame[0] for part in _NOT_THE_USERS)]
    return " / ".join((own or frames)[-1]) if frames else ""


def waits_for_others(stack: str) -> bool:
    """Return whether the innermost frames are those of a collective inside the replica: another rank is to blame."""
    return any(part in frame[0] for frame in _frames(stack)[-3:] for part in _COLLECTIVES)


def _frames(stack: str) -> Sequence[tuple[str, ...]]:
    """Return each frame as its lines, the innermost last."""
    frames: list[tuple[str, ...]] = []
    for line in stack.splitlines():
        words = line.strip()
        if words.startswith("File "):
            frames.append((words,))
        elif words and frames:
            frames[-1] = (*frames[-1], words)
    return frames
