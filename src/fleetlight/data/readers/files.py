# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the files of a data set, with errors that name them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from fleetlight.errors import DataError
from fleetlight.observe.log import logger

GZIP_MAGIC = b"\x1f\x8b"


def first_file(folders: Iterable[Path], names: Iterable[str]) -> Path | None:
    """The first of `names` that exists in one of `folders`."""
    names = tuple(names)
    candidates = (folder / name for folder in folders for name in names)
    return next((path for path in candidates if path.is_file()), None)


def contents(path: Path) -> bytes:
    """The bytes of a file, unpacked where they are gzip, whatever its name."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from error


def find(root: Path, names: Sequence[str], folders: Sequence[str] = (".",)) -> Path | None:
    """`root` where it is a file, else the first of `names` in it, plain or gzip."""
    if root.is_file():
        return root
    both = [form for name in names for form in (name, f"{name}.gz")]
    return first_file([root / folder for folder in folders], both)


def refuse_absent(name: str, root: Path, names: Sequence[str], allowed: bool) -> None:
    """Log that records are generated in place of absent files, or fail unless `allowed`."""
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
