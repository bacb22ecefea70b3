# SPDX-License-Identifier: Apache-2.0
"""Folders, files and class names of the package, counted."""

from __future__ import annotations

import ast
from collections import Counter

from tests.tidy.sources import SOURCES, parsed, relative, text

FOLDER_FILES = 12
FILE_LINES = 40


def crowded_folders() -> dict[str, int]:
    """Folders with more files than one reads as a list."""
    files = Counter(relative(path.parent) for path in SOURCES)
    return {folder: count for folder, count in files.items() if count > FOLDER_FILES}


def small_files() -> list[str]:
    """Files, beside those with a fixed name, that another file could hold."""
    return [
        relative(path)
        for path in SOURCES
        if not path.name.startswith("__") and len(text(path).splitlines()) < FILE_LINES
    ]


def repeated_classes() -> dict[str, int]:
    """Class names with more than one meaning."""
    names = Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    )
    return {name: count for name, count in names.items() if count > 1}
