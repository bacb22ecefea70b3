# SPDX-License-Identifier: Apache-2.0
"""Objects of Kubernetes as YAML, without a library: block style, each text in double quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def dump(objects: Sequence[Mapping[str, Any]]) -> str:
    """The objects as documents."""
    return "".join("---\n" + "".join(f"{line}\n" for line in _lines(one)) for one in objects)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _entry(f"{_key(key)}:", item)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for item in value:
            first, *others = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
    else:
        # JSON's numbers, texts, {} and [] are YAML
        yield json.dumps(value)


def _entry(start: str, item: Any) -> Iterator[str]:
    lines = list(_lines(item))
    is_block = isinstance(item, (Mapping, list, tuple)) and item
    if is_block:
        yield start
        yield from (f"  {line}" for line in lines)
    else:
        yield f"{start} {lines[0]}"


def _key(key: str) -> str:
    # a plain word may be read as a truth value or null
    is_word = key.lower() in ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
    return key if _PLAIN_KEY.fullmatch(key) and not is_word else json.dumps(key)
