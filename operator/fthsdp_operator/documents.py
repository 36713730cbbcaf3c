"""Reads files with Kubernetes objects, YAML or JSON, as ``kubectl apply -f`` would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fthsdp.errors import ConfigError
from fthsdp_operator.api import KIND

__all__ = ["load_documents", "load_manifest", "load_objects"]


def load_documents(path: Path) -> list[Any]:
    """Return all documents of a file that are not empty; raises ConfigError that names it."""
    try:
        return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document is not None]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text: name a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_where(error)}") from None
    except (ValueError, RecursionError) as error:  # of a date with month 99, of brackets without end
        raise ConfigError(f"{path} cannot be read: {error}") from None


def load_manifest(path: Path) -> dict[str, Any]:
    """Return the one document of a file, for a job; raises ConfigError."""
    documents = load_documents(path)
    if len(documents) != 1:
        raise ConfigError(f"{path} holds {len(documents)} documents: it has to hold one {KIND}")
    if not isinstance(documents[0], dict):
        raise ConfigError(f"{path} holds a {type(documents[0]).__name__}: it has to hold one {KIND}")
    return documents[0]


def load_objects(path: Path) -> list[dict[str, Any]]:
    """Return all objects of a file, those in lists included; raises ConfigError."""
    objects = [item for document in load_documents(path) for item in _items(path, document)]
    for item in objects:
        _check(path, item)
    return objects


def _items(path: Path, document: Any) -> list[Any]:
    """Return the items of a list as ``kubectl get`` prints it, or the one object that is no list."""
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}: it has to hold Kubernetes objects")
    kind, items = document.get("kind"), document.get("items")
    if not isinstance(kind, str) or not kind.endswith("List"):
        return [document]
    if not isinstance(items, list):
        raise ConfigError(f"{path}: the {kind} has no items: it has to hold a list of them")
    # Those of a PodList do not say what they are.
    named = {} if kind == "List" else {"kind": kind.removesuffix("List"), "apiVersion": document.get("apiVersion")}
    return [named | item if isinstance(item, dict) else item for item in items]


def _check(path: Path, item: Any) -> None:
    """Make sure that an object has what every object has."""
    if not isinstance(item, dict):
        raise ConfigError(f"{path} holds a {type(item).__name__}: it has to hold Kubernetes objects")
    if not isinstance(item.get("kind"), str):
        raise ConfigError(f"{path} holds an object without a kind: it has to hold Kubernetes objects")
    metadata = item.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise ConfigError(f"{path} holds a {item['kind']} without metadata.name: give it one")


def _where(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split())
