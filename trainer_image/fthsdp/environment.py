"""Who a process is, read from the environment that the operator (or ``fthsdp run``) gives to its pod.

Names starting with ``FTHSDP_`` are ours. Inside a pod ``torchrun`` may add ``RANK`` and ``WORLD_SIZE``; without it
each pod is one rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fthsdp.errors import ConfigError

__all__ = [
    "ATTEMPT",
    "ATTEMPT_FILE",
    "BATCH_POLICY",
    "CHECKPOINT_EVERY",
    "CHECKPOINT_PATH",
    "COORDINATOR",
    "GRACE",
    "JOB",
    "JOB_KEY_FILE",
    "LR_POLICY",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PODS_PER_REPLICA",
    "POD_INDEX",
    "POD_IP",
    "PRELOAD",
    "PROCESSES_PER_POD",
    "REPLICA",
    "TLS_DIR",
    "Identity",
    "checkpoint_place",
    "grace_seconds",
    "read_job_key",
    "read_key_file",
]

JOB = "FTHSDP_JOB"
"""Name of the job; part of every handshake, so that a process of another job is refused by name."""
REPLICA = "FTHSDP_REPLICA"
"""Index of this data-parallel replica, 0 … replicas-1. Stable over restarts."""
ATTEMPT = "FTHSDP_ATTEMPT"
"""Incarnation of the replica; grows with each restart. An older one is refused."""
ATTEMPT_FILE = "FTHSDP_ATTEMPT_FILE"
"""File in which the launcher finds the attempt that is to run in its pod now; see ``fthsdp.launcher``."""
PRELOAD = "FTHSDP_PRELOAD"
"""Modules, separated by commas, that the launcher's waiting interpreter has imported; it keeps none where unset."""
POD_INDEX = "FTHSDP_POD_INDEX"
"""Index of this pod inside its replica."""
PODS_PER_REPLICA = "FTHSDP_PODS_PER_REPLICA"
"""Pods that make up one replica."""
PROCESSES_PER_POD = "FTHSDP_PROCESSES_PER_POD"
"""Ranks in each pod; above 1 the pod's command is expected to be torchrun."""
COORDINATOR = "FTHSDP_COORDINATOR"
"""host:port of the job's coordinator."""
JOB_KEY_FILE = "FTHSDP_JOB_KEY_FILE"
"""File with the job's key. A file, not a variable, so that it does not show in process listings or crash reports."""
TLS_DIR = "FTHSDP_TLS_DIR"
"""Folder with tls.crt, tls.key and ca.crt: connections are encrypted with them; they are not where unset."""
POD_IP = "FTHSDP_POD_IP"
"""Address at which other replicas reach this pod; 127.0.0.1 where unset."""
BATCH_POLICY = "FTHSDP_BATCH_POLICY"
"""Shrink or Constant: how many samples a step has while replicas are missing. Shrink where unset."""
LR_POLICY = "FTHSDP_LR_POLICY"
"""None, Linear or Sqrt: how the learning rate follows a batch that shrank. None where unset."""
CHECKPOINT_PATH = "FTHSDP_CHECKPOINT_PATH"
"""Folder of the job's checkpoints, which all pods reach; there are none where unset."""
CHECKPOINT_EVERY = "FTHSDP_CHECKPOINT_EVERY"
"""Steps from one checkpoint to the next."""
GRACE = "FTHSDP_GRACE_SECONDS"
"""Seconds from a SIGTERM to the SIGKILL that follows; 30, as in Kubernetes, where unset."""
MASTER_ADDR = "MASTER_ADDR"
"""torch's rendezvous inside the replica: host of its pod 0."""
MASTER_PORT = "MASTER_PORT"
"""torch's rendezvous inside the replica: port on pod 0."""


def _number(env: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} is not set: start this script with 'fthsdp run' or as part of an FTHSDPJob")
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError(f"{name}={text!r} is not a whole number of at least {least}")
    return value


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise ConfigError(f"{name} is not set: start this script with 'fthsdp run' or as part of an FTHSDPJob")
    return env[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is in its job."""

    job: str
    replica: int
    attempt: int
    rank: int
    """Rank inside the replica; also the number of the rail."""
    world_size: int
    """Ranks inside the replica."""
    coordinator: str
    """host:port"""
    host: str
    """Address at which the same rank of other replicas reaches this process."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Identity:
        """Read the identity; raises ConfigError that names the variable."""
        pods = _number(env, PODS_PER_REPLICA, default=1, least=1)
        processes = _number(env, PROCESSES_PER_POD, default=1, least=1)
        world_size = _number(env, "WORLD_SIZE", default=pods, least=1)
        rank = _number(env, "RANK", default=_number(env, POD_INDEX, default=0))
        if world_size != pods * processes:
            raise ConfigError(
                f"this replica has {world_size} ranks but {pods} pods of {processes} processes:"
                f" start {processes} processes per pod (torchrun does) or set spec.processesPerPod to what you start"
            )
        if rank >= world_size:
            raise ConfigError(f"rank {rank} is outside 0…{world_size - 1}")
        return cls(
            job=_text(env, JOB),
            replica=_number(env, REPLICA),
            attempt=_number(env, ATTEMPT, default=0),
            rank=rank,
            world_size=world_size,
            coordinator=_text(env, COORDINATOR),
            host=env.get(POD_IP) or "127.0.0.1",
        )


def read_job_key(env: Mapping[str, str] = os.environ) -> bytes:
    """Read the job's key from the file that ``FTHSDP_JOB_KEY_FILE`` names; raises ConfigError."""
    path = Path(_text(env, JOB_KEY_FILE))
    return read_key_file(path, given=f"{JOB_KEY_FILE}={path}")


def read_key_file(path: Path, *, given: str) -> bytes:
    """Read the job's key from this file; raises ConfigError that begins with ``given``, where the path came from."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{given}: {error.strerror}") from error
    if len(key) < 16:
        raise ConfigError(f"{given} holds {len(key)} bytes: a job key has at least 16")
    return key


def checkpoint_place(env: Mapping[str, str]) -> tuple[Path, int] | None:
    """Return the folder for checkpoints and after how many steps there is one; None for none. Raises ConfigError."""
    path, every = env.get(CHECKPOINT_PATH, ""), env.get(CHECKPOINT_EVERY, "")
    if not path and not every:
        return None
    if not path or not every:
        raise ConfigError(f"{CHECKPOINT_PATH} and {CHECKPOINT_EVERY} belong together: set both or none")
    if not every.isascii() or not every.isdigit() or not int(every):
        raise ConfigError(f"{CHECKPOINT_EVERY}={every}: it has to be a number of steps, at least 1")
    return Path(path), int(every)


def grace_seconds(env: Mapping[str, str]) -> int:
    """Return how long this process may still run once it is told to stop; raises ConfigError."""
    return _number(env, GRACE, default=30)
