"""The CRD, generated from the models: ``python -m fthsdp_operator.crd --write crds/fthsdpjobs.yaml``.

Kubernetes wants a *structural* schema: no references, no null types, no ``additionalProperties`` beside named ones.
What pydantic writes is turned into that here; descriptions, limits and CEL rules come along.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from fthsdp_operator.api import GROUP, KIND, MAX_JOB_NAME, NAME_RULE, PLURAL, VERSION, JobSpec, JobStatus

__all__ = ["Schema", "crd", "main", "put", "text"]

Schema = dict[str, Any]

_HEADER = "# Generated from operator/fthsdp_operator/api by 'make generate'. Do not edit.\n"
_DESCRIPTION = (
    "An FTHSDPJob trains one model on several data-parallel replicas, each with a whole copy of the training state."
    " When a replica fails, only that one is restarted; the others train on."
)
_ALWAYS: Schema = {}
_WIDE: Schema = {"priority": 1}  # only ``kubectl get -o wide`` shows it
_COLUMNS = (
    ("Ready", "string", ".status.ready", "Replicas that train, of those wanted.", _ALWAYS),
    ("Min", "integer", ".spec.minReplicas", "Replicas below which the job pauses.", _ALWAYS),
    ("Spares", "string", ".status.spares", "Spares that are ready, of those wanted.", _WIDE),
    ("Up-to-date", "integer", ".status.updatedReplicas", "Replicas that run the template as it is.", _WIDE),
    ("Abandoned", "integer", ".status.abandonedReplicas", "Replicas that failed and are not restarted.", _WIDE),
    ("Step", "integer", ".status.step", "Newest final step.", _ALWAYS),
    ("Samples/s", "number", ".status.samplesPerSecond", "Samples trained in a second.", _WIDE),
    ("Tokens/s", "number", ".status.tokensPerSecond", "Tokens trained in a second.", _WIDE),
    ("Effective", "number", ".status.effectiveTrainingTime", "Share of the time that went into final steps.", _WIDE),
    ("Restarts", "integer", ".status.restarts", "Restarts of replicas so far.", _ALWAYS),
    ("State", "string", ".status.state", "Where the job stands.", _ALWAYS),
    ("Last-Failure", "string", ".status.lastFailure", "The newest failure of a replica.", _ALWAYS),
    ("Age", "date", ".metadata.creationTimestamp", "Since the job was created.", _ALWAYS),
)


def crd() -> Schema:
    """Return the CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["fthsdp"],
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }


def _version() -> Schema:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": words} | wide
            for name, kind, path, words, wide in _COLUMNS
        ],
        "schema": {"openAPIV3Schema": _root()},
    }


def _root() -> Schema:
    rule = f"size(self.metadata.name) <= {MAX_JOB_NAME} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')"
    return {
        "type": "object",
        "description": _DESCRIPTION,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": KIND},
            "metadata": {"type": "object"},
            "spec": _structural(JobSpec, defaults=True),
            "status": _structural(JobStatus, defaults=False),
        },
        "x-kubernetes-validations": [{"rule": rule, "message": NAME_RULE}],
    }


def _structural(model: type[BaseModel], *, defaults: bool) -> Schema:
    schema = model.model_json_schema(by_alias=True)
    return _flat(schema, schema.get("$defs", {}), defaults=defaults)


_KEPT = (
    "description",
    "type",
    "format",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "pattern",
    "required",
)


def _flat(schema: Schema, definitions: Mapping[str, Schema], *, defaults: bool) -> Schema:
    """Return a schema without references, as a structural one."""
    whole = _resolved(schema, definitions)
    flat = {key: value for key, value in whole.items() if key in _KEPT or key.startswith("x-kubernetes-")}
    if "description" in flat:
        flat["description"] = " ".join(flat["description"].split())
    if "properties" in whole:
        flat["properties"] = {
            name: _flat(field, definitions, defaults=defaults) for name, field in whole["properties"].items()
        }
    if isinstance(whole.get("additionalProperties"), Mapping):  # else it says only whether there may be other names
        flat["additionalProperties"] = _flat(whole["additionalProperties"], definitions, defaults=defaults)
    if "items" in whole:
        flat["items"] = _flat(whole["items"], definitions, defaults=defaults)
    if defaults and whole.get("default") is not None:
        # An object's default is empty: its fields then get theirs, from one place.
        flat["default"] = {} if whole["type"] == "object" else whole["default"]
    return flat


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Follow a reference and drop the null of an optional field; what stands beside it wins."""
    beside = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf")}
    if "$ref" in schema:
        return _resolved(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions) | beside
    if "anyOf" in schema:
        (one,) = (option for option in schema["anyOf"] if option.get("type") != "null")
        return _resolved(one, definitions) | beside
    return schema


def text() -> str:
    """Return the CRD as it is checked in."""
    return _HEADER + yaml.safe_dump(crd(), sort_keys=False, width=110, allow_unicode=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the CRD to a file, or print it."""
    return put(text(), arguments, program="python -m fthsdp_operator.crd", what="Write the CRD of FTHSDPJob.")


def put(generated: str, arguments: Sequence[str] | None, *, program: str, what: str) -> int:
    """Write what a program generates where its arguments say; returns its exit code."""
    parser = argparse.ArgumentParser(prog=program, description=what)
    parser.add_argument("--write", metavar="FILE", type=Path, help="where to write it; standard output if left out")
    target = parser.parse_args(arguments).write
    if target is None:
        sys.stdout.write(generated)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(generated, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
