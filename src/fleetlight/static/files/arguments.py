# SPDX-License-Identifier: Apache-2.0
"""Arguments of operations as JSON, and back without loss.

JSON's own types stay: None, booleans, strings, integers, finite floats, lists.
Every other value becomes an object with one key for its type:

    {"node": "addmm"}   {"dtype": "float32"}   {"float": "inf"}   {"slice": [null, 3, null]}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fleetlight.errors import CheckpointError

#: a value of a JSON document
Json = Any
#: a node in a file: its name, or its number
Reference = Callable[[fx.Node], Json]
#: objects of torch that are found by name
_NAMED: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def pack(value: object, reference: Reference) -> Json:
    """Encode an argument as JSON."""
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": reference(value)}
    if isinstance(value, (int, torch.SymInt)):
        return _whole(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, (list, tuple)):
        items = [pack(item, reference) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = [[pack(key, reference), pack(item, reference)] for key, item in value.items()]
        return {"dict": pairs}
    return _special(value, reference)


def _special(value: object, reference: Reference) -> Json:
    if isinstance(value, complex):
        return {"complex": [pack(value.real, reference), pack(value.imag, reference)]}
    if isinstance(value, slice):
        return {"slice": [pack(v, reference) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, of in _NAMED.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"got an argument of type {type(value).__name__}, expected numbers, strings, values of the "
        "program, types and devices"
    )


def _whole(value: int | torch.SymInt) -> int:
    known = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else int(value)
    if known is None:
        raise CheckpointError(f"got the size {value}, which no node of the program computes")
    return int(known)


def unpack(value: Json, nodes: Mapping[str, fx.Node], device: torch.device | None = None) -> Any:
    """Decode what `pack` encoded; `device` replaces the devices in it."""
    if isinstance(value, list):
        return [unpack(item, nodes, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "device":
        return torch.device(content) if device is None else device
    if kind in _NAMED:
        return named(kind, content)
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {unpack(k, nodes, device): unpack(v, nodes, device) for k, v in content}
    return _GATHERED[kind](unpack(content, nodes, device))


#: types that are made from a list of values
_GATHERED: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "slice": lambda parts: slice(*parts),
    "complex": lambda parts: complex(*parts),
}


def named(kind: str, name: str) -> Any:
    """An object of torch by its name: `named("dtype", "float32")`."""
    found = getattr(torch, name, None)
    if not isinstance(found, _NAMED[kind]):
        raise ValueError(f"torch has no {kind} {name!r}")
    return found
