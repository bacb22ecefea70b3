# SPDX-License-Identifier: Apache-2.0
"""`BlobStore`: large tensors that seldom change, one file each, named by their hash.

A commit lists the blobs that a restart needs, instead of containing their bytes each time.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ComebackError
from fleetlight.files.atomic import replacing, sync_folder
from fleetlight.ps.worker.replay.commit_log import opened, patiently

_NAME = "kept."


class BlobStore:
    """One thread stores blobs for resume points; another may commit these points, in order.

    A restart needs only the blobs of the last two commits.
    """

    def __init__(
        self, folder: Path, patience_s: float, needed: Iterable[str] = (), *, sync: bool = False
    ) -> None:
        """`needed` are the blobs of an earlier incarnation that a restart may still read."""
        self._folder, self._patience_s, self._sync = folder, patience_s, sync
        #: by hash: the last resume point that needs it
        self._last = dict.fromkeys(needed, 0)
        self._point = 0
        self._committed = 0
        self._changing = threading.Lock()
        for path in folder.glob(f"{_NAME}*"):
            if path.name.removeprefix(_NAME) not in self._last:
                path.unlink()

    def next_point(self) -> int:
        """Start the next resume point; return its number."""
        with self._changing:
            self._point += 1
            return self._point

    def put(self, data: NDArray[np.uint8]) -> str:
        """Store a blob, unless it exists; return its name."""
        name = _digest(data.data)
        with self._changing:
            is_there = name in self._last
            self._last[name] = self._point
        if not is_there:
            self._write(name, data)
        return name

    def keep(self, name: str) -> bool:
        """Keep a blob for the current resume point; False if it is deleted."""
        with self._changing:
            is_there = name in self._last
            if is_there:
                self._last[name] = self._point
        return is_there

    def get(self, name: str) -> bytes:
        """Return a blob by its name."""
        path = self._folder / f"{_NAME}{name}"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        if _digest(data) != name:
            raise ComebackError(
                f"{path}: got {len(data)} bytes that are not what this worker wrote there before "
                "its restart; start all processes again"
            )
        return data

    def committed(self, point: int) -> None:
        """Record a committed resume point; delete blobs that no restart needs."""
        with self._changing:
            dropped = [name for name, last in self._last.items() if last < self._committed]
            for name in dropped:
                del self._last[name]
                (self._folder / f"{_NAME}{name}").unlink(missing_ok=True)
            self._committed = point

    def _write(self, name: str, data: NDArray[np.uint8]) -> None:
        """Its name says that it is whole."""
        with replacing(self._folder / f"{_NAME}{name}") as temporary:
            fd = opened(temporary, self._patience_s)
            try:
                patiently(temporary, fd, [data.data], 0, self._patience_s, sync=self._sync)
            finally:
                os.close(fd)
        if self._sync:
            sync_folder(self._folder)


def clear(folder: Path) -> None:
    """Delete all blobs."""
    for path in folder.glob(f"{_NAME}*"):
        path.unlink()


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
