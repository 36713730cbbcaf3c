"""docs/api.md, generated from the models: ``python -m fthsdp_operator.reference --write docs/api.md``.

Types, limits, defaults and rules are those of the CRD, so the page cannot promise what the API server refuses. The
models add what a schema has no place for: which enum a word comes from, and what each word means.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from fthsdp import environment
from fthsdp_operator.api import API_VERSION, KIND, REASONS, RESERVED_ENV, TRANSPORT_ENV, JobSpec, JobStatus, names
from fthsdp_operator.api.reasons import ConditionType, EventReason, meanings
from fthsdp_operator.crd import Schema, crd, put

__all__ = ["docstrings", "main", "pod_environment", "text", "values"]

_HEAD = f"""\
<!-- Generated from operator/fthsdp_operator/api by 'make generate'. Do not edit. -->
# What can be written into an {KIND}, and what can be read from it?

`apiVersion: {API_VERSION}`, `kind: {KIND}`. The API server refuses what breaks a type, a limit or a rule of this page,
and so does `fthsdp run`, with the same sentence. `kubectl explain fthsdp.spec` prints the same descriptions."""
_TORCHRUN = {
    "PET_NNODES": "Pods of the replica, for torchrun.",
    "PET_NODE_RANK": "Index of this pod inside its replica, for torchrun.",
    "PET_NPROC_PER_NODE": "Ranks in each pod, for torchrun.",
    "PET_MASTER_ADDR": "Host of the replica's pod 0, for torchrun.",
    "PET_MASTER_PORT": "Port on the replica's pod 0, for torchrun.",
    "RANK": "Rank inside the replica; set by torchrun in each process.",
    "WORLD_SIZE": "Ranks inside the replica; set by torchrun in each process.",
}
"""What the other launcher reads and writes."""
_Base = TypeVar("_Base")


# --- what stands in docstrings --------------------------------------------------------------------------------------


def docstrings(body: Iterable[ast.stmt]) -> dict[str, str]:
    """Return the names that are assigned in a piece of code, each with the string under it, in one line."""
    said = {}
    for line, below in pairwise(body):
        match line, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(words))):
                said[name] = " ".join(words.split())
    return said


def _docstrings_of(thing: Any) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    return docstrings(tree[0].body if isinstance(tree[0], ast.ClassDef) else tree)


def values(words: type[StrEnum]) -> dict[str, str]:
    """Return the values of an enum, each with its meaning; empty where nobody has written it down."""
    said = _docstrings_of(words)
    return {member.value: said.get(member.name, "") for member in words}


def pod_environment() -> dict[str, str]:
    """Return the variables that a training pod is given, each with its meaning."""
    said = _docstrings_of(environment)
    ours = {getattr(environment, name): words for name, words in said.items()}
    return ours | {name: _TORCHRUN[name] for name in RESERVED_ENV if name not in ours}


# --- the objects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    """An object with fields of its own."""

    path: str
    schema: Schema
    model: type[BaseModel] | None
    """None inside the template, which has a schema only."""

    @property
    def words(self) -> str:
        """What it is."""
        return inspect.cleandoc(self.model.__doc__ or "") if self.model else self.schema.get("description", "")

    def fields(self) -> Iterator[tuple[str, Schema, Any]]:
        """Yield name, schema and Python type of each field."""
        types = {f.alias or n: f.annotation for n, f in self.model.model_fields.items()} if self.model else {}
        for name, schema in self.schema["properties"].items():
            yield name, schema, types.get(name)


@dataclass(slots=True)
class _Page:
    """What is known while the page is written: where an object is described, and which enums it speaks of."""

    places: dict[str, str] = field(default_factory=dict)
    """Path by schema: what two fields have in common is described once."""
    enums: dict[str, type[StrEnum]] = field(default_factory=dict)

    def objects(self, whole: _Object) -> Iterator[_Object]:
        """Yield an object and all that it holds, outer ones first."""
        self.places[_key(whole.schema)] = whole.path
        yield whole
        for name, schema, python in whole.fields():
            inner = schema.get("items", schema)
            if "properties" in inner and _key(inner) not in self.places:
                path = f"{whole.path}.{name}{'[]' if inner is not schema else ''}"
                yield from self.objects(_Object(path=path, schema=inner, model=_class_in(python, BaseModel)))

    def kind(self, schema: Schema, python: Any) -> str:
        """Say what may stand in a field."""
        if "items" in schema:
            many = "set" if schema.get("x-kubernetes-list-type") == "set" else "list"
            limits = _between(schema.get("minItems"), schema.get("maxItems"))
            return many + (f" ({limits})" if limits else "") + f" of {self.kind(schema['items'], python)}"
        if "properties" in schema:
            return f"[object](#{_anchor(self.places[_key(schema)])})"
        if "enum" in schema:
            return self._words(schema["enum"], _class_in(python, StrEnum))
        if schema.get("format") == "date-time":
            return "time"
        if schema["type"] == "string":
            limits = _between(schema.get("minLength"), schema.get("maxLength"))
            return "string" + (f", {limits} characters" if limits else "")
        limits = _between(schema.get("minimum"), schema.get("maximum"))
        return str(schema["type"]) + (f", {limits}" if limits else "")

    def _words(self, words: Sequence[str], enum: type[StrEnum] | None) -> str:
        if enum is None:
            return ", ".join(f"`{word}`" for word in words)
        self.enums[enum.__name__] = enum
        return f"[{enum.__name__}](#{_anchor(enum.__name__)})"


def _key(schema: Schema) -> str:
    """Return what is the same for objects of the same shape."""
    return json.dumps({name: part for name, part in schema.items() if name not in ("description", "default")})


def _class_in(python: Any, base: type[_Base]) -> type[_Base] | None:
    """Return the first class of this base in a type such as ``tuple[Rule, ...] | None``."""
    if isinstance(python, type) and not get_args(python):
        return python if issubclass(python, base) else None
    return next((found for part in get_args(python) if (found := _class_in(part, base)) is not None), None)


def _between(least: float | None, most: float | None) -> str:
    if least is None and most is None:
        return ""
    if least is None:
        return f"up to {most:,}"
    return f"{least:,} and more" if most is None else f"{least:,} … {most:,}"


# --- the page -------------------------------------------------------------------------------------------------------


def text() -> str:
    """Return the page as it is checked in."""
    version = crd()["spec"]["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    page = _Page()
    wanted = "\n\n".join(_written(page, _Object(path="spec", schema=root["properties"]["spec"], model=JobSpec)))
    is_so = "\n\n".join(_written(page, _Object(path="status", schema=root["properties"]["status"], model=JobStatus)))
    rules = "\n".join(_rules(root))
    return "\n\n".join((_HEAD, rules, wanted, is_so, *_vocabulary(page), *_around(version))) + "\n"


def _written(page: _Page, whole: _Object) -> Iterator[str]:
    for each in list(page.objects(whole)):  # all of them first, since tables point to what comes later
        yield f"{'##' if each is whole else '###'} {each.path}"
        if each.words:
            yield each.words
        yield _fields(page, each, defaults=whole.path == "spec")
        if rules := list(_rules(each.schema)):
            yield "Rules:"
            yield "\n".join(rules)


def _fields(page: _Page, each: _Object, *, defaults: bool) -> str:
    required = each.schema.get("required", ())
    rows = []
    for name, schema, python in each.fields():
        default = "required" if name in required else _default(schema)
        row = (f"`{name}`", page.kind(schema, python), *([default] if defaults else []), schema["description"])
        rows.append(row)
    return _table(("field", "type", *(["default"] if defaults else []), "what"), rows)


def _default(schema: Schema) -> str:
    if "default" not in schema or schema["default"] in ({}, []):
        return ""
    return f"`{json.dumps(schema['default'])}`"


def _rules(schema: Schema) -> Iterator[str]:
    """Yield the sentences with which the API server refuses an object: those about it, and about one of its fields."""
    properties = schema.get("properties", {}).values()
    for each in (schema, *(inner for inner in properties if "properties" not in inner)):
        yield from (f"- {rule['message']}" for rule in each.get("x-kubernetes-validations", ()))


def _vocabulary(page: _Page) -> Iterator[str]:
    yield "## Words and what they mean"
    for name, enum in sorted(page.enums.items()):
        yield f"### {name}"
        yield inspect.getdoc(enum) or ""
        yield _meanings(values(enum), "value")


def _around(version: Schema) -> Iterator[str]:
    """Yield what belongs to a job beside its spec and status."""
    columns = [
        (f"`{it['name']}`", f"`{it['jsonPath']}`", it["description"] + " Only with `-o wide`." * ("priority" in it))
        for it in version["additionalPrinterColumns"]
    ]
    yield "## Columns of `kubectl get fthsdp`"
    yield _table(("column", "of", "what"), columns)
    yield "## Conditions"
    kinds = meanings(ConditionType)
    for kind, words in REASONS.items():
        yield f"### {kind}"
        yield kinds[kind]
        yield _meanings(meanings(words), "reason")
    yield "## Events"
    yield _meanings(meanings(EventReason), "reason")
    yield "## Labels and annotations"
    yield _meanings(_marks(), "name")
    yield "## Environment of a training pod"
    yield (
        "In every container, before the template's own variables, so that those may refer to them, as in"
        " `$(FTHSDP_REPLICA)`. A template that sets one of these is refused, and so is any other name that starts with"
        " `FTHSDP_` or `PET_`, but for those of the [transport](transport.md):"
        f" {', '.join(f'`{name}`' for name in TRANSPORT_ENV)}."
    )
    yield _meanings(pod_environment(), "variable")


def _marks() -> dict[str, str]:
    said = _docstrings_of(names)
    found = (name for name in vars(names) if name.endswith(("_LABEL", "_ANNOTATION")))
    return {getattr(names, name): said.get(name, "") for name in found}


# --- Markdown -------------------------------------------------------------------------------------------------------


def _meanings(words: Mapping[str, str], what: str) -> str:
    return _table((what, "meaning"), [(f"`{word}`", meaning) for word, meaning in words.items()])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _anchor(title: str) -> str:
    """Return the anchor that a heading gets."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page to a file, or print it."""
    return put(text(), arguments, program="python -m fthsdp_operator.reference", what="Write docs/api.md.")


if __name__ == "__main__":
    sys.exit(main())
