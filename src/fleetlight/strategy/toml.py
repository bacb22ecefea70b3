# SPDX-License-Identifier: Apache-2.0
"""Settings as TOML text and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fleetlight.errors import StrategyError
from fleetlight.strategy.settings import Settings


def dumps(settings: Settings) -> str:
    """The settings that differ from their defaults as TOML; nested configs become tables."""
    lines: list[str] = []
    tables: list[str] = []
    for name, value in settings.changed():
        if isinstance(value, Settings):
            inner = [f"{key} = {_literal(v)}" for key, v in value.changed()]
            tables += ["", f"[{name}]", *inner]
        else:
            lines.append(f"{name} = {_literal(value)}")
    return "\n".join([*lines, *tables]).lstrip("\n") + "\n"


def load(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # the same parser, for Python 3.10
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return content
    except OSError as error:
        raise StrategyError(f"cannot be read: {error.strerror}") from None
    # tomllib's errors are ValueErrors, as is the error for a number too long for int()
    except (ValueError, RecursionError) as error:
        raise StrategyError(f"not a TOML file: {error}") from None


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, str):
        # a TOML string has JSON's escapes, but none for surrogates, and must escape DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
