"""Python values to JSON and back, with their tensors put aside; only these types exist, nothing is ever evaluated.

Numbers, text, None, lists and dicts with text keys stand for themselves; everything else is an object with the key
``$``, its type. Floats survive bit by bit (JSON numbers carry their shortest exact form).
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fthsdp.errors import ConfigError, WireError

__all__ = ["pack", "unpack"]

_TAG = "$"


def pack(value: object, put: Callable[[Tensor], int], *, where: str) -> Any:
    """Return ``value`` as JSON; ``put`` takes each tensor and returns its number.

    Raises ConfigError that names the place (it starts with ``where``) and the type that cannot travel.
    """
    match value:
        case None | bool() | int() | float() | str():
            return _plain(value)
        case list():
            return _pack_items(value, put, where)
        case Tensor() if not isinstance(value, DTensor):
            return {_TAG: "tensor", "number": put(value)}
        case bytes():
            return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
        case tuple() if type(value) is tuple:
            return {_TAG: "tuple", "items": _pack_items(value, put, where)}
        case dict() if type(value) is dict and _TAG not in value and all(type(key) is str for key in value):
            return {key: pack(item, put, where=f"{where}[{key!r}]") for key, item in value.items()}
        case dict() if type(value) in (dict, OrderedDict, Counter):
            return {_TAG: type(value).__name__, "items": [_pack_pair(pair, put, where) for pair in value.items()]}
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which cannot be sent to a replica that catches up:"
        " keep to numbers, text, bytes, plain tensors, and lists, tuples and dicts of them"
    )


def _plain(value: bool | int | float | str | None) -> Any:
    """Strip subclasses (numpy's float64, enums) down to what JSON reads back."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None


def _pack_items(items: Iterable[object], put: Callable[[Tensor], int], where: str) -> list[Any]:
    return [pack(item, put, where=f"{where}[{index}]") for index, item in enumerate(items)]


def _pack_pair(pair: tuple[object, object], put: Callable[[Tensor], int], where: str) -> list[Any]:
    key, item = pair
    return [pack(key, put, where=f"a key of {where}"), pack(item, put, where=f"{where}[{key!r}]")]


def unpack(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what ``pack`` was given, with copies of the tensors; raises WireError for what it cannot have written."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: unpack(item, tensors) for key, item in value.items()}
    try:
        return _unpack_tagged(value, tensors)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise WireError(f"not a value of a snapshot: {value!r:.200}") from error


def _unpack_tagged(value: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    match value[_TAG]:
        case "tensor":
            return tensors[value["number"]].detach().clone()
        case "bytes":
            return base64.b64decode(value["base64"], validate=True)
        case "tuple":
            return tuple(unpack(value["items"], tensors))
        case "dict" | "OrderedDict":
            return dict(unpack(value["items"], tensors))
        case "Counter":
            return Counter(dict(unpack(value["items"], tensors)))
    raise ValueError(value[_TAG])
