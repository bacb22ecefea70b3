# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent: checksummed during the write, flushed before use."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from fleetlight.checkpoint.storage.manifest import FileEntry
from fleetlight.errors import CorruptCheckpointError
from fleetlight.files import atomic

# Small enough to be still in the cache when it is hashed, large enough to make calls cheap.
_CHUNK = 4 << 20


class Writable(Protocol):
    """Anything that takes bytes: a `Sink`, or a buffer in memory."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take all of `data`."""


class FileSink(Writable, Protocol):
    """A new file, described once it is whole."""

    entry: FileEntry


class FileTarget(Protocol):
    """A place for new files: a folder, or one in a bucket."""

    @property
    def location(self) -> str:
        """The path or URL, for other processes."""

    def create(self, name: str) -> contextlib.AbstractContextManager[FileSink]:
        """A new file, which is whole at the end of the block."""


class FolderTarget:
    """Files of a local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def location(self) -> str:
        """The absolute path."""
        return str(self._folder.absolute())

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """See `FileTarget`."""
        with Sink(self._folder / name) as sink:
            yield sink
            sink.flush()


class Sink:
    """A new file that knows its own size and checksum."""

    #: the description of the file, once it is whole
    entry: FileEntry

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._digest = hashlib.sha256()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, data: bytes | memoryview, /) -> None:
        """Append all of `data`."""
        view = memoryview(data)
        while view:
            try:
                done = os.write(self._fd, view[:_CHUNK])
            except OSError as error:
                error.filename = str(self._path)
                raise
            self._digest.update(view[:done])
            self._size += done
            view = view[done:]

    def flush(self) -> FileEntry:
        """Wait until the file is on disk, and describe it."""
        os.fsync(self._fd)
        self.entry = FileEntry(self._path.name, self._size, self._digest.hexdigest())
        return self.entry


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Sink]:
    """Write the new content of a file; readers see the old content or the new."""
    with atomic.replacing(path, unique=True) as temporary, Sink(temporary) as sink:
        yield sink
        sink.flush()
    atomic.sync_folder_if_supported(path.parent)


def verify(path: Path, expected: FileEntry) -> None:
    """Raise if the bytes of a file differ from those that were written."""
    size = path.stat().st_size
    if size != expected.bytes:
        raise CorruptCheckpointError(
            f"{path} was truncated or replaced: got {size} bytes, expected {expected.bytes}; "
            f"load another checkpoint"
        )
    got = _checksum(path)
    if got != expected.sha256:
        raise CorruptCheckpointError(
            f"{path} was changed after it was written: got sha256 {got}, expected "
            f"{expected.sha256}; load another checkpoint"
        )


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()
