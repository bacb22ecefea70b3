# SPDX-License-Identifier: Apache-2.0
"""Python values to JSON and back without loss; tensors inside go to a safetensors file.

What JSON knows stays as it is: None, booleans, strings, integers, finite floats, lists.
The rest becomes an object with one key that says what it is:

    {"tuple": [0.9, 0.999]}   {"float": "inf"}   {"dict": [["a", 1]]}
    {"tensor": "w.exp_avg"}   {"array": ["uint32", [1, 2]]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fleetlight.errors import CheckpointError

#: what a JSON document is made of
Json = Any


def pack(value: object, name: str, tensors: dict[str, Tensor]) -> Json:
    """`value` as JSON; `name` is used in errors and for the tensors, which go to `tensors`."""
    if value is None or type(value) in (bool, str, int):
        return value
    if isinstance(value, np.generic):
        return pack(value.item(), name, tensors)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        return {"dict": [_pack_item(key, item, name, tensors) for key, item in value.items()]}
    if isinstance(value, Tensor):
        return {"tensor": _shelve(value, name, tensors)}
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iuf":
        return {"array": [value.dtype.name, pack(value.tolist(), name, tensors)]}
    raise CheckpointError(
        f"{name} cannot be saved: got a {type(value).__name__}, expected tensors, numbers, "
        f"strings, None, and lists, tuples or dicts of these"
    )


def unpack(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """The Python value that `pack` was given."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return _READERS[kind](content, tensors)


def _pack_item(key: object, item: object, name: str, tensors: dict[str, Tensor]) -> list[Json]:
    return [pack(key, name, tensors), pack(item, f"{name}.{key}", tensors)]


def _shelve(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Two values may ask for one name ("a" in "b.c", "a.b" in "c"); both must keep theirs."""
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _read_tuple(content: Json, tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return tuple(unpack(content, tensors))


def _read_dict(content: Json, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {unpack(key, tensors): unpack(item, tensors) for key, item in content}


def _read_array(content: Json, tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    return np.array(unpack(content[1], tensors), dtype=content[0])


_READERS: Mapping[str, Any] = {
    "tuple": _read_tuple,
    "dict": _read_dict,
    "array": _read_array,
    "tensor": lambda content, tensors: tensors[content],
    "float": lambda content, tensors: float(content),
}
