# SPDX-License-Identifier: Apache-2.0
"""`BlobStore`: what is large and seldom changes, a file for each, found by what is in it.

A commit says what of it a later life needs, in place of writing all of it down each time.
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
    """One thread puts things there for the moments it passes; another may commit these, in order.

    Of those before the last two commits nobody asks any more.
    """

    def __init__(
        self, folder: Path, patience_s: float, needed: Iterable[str] = (), *, sync: bool = False
    ) -> None:
        """`needed` is what an earlier life has left here that is still asked for."""
        self._folder, self._patience_s, self._sync = folder, patience_s, sync
        #: by what is in it: the last moment that needs it
        self._last = dict.fromkeys(needed, 0)
        self._moment = 0
        self._committed = 0
        self._changing = threading.Lock()
        for path in folder.glob(f"{_NAME}*"):
            if path.name.removeprefix(_NAME) not in self._last:
                path.unlink()

    def next_moment(self) -> int:
        """Another moment: what is put from now on is for that one."""
        with self._changing:
            self._moment += 1
            return self._moment

    def put(self, data: NDArray[np.uint8]) -> str:
        """By which name it is found again; written down only if it is not there yet."""
        name = _digest(data.data)
        with self._changing:
            is_there = name in self._last
            self._last[name] = self._moment
        if not is_there:
            self._write(name, data)
        return name

    def keep(self, name: str) -> bool:
        """What was put by that name is needed still; False where it has gone meanwhile."""
        with self._changing:
            is_there = name in self._last
            if is_there:
                self._last[name] = self._moment
        return is_there

    def get(self, name: str) -> bytes:
        """What was put there by that name."""
        path = self._folder / f"{_NAME}{name}"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        if _digest(data) != name:
            raise ComebackError(
                f"{path}: got {len(data)} bytes that are not what this worker wrote there before "
                "it was started again; start all processes again"
            )
        return data

    def committed(self, moment: int) -> None:
        """A later life begins there, or at the moment committed before."""
        with self._changing:
            dropped = [name for name, last in self._last.items() if last < self._committed]
            for name in dropped:
                del self._last[name]
                (self._folder / f"{_NAME}{name}").unlink(missing_ok=True)
            self._committed = moment

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
    """Leave nothing there."""
    for path in folder.glob(f"{_NAME}*"):
        path.unlink()


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
