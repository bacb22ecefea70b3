# SPDX-License-Identifier: Apache-2.0
"""`FileTransfer`: transfers checkpoint files between a server and worker 0.

Without a shared folder, worker 0 reads or writes the files piece by piece.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import CheckpointError, ProtocolError

Bytes = NDArray[np.uint8]


class FileTransfer:
    """A temporary folder of a server, created on first use."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._made: tempfile.TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        with self._lock:
            if self._made is None:
                prefix = f"fleet-server{self._server}-"
                self._made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            return Path(self._made.name)

    def take(self, name: str, offset: int, size: int) -> Bytes:
        """Read a piece of a file; shorter or empty at the end of the file."""
        if offset < 0 or size < 0:
            raise ProtocolError(
                f"worker 0 asked for {size} bytes at {offset} of {name}, expected numbers from 0"
            )
        try:
            with self._path(name).open("rb") as file:
                # allocate no more memory than the file has bytes
                end = os.fstat(file.fileno()).st_size
                start = min(offset, end)
                there = min(size, end - start)
                return np.frombuffer(os.pread(file.fileno(), there, start), np.uint8)
        except OSError as error:
            raise self._failure(name, error) from error

    def put(self, name: str, offset: int, data: NDArray[Any]) -> None:
        """Write a piece of a file; pieces come in order, and a repeated one has no effect."""
        path = self._path(name)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._check_follows(name, offset, os.fstat(fd).st_size)
                view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                while view:
                    done = os.pwrite(fd, view, offset)
                    offset, view = offset + done, view[done:]
            finally:
                os.close(fd)
        except OSError as error:
            raise self._failure(name, error) from error

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.cleanup()

    def _path(self, name: str) -> Path:
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            raise ProtocolError(f"worker 0 asked for the file {name!r}, expected a plain name")
        return self.folder / name

    def _check_follows(self, name: str, offset: int, size: int) -> None:
        """Refuse a hole in a file, which could make the file as large as any offset."""
        if not 0 <= offset <= size:
            raise ProtocolError(
                f"worker 0 sent a piece of {name} at {offset}, expected an offset of 0 to {size}: "
                "worker 0 sends pieces in order"
            )

    def _failure(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"server {self._server} could not transfer {name} of its temporary folder: "
            f"{error.strerror or error}"
        )
