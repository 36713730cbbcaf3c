"""Reads a job's manifest from a file, as ``kubectl apply -f`` would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fthsdp.errors import ConfigError
from fthsdp_operator.api import KIND, Job, parse_job
from fthsdp_operator.local.containers import check_template

__all__ = ["load_job", "load_manifest"]

_OURS = ("name", "namespace", "labels", "annotations")
"""Metadata that a person writes."""


def load_manifest(path: Path) -> dict[str, Any]:
    """Return the one document of a YAML or JSON file; raises ConfigError."""
    try:
        documents = [d for d in yaml.safe_load_all(path.read_text(encoding="utf-8")) if d is not None]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text: name the YAML file with the {KIND}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_where(error)}") from None
    except (ValueError, RecursionError) as error:  # of a date with month 99, of brackets without end
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if len(documents) != 1:
        raise ConfigError(f"{path} holds {len(documents)} documents: it has to hold one {KIND}")
    if not isinstance(documents[0], dict):
        raise ConfigError(f"{path} holds a {type(documents[0]).__name__}: it has to hold one {KIND}")
    return documents[0]


def _where(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split())


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
