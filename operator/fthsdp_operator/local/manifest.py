"""Reads a job's manifest from a file, as ``kubectl apply -f`` would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fthsdp.errors import ConfigError
from fthsdp_operator.api import Job, parse_job
from fthsdp_operator.documents import load_manifest
from fthsdp_operator.local.containers import check_template

__all__ = ["load_job"]

_OURS = ("name", "namespace", "labels", "annotations")
"""Metadata that a person writes."""


def load_job(path: Path) -> tuple[dict[str, Any], Job]:
    """Return manifest and job, both checked for this machine; raises ConfigError that begins with the file."""
    manifest = load_manifest(path)
    try:
        job = parse_job(manifest)
        check_template(job.spec.template)
        if job.spec.suspend:
            raise ConfigError("spec.suspend is true: on this machine nobody can set it to false later, so leave it out")
        if job.spec.tls is not None:
            raise ConfigError(
                "spec.tls names a Secret of a cluster: on this machine nothing leaves it, so leave it out"
            )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return _as_applied(manifest), job


def _as_applied(manifest: dict[str, Any]) -> dict[str, Any]:
    """Drop what only the API server writes: ``kubectl get -o yaml`` shows it, and ``kubectl apply`` ignores it."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name in _OURS}
    return {name: value for name, value in manifest.items() if name != "status"} | {"metadata": metadata}
