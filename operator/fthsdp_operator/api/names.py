"""Names that everybody shares: of the kind, its labels, its pods; and how large a job can be."""

from __future__ import annotations

import re
from enum import StrEnum

__all__ = [
    "API_VERSION",
    "ATTEMPT_LABEL",
    "CONFIG_ANNOTATION",
    "CONTAINER_ANNOTATION",
    "GROUP",
    "JOB_LABEL",
    "JOB_UID_LABEL",
    "KIND",
    "MANAGER",
    "MAX_JOB_NAME",
    "MAX_PODS",
    "MAX_PROCESSES",
    "MAX_REPLICAS",
    "MAX_RULES",
    "NAME_PATTERN",
    "NAME_RULE",
    "PLURAL",
    "POD_INDEX_LABEL",
    "REPLICA_LABEL",
    "RESERVED_ENV",
    "RESERVED_ENV_PREFIX",
    "REVISION_LABEL",
    "ROLE_LABEL",
    "TRANSPORT_ENV",
    "VERSION",
    "Role",
    "coordinator_name",
    "pod_name",
]


GROUP = "fthsdp.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "FTHSDPJob"
PLURAL = "fthsdpjobs"
MANAGER = f"{GROUP}/fthsdp-operator"
"""What spec.managedBy says of a job that this operator looks after."""

JOB_LABEL = f"{GROUP}/job"
"""Name of the job; on every object that belongs to it."""
JOB_UID_LABEL = f"{GROUP}/job-uid"
"""UID of the job: tells its pods from those of an earlier job of the same name."""
REPLICA_LABEL = f"{GROUP}/replica"
"""Index of the replica, 0 … replicas+spares-1; on training pods."""
ATTEMPT_LABEL = f"{GROUP}/attempt"
"""Incarnation of the replica, 0 and up; on training pods."""
POD_INDEX_LABEL = f"{GROUP}/pod-index"
"""Index of the pod inside its replica, 0 … podsPerReplica-1; on training pods."""
REVISION_LABEL = f"{GROUP}/revision"
"""Of the template from which a training pod was made. For people: what counts is in the status."""
ROLE_LABEL = f"{GROUP}/role"
"""trainer or coordinator; on pods."""
CONFIG_ANNOTATION = f"{GROUP}/coordinator-config"
"""Numbers and times with which the coordinator was started, on its pod; when the job has others by now, it is
replaced."""

CONTAINER_ANNOTATION = f"{GROUP}/container"
"""Name of the container that counts: a webhook may put another one first."""

MAX_JOB_NAME = 40
"""Pods are called {job}-r1023-a999999-4095 at the longest, and a host name has at most 63 characters."""
MAX_REPLICAS = 1024
MAX_PODS = 4096
MAX_PROCESSES = 256
MAX_RULES = 64

NAME_RULE = (
    f"metadata.name has to be at most {MAX_JOB_NAME} lower-case letters, digits and dashes, starting with a letter and"
    " ending with a letter or digit: it becomes part of the host names of the pods"
)
NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

RESERVED_ENV_PREFIX = "FTHSDP_"
RESERVED_ENV = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_NPROC_PER_NODE",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
)
"""Set by the operator in every container of a training pod, beside those that start with FTHSDP_; the last two by
torchrun."""
TRANSPORT_ENV = (
    "FTHSDP_FTAR_CHUNK_BYTES",
    "FTHSDP_FTAR_STREAMS",
    "FTHSDP_FTAR_WINDOW",
    "FTHSDP_FTAR_WIRE_DTYPE",
    "FTHSDP_KEEPALIVE_INTERVAL",
    "FTHSDP_SILENCE_TIMEOUT",
    "FTHSDP_CONNECT_TIMEOUT",
)
"""Set by the user, for the transport between replicas."""


class Role(StrEnum):
    """What a pod is in its job."""

    TRAINER = "trainer"
    COORDINATOR = "coordinator"


def pod_name(job: str, replica: int, attempt: int, index: int) -> str:
    """Name of a training pod: another one for each attempt, so that a new pod never waits for an old one to go."""
    return f"{job}-r{replica}-a{attempt}-{index}"


def coordinator_name(job: str) -> str:
    """Name of the coordinator's pod, and of its service account and role."""
    return f"{job}-coordinator"
