# SPDX-License-Identifier: Apache-2.0
"""A disk that has no room for a new file, for so many tries."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fleetlight.ps.journal import disk_full_retry as room


class NoRoom:
    """The first `tries` to make a file of that name, or to write to it, are refused."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, tries: int) -> None:
        self._name, self.left = name, tries
        self._open, self._write = os.open, os.write
        self._fds: set[int] = set()
        #: else every second refusal is left to a write
        self.only_open = False
        patch.setattr(os, "open", self.open)
        patch.setattr(os, "write", self.write)
        patch.setattr(room, "_TRY_EVERY_S", 0.0)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """A new file."""
        is_it = Path(path).name == self._name and flags & os.O_CREAT
        if is_it and self.left and (self.only_open or self.left % 2):
            self._refuse()
        fd = self._open(path, flags, mode)
        self._fds.discard(fd)
        if is_it and self.left:
            self._fds.add(fd)
        return fd

    def write(self, fd: int, data: Any) -> int:
        """It takes a part before it refuses."""
        if fd in self._fds and self.left:
            self._write(fd, bytes(data)[:3])
            self._refuse()
        return self._write(fd, data)

    def _refuse(self) -> None:
        self.left -= 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
