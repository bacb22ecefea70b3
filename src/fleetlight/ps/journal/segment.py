# SPDX-License-Identifier: Apache-2.0
"""`Segment`: one file of a log, to which whole records are appended."""

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
#: the most buffers that one system call takes
_BUFFERS = 1024


def segments(folder: Path) -> list[tuple[int, Path]]:
    """The first record and the path of each segment, in order."""
    return sorted((int(path.stem), path) for path in folder.glob(f"[0-9]*{_SUFFIX}"))


def segment_path(folder: Path, first: int) -> Path:
    """The path of the segment that begins with a record."""
    return folder / f"{first:020d}{_SUFFIX}"


class Segment:
    """A new segment, for records from `first` on."""

    def __init__(self, folder: Path, first: int) -> None:
        self.path = segment_path(folder, first)
        self.first = first
        #: bytes of whole records
        self.size = 0
        self._synced = 0
        self._let_go = 0
        #: held during a flush or close: of two flushes the later one must not mark fewer bytes
        self._syncing = threading.Lock()
        self._is_closed = False
        if self.path.exists() and not self.path.stat().st_size:
            # its writer was killed before the first record
            self.path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        with contextlib.ExitStack() as undo:
            # on a full disk records continue in the segment before, and this one must not follow it
            undo.callback(_remove, self.path)
            undo.callback(os.close, self._fd)
            self._marker = FsyncMarker(folder, first)
            undo.callback(self._marker.close)
            sync_folder(folder)
            # until now it marked the segment before, as this one might not have been found
            self._marker.mark(0)
            undo.pop_all()

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append all buffers, or none."""
        end = self.size
        rest = [memoryview(part).cast("B") for part in buffers if len(part)]
        try:
            while rest:
                done = os.pwritev(self._fd, rest[:_BUFFERS], end)
                end += done
                rest = unsent(rest, done)
        except BaseException:
            # if that fails as well, the next record overwrites it, or a reader finds a torn record
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size = end

    @property
    def unsynced(self) -> int:
        """Bytes that may be in the page cache only."""
        return self.size - self._synced

    def sync(self) -> None:
        """Flush the segment to disk, and drop it from the page cache.

        It is read only after a crash, and a growing page cache slows writes. A closed segment was
        flushed before, if it is needed.
        """
        with self._syncing:
            if self._is_closed:
                return
            size = self.size
            os.fdatasync(self._fd)
            self._synced = size
            self._marker.mark(size)
            # a partly filled page would have to be read again
            whole = size - size % mmap.PAGESIZE
            os.posix_fadvise(self._fd, self._let_go, whole - self._let_go, os.POSIX_FADV_DONTNEED)
            self._let_go = whole

    def close(self) -> None:
        """Close the file."""
        with self._syncing:
            self._is_closed = True
            self._marker.close()
            os.close(self._fd)


def _remove(path: Path) -> None:
    # a reader skips an empty file that stays
    with contextlib.suppress(OSError):
        path.unlink()


def cut(path: Path, size: int) -> None:
    """Truncate a file after its whole records."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)
