# SPDX-License-Identifier: Apache-2.0
"""Checks objects against schemas of Kubernetes; unlike the server it refuses unknown fields."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

JOBSET = json.loads(Path(__file__).with_name("jobset-v0.12.0.json").read_text())["schema"]

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
_KNOWN = {
    *("type", "properties", "required", "items", "additionalProperties", "enum", "pattern"),
    *("maxItems", "maxLength", "minimum", "anyOf", "x-kubernetes-int-or-string"),
    # rules about changes of an object, and namespaces in templates
    *("x-kubernetes-validations", "x-kubernetes-embedded-resource"),
    "x-kubernetes-preserve-unknown-fields",
}


def problems(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """What is wrong with a value, with the path of each part."""
    unknown = schema.keys() - _KNOWN
    assert not unknown, f"{where}: the schema has {unknown}, which are not checked"
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield f"{where}: got {value!r}, expected a number or a text"
        elif not re.search(schema.get("pattern", ""), str(value)):
            yield f"{where}: got {value!r}, expected {schema['pattern']}"
        return
    if not _is(value, schema["type"]):
        yield f"{where}: got {value!r}, expected {schema['type']}"
        return
    yield from _limits(value, schema, where)
    if isinstance(value, dict):
        yield from _fields(value, schema, where)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from problems(item, schema["items"], f"{where}[{number}]")


def _is(value: Any, name: str) -> bool:
    is_flag = isinstance(value, bool)
    return isinstance(value, _TYPES[name]) and (name == "boolean") == is_flag


def _limits(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: got {value!r}, expected one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where}: got {value!r}, expected {schema['pattern']}"
    if (
        len(value) > schema.get("maxItems", schema.get("maxLength", 1 << 30))
        if (isinstance(value, (str, list)))
        else False
    ):
        yield f"{where}: too long"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{where}: got {value}, expected at least {schema['minimum']}"


def _fields(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name} is missing"
    is_open = not known and others is None
    for name, item in value.items():
        if name in known:
            yield from problems(item, known[name], f"{where}.{name}")
        elif isinstance(others, Mapping):
            yield from problems(item, others, f"{where}.{name}")
        elif not is_open:
            yield f"{where}.{name} is unknown"
