# SPDX-License-Identifier: Apache-2.0
"""`Segment`: one file of a journal, which grows at its end and is never half written."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from fleetlight.files.atomic import sync_folder
from fleetlight.ps.journal.fsync_marker import FsyncMarker
from fleetlight.wire.plain import Buffer, unsent

_SUFFIX = ".journal"
#: of the system: how many buffers one call takes
_BUFFERS = 1024


def segments(folder: Path) -> list[tuple[int, Path]]:
    """The number of the first record of each file, and the file, in their order."""
    return sorted((int(path.stem), path) for path in folder.glob(f"[0-9]*{_SUFFIX}"))


def segment_path(folder: Path, first: int) -> Path:
    """The file that begins with a record."""
    return folder / f"{first:020d}{_SUFFIX}"


class Segment:
    """A new file, for records from `first` on."""

    def __init__(self, folder: Path, first: int) -> None:
        self.path = segment_path(folder, first)
        self.first = first
        #: bytes of whole records
        self.size = 0
        self._synced = 0
        self._let_go = 0
        #: held while the file is synced or closed: of two who sync, a late one would know of less
        self._syncing = threading.Lock()
        self._is_closed = False
        if self.path.exists() and not self.path.stat().st_size:
            # somebody died over its first record
            self.path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        with contextlib.ExitStack() as undo:
            # a full disk: records may go on in the file before, and this one must not lie behind it
            undo.callback(_remove, self.path)
            undo.callback(os.close, self._fd)
            self._marker = FsyncMarker(folder, first)
            undo.callback(self._marker.close)
            sync_folder(folder)
            # until now it spoke of the file before, as this one might not have been found
            self._marker.mark(0)
            undo.pop_all()

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append all, or nothing."""
        end = self.size
        rest = [memoryview(part).cast("B") for part in buffers if len(part)]
        try:
            while rest:
                done = os.pwritev(self._fd, rest[:_BUFFERS], end)
                end += done
                rest = unsent(rest, done)
        except BaseException:
            # if that fails, too, the next record is written over it, or its beginning is read
            # as what it is: not whole
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size = end

    @property
    def unsynced(self) -> int:
        """Bytes that may be in the system's memory alone."""
        return self.size - self._synced

    def sync(self) -> None:
        """Wait until all of it is on the disk, and let the system use its memory again.

        It is read only after an accident, and ever more memory would be much slower than the same
        again and again. A file that is closed was synced before, if anybody needs it.
        """
        with self._syncing:
            if self._is_closed:
                return
            size = self.size
            os.fdatasync(self._fd)
            self._synced = size
            self._marker.mark(size)
            # a page that is not full yet would have to be read again
            whole = size - size % mmap.PAGESIZE
            os.posix_fadvise(self._fd, self._let_go, whole - self._let_go, os.POSIX_FADV_DONTNEED)
            self._let_go = whole

    def close(self) -> None:
        """Nothing is appended any more."""
        with self._syncing:
            self._is_closed = True
            self._marker.close()
            os.close(self._fd)


def _remove(path: Path) -> None:
    # an empty one that stays is no file to who reads
    with contextlib.suppress(OSError):
        path.unlink()


def cut(path: Path, size: int) -> None:
    """Forget what lies behind the whole records of a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)
