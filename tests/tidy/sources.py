# SPDX-License-Identifier: Apache-2.0
"""The files that the rules are about, read and parsed once."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fleetlight"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def parsed(path: Path) -> ast.Module:
    tree = ast.parse(text(path))
    # trees stay until the exit: a collector that examined them would take ten seconds then
    gc.freeze()
    return tree
