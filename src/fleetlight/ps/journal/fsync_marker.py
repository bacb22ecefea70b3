# SPDX-License-Identifier: Apache-2.0
"""`SyncedBytes`: how much of a journal's newest file is on the disk for sure.

It is written down behind each sync, and is not synced itself: what a machine that has stopped
leaves of it may be old, but was true. What lies before is damaged if it cannot be read; what lies
behind may never have come to the disk.
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
#: first record of the file, bytes, checksum of the start of the machine; and one of all of these
_FACTS, _SUM = struct.Struct("<QQI"), struct.Struct("<I")


def _boot() -> int:
    """Says whether the machine has been started since; 0: nobody knows."""
    try:
        return zlib.crc32(_BOOT.read_bytes())
    except OSError:
        return 0


@dataclasses.dataclass(frozen=True)
class SyncedBytes:
    """What is known when a journal is read."""

    #: of the file it speaks of
    first: int = 0
    size: int = 0
    #: the machine has not stopped since: what was written is there, synced or not
    is_all_there: bool = False

    @classmethod
    def read(cls, folder: Path) -> SyncedBytes:
        """What the writer has left; nothing is known where that makes no sense."""
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
        """The bytes that are on the disk for sure of the file that begins with a record."""
        return self.size if first == self.first else 0


class FsyncMarker:
    """Writes it down."""

    def __init__(self, folder: Path, first: int) -> None:
        self._first, self._boot = first, _boot()
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(folder / _NAME, flags, 0o600)

    def mark(self, size: int) -> None:
        """So many bytes are on the disk."""
        facts = _FACTS.pack(self._first, size, self._boot)
        # one that is too old is true still
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, facts + _SUM.pack(zlib.crc32(facts)), 0)

    def close(self) -> None:
        """Nothing is synced any more."""
        os.close(self._fd)


def unmark(folder: Path) -> None:
    """The journal begins anew."""
    (folder / _NAME).unlink(missing_ok=True)
