# SPDX-License-Identifier: Apache-2.0
"""The files of tables: where they are, and what to do when they are not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleetlight.data.readers.files import first_file
from fleetlight.errors import DataError
from fleetlight.observe.log import logger


def find(root: Path, names: Sequence[str], folders: Sequence[str] = (".",)) -> Path | None:
    """`root` itself when it is a file, else the first of `names` there, plain or gzipped."""
    if root.is_file():
        return root
    both = [form for name in names for form in (name, f"{name}.gz")]
    return first_file([root / folder for folder in folders], both)


def refuse_absent(name: str, root: Path, names: Sequence[str], allowed: bool) -> None:
    """Say that records are made up in place of absent files, or, unless that is allowed, fail."""
    root = root.absolute()
    there = f"{root}" if root.is_dir() else f"{root} (no such folder or file)"
    looked_for = f"; looked for {' or '.join(names)}, plain or .gz" if names else ""
    if not allowed:
        raise DataError(
            f"{name}: nothing found in {there}{looked_for}. Put "
            "the file there (nothing is downloaded), or pass stand_in=True for generated records "
            "of the same shape"
        )
    logger.warning(
        "%s: no files in %s; using GENERATED records, results say nothing about %s",
        *(name, there, name),
    )
