"""The record of a job on a cluster: the report from the epoch's ConfigMap, the course from the coordinator's log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, CoreV1Api
from kubernetes.aio.client.exceptions import ApiException

from fthsdp.coordinator.configmap_store import REPORT
from fthsdp.errors import ConfigError
from fthsdp_operator.api import coordinator_name
from fthsdp_operator.kube.requests import Access
from fthsdp_operator.manifests.render import config_map_name
from fthsdp_operator.reports.history import history_of_log
from fthsdp_operator.reports.report import RunRecord

__all__ = ["fetch_record", "log_lines"]


async def fetch_record(access: Access, *, namespace: str, job: str) -> tuple[RunRecord, str]:
    """Return the record of a job and the log it was read from; raises ConfigError when there is none."""
    async with ApiClient(await access.load()) as client:
        core = CoreV1Api(client)
        try:
            stored = await core.read_namespaced_config_map(config_map_name(job), namespace)
            log = await _log(core, namespace, job)
        except ApiException as error:
            raise ConfigError(f"job {namespace}/{job}: {_words(error)}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError(f"job {namespace}/{job}: the API server does not answer: {error}") from error
    text = (stored.data or {}).get(REPORT)
    if text is None:
        raise ConfigError(f"job {namespace}/{job} has no report yet: its coordinator writes one once the run has begun")
    report = json.loads(text)
    points = tuple(history_of_log(log_lines(log), started=report["started"] or 0.0))
    return RunRecord(report=report, points=points), log


async def _log(core: CoreV1Api, namespace: str, job: str) -> str:
    """Return the coordinator's log with timestamps; empty when its pod is gone: the report says the rest."""
    try:
        return str(await core.read_namespaced_pod_log(coordinator_name(job), namespace, timestamps=True))
    except ApiException as error:
        if error.status == 404:
            return ""
        raise


def _words(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def log_lines(log: str) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield Unix time and content of the lines about steps; the coordinator logs other things as well."""
    for line in log.splitlines():
        stamp, _, text = line.partition(" ")
        try:
            said = json.loads(text)
            # Kubernetes writes nanoseconds, of which Python reads the first six digits.
            time = datetime.fromisoformat(f"{stamp[:26].rstrip('Z')}+00:00").timestamp()
        except ValueError:
            continue
        if isinstance(said, dict) and {"step", "loss", "active", "seconds"} <= said.keys():
            yield time, said
