# SPDX-License-Identifier: Apache-2.0
"""Tar files of samples for tests."""

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np


def tar_bytes(members: Iterable[tuple[str, bytes]], **settings: object) -> bytes:
    """A tar with these members."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **settings) as tar:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def sample(number: int, width: int = 3) -> list[tuple[str, bytes]]:
    """The members of a sample, whose label is its number."""
    key = f"train/{number:06}"
    return [
        (f"{key}.cls", str(number).encode()),
        (f"{key}.json", json.dumps({"number": number}).encode()),
        (f"{key}.npy", array_bytes(np.full(width, number, np.float32))),
    ]


def array_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def numbered(folder: Path, sizes: Sequence[int]) -> Path:
    """Tars whose samples have consecutive numbers."""
    first = 0
    for n, size in enumerate(sizes):
        members = [one for number in range(first, first + size) for one in sample(number)]
        (folder / f"train-{n:03}.tar").write_bytes(tar_bytes(members))
        first += size
    return folder
