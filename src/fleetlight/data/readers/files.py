# SPDX-License-Identifier: Apache-2.0
"""Finding and reading the files of a data set, with errors that name them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

from fleetlight.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"


def first_file(folders: Iterable[Path], names: Iterable[str]) -> Path | None:
    """The first of `names` that exists in one of `folders`."""
    names = tuple(names)
    candidates = (folder / name for folder in folders for name in names)
    return next((path for path in candidates if path.is_file()), None)


def contents(path: Path) -> bytes:
    """The bytes of a file, unpacked when they are gzip, whatever the file is called."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from error
