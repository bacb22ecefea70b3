# SPDX-License-Identifier: Apache-2.0
"""`SyncedBytes`: how much of a journal's newest file is on the disk for sure.

The marker is written after each fsync, and not flushed itself: after a power failure it may be
old, but it was true. Bytes before it that cannot be read are damaged; bytes after it may never have
reached the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import zlib
from pathlib import Path

_NAME = "synced"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
#: first record of the segment, bytes, checksum of the boot id; then a checksum of these
_FACTS, _SUM = struct.Struct("<QQI"), struct.Struct("<I")


def _boot() -> int:
    """A checksum of the boot id, which changes when the machine restarts; 0: unknown."""
    try:
        return zlib.crc32(_BOOT.read_bytes())
    except OSError:
        return 0


@dataclasses.dataclass(frozen=True)
class SyncedBytes:
    """The content of the marker, for the reader of the log."""

    #: the first record of the segment
    first: int = 0
    size: int = 0
    #: the machine has not restarted since: all that was written is there, flushed or not
    is_all_there: bool = False

    @classmethod
    def read(cls, folder: Path) -> SyncedBytes:
        """Read the marker; an unreadable one says nothing."""
        try:
            data = (folder / _NAME).read_bytes()
        except OSError:
            return cls()
        facts, rest = data[: _FACTS.size], data[_FACTS.size :]
        if len(facts) < _FACTS.size or rest != _SUM.pack(zlib.crc32(facts)):
            return cls()
        first, size, boot = _FACTS.unpack(facts)
        return cls(first, size, is_all_there=bool(boot) and boot == _boot())

    def within(self, first: int) -> int:
        """The bytes of the segment that begins with a record that are certainly on disk."""
        return self.size if first == self.first else 0


class FsyncMarker:
    """Writes the marker of one segment."""

    def __init__(self, folder: Path, first: int) -> None:
        self._first, self._boot = first, _boot()
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(folder / _NAME, flags, 0o600)

    def mark(self, size: int) -> None:
        """Record that so many bytes are on disk."""
        facts = _FACTS.pack(self._first, size, self._boot)
        # an old marker is still true
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, facts + _SUM.pack(zlib.crc32(facts)), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def unmark(folder: Path) -> None:
    """Remove the marker: the log starts again."""
    (folder / _NAME).unlink(missing_ok=True)
