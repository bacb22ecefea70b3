# SPDX-License-Identifier: Apache-2.0
"""A disk without space for a new file during a number of attempts."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fleetlight.ps.journal import disk_full_retry


class FullDisk:
    """Refuses the first `tries` to create a file of that name or to write to it."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, tries: int) -> None:
        self._name, self.left = name, tries
        self._open, self._write = os.open, os.write
        self._fds: set[int] = set()
        #: otherwise every second refusal is that of a write
        self.only_open = False
        patch.setattr(os, "open", self.open)
        patch.setattr(os, "write", self.write)
        patch.setattr(disk_full_retry, "_TRY_EVERY_S", 0.0)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """Open a file; refuse to create the one of that name."""
        is_refused = Path(path).name == self._name and flags & os.O_CREAT
        if is_refused and self.left and (self.only_open or self.left % 2):
            self._refuse()
        fd = self._open(path, flags, mode)
        self._fds.discard(fd)
        if is_refused and self.left:
            self._fds.add(fd)
        return fd

    def write(self, fd: int, data: Any) -> int:
        """Write a part of the data, then refuse."""
        if fd in self._fds and self.left:
            self._write(fd, bytes(data)[:3])
            self._refuse()
        return self._write(fd, data)

    def _refuse(self) -> None:
        self.left -= 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
